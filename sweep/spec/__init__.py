"""What one cell is. `cell.py` has `CellSpec`; the other modules its parts, and the JSON of all of them."""

from sweep.spec.cell import (
    SCHEMA_VERSION,
    CellSpec,
    DeviceKind,
    DeviceSpec,
    GpuSpec,
    Optimizer,
    Precision,
    SizeAxis,
    cell_id,
)
from sweep.spec.engine import EngineName, EngineSpec
from sweep.spec.fields import SpecError, from_json, positive, to_json
from sweep.spec.model import ModelSpec, Task, Weights
from sweep.spec.savers import Attention, LoraSpec, Loss
from sweep.spec.support import unsupported_reason
from sweep.spec.workload import Lengths, WorkloadName, WorkloadSpec

__all__ = [
    "SCHEMA_VERSION",
    "Attention",
    "CellSpec",
    "DeviceKind",
    "DeviceSpec",
    "EngineName",
    "EngineSpec",
    "GpuSpec",
    "Lengths",
    "LoraSpec",
    "Loss",
    "ModelSpec",
    "Optimizer",
    "Precision",
    "SizeAxis",
    "SpecError",
    "Task",
    "Weights",
    "WorkloadName",
    "WorkloadSpec",
    "cell_id",
    "from_json",
    "positive",
    "to_json",
    "unsupported_reason",
]
