"""A real GPU's limit, guessed on the virtual one: seconds there save cells that cost minutes here."""

from dataclasses import replace

from sweep import virtual
from sweep.launch import run_cell
from sweep.plan import Outcome, Search, limits, next_batch_size, outcome_of
from sweep.spec import CellSpec, DeviceKind, DeviceSpec, GpuSpec
from sweep.store import Store


def virtual_twin(spec: CellSpec, gpu_name: str) -> CellSpec | None:
    """The same cell on a virtual GPU of that name, as torch prints it; None where no profile has the name."""
    key = next((gpu.key for gpu in virtual.gpus().values() if gpu.name == gpu_name), None)
    if key is None:
        return None
    return replace(spec, device=DeviceSpec(kind=DeviceKind.VIRTUAL, gpu=GpuSpec(key=key)), measured_iterations=1)


def virtual_limit(spec: CellSpec, gpu_name: str, store: Store, search: Search) -> int | None:
    """The largest batch size that fits the virtual twin of this series; None where there is none to ask."""
    twin = virtual_twin(spec, gpu_name)
    if twin is None or virtual.check() is not None:
        return None
    outcomes: dict[int, Outcome] = {}
    search = replace(search, points=0, batch_sizes=None)
    while (size := next_batch_size(outcomes, search)) is not None:
        record = run_cell(replace(twin, batch_size=size), store, [])
        outcomes[size] = outcome_of(record)
    return limits(outcomes).fits or None
