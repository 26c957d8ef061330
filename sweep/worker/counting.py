"""Counting the work of an iteration, for an estimate of its time, once the cell is done."""

import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from sweep.estimate.count import count_iteration
from sweep.measure.memory import CudaCounters, PhaseMemory
from sweep.spec import CellSpec, DeviceKind


def is_countable(spec: CellSpec) -> bool:
    """Whether one iteration, counted on the first device, stands for all that takes time.

    It does not where batches differ, compiled code hides its operators, several devices take turns in one process, or
    the CPU does a part of the work.
    """
    if spec.device.kind is not DeviceKind.VIRTUAL or spec.processes != spec.world_size or spec.compile:
        return False
    on_host = spec.engine.optimizer_offload or spec.engine.parameter_offload or spec.engine.cpu_offload
    return spec.workload.full_length and not on_host


def count_work(once_more: Callable[[PhaseMemory], None], device: torch.device, directory: Path) -> Mapping[str, float]:
    """The work of one more iteration, after all else is known: it must not change a figure. Empty where it fails."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        work = count_iteration(lambda: once_more(PhaseMemory(CudaCounters(device))), multiprocessors)
        work.save(directory)
    except Exception:  # the cell is good all the same
        traceback.print_exc(file=sys.stderr)
        return {}
    return work.totals()
