"""The estimate of one cell, from the work that its worker left in its folder."""

from pathlib import Path

from sweep import virtual
from sweep.estimate.factors import CALIBRATION, calibration_of
from sweep.estimate.model import estimate
from sweep.estimate.work import read_work
from sweep.record import TimeEstimate
from sweep.spec import CellSpec, DeviceKind


def estimate_of(spec: CellSpec, directory: Path, calibrations: Path = CALIBRATION) -> TimeEstimate | None:
    """None for other devices than the virtual one, and where the work was not counted or a rate is not known."""
    if spec.device.kind is not DeviceKind.VIRTUAL or spec.device.gpu is None:
        return None
    work = read_work(directory)
    gpu = virtual.gpu(spec.device.gpu.key)
    return None if work is None else estimate(work, gpu, calibration_of(gpu.key, calibrations))
