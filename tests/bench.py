"""`make bench`: what this project's own work costs, as ratios measured side by side in one run.

Absolute seconds are printed for orientation; only the ratios mean something on another machine.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from conftest import read_model
from rich.console import Console
from rich.table import Table

from sweep.measure.memory import CpuCounters, PhaseMemory
from sweep.record import Phase
from sweep.spec import CellSpec, from_json
from sweep.store import Store
from sweep.worker.engines import make_engine
from sweep.worker.model import RandomBatches, build_model
from sweep.worker.train import Progress, iterate

ROUNDS = 7


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def side_by_side(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of both, their rounds interleaved so that both see the same machine."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        times[0].append(seconds(first))
        times[1].append(seconds(second))
    return statistics.median(times[0]), statistics.median(times[1])


def small_spec() -> CellSpec:
    content = {
        "model": read_model("tiny"),
        "engine": {"name": "ddp"},
        "device": {"kind": "cpu", "memory_limit_bytes": 2**40},
        "world_size": 1,
        "batch_size": 1,
        "seq_len": 64,
        "precision": "fp32",
    }
    return from_json(CellSpec, content)


class Uninstrumented(PhaseMemory):
    def enter(self, phase: Phase | None) -> None:
        self.phase = phase


def instrumentation() -> tuple[float, float]:
    """One training iteration on the CPU without and with memory counters at the phase edges."""
    spec, device = small_spec(), torch.device("cpu")
    engine = make_engine(spec, device)
    engine.load(lambda dtype: build_model(spec, dtype))
    engine.prepare()
    batches = RandomBatches(spec, 0, device)
    plain = Progress(Uninstrumented(CpuCounters()), iteration=0)
    counted = Progress(PhaseMemory(CpuCounters()), iteration=0)

    def five(progress: Progress) -> None:
        for _ in range(5):
            iterate(spec, engine, batches, progress)

    return side_by_side(lambda: five(plain), lambda: five(counted))


def store_of(folder: Path, cells: int) -> Store:
    from test_store import make_record

    store, spec = Store(folder / str(cells)), small_spec()
    for size in range(1, cells + 1):
        store.cell(str(size)).begin(replace(spec, batch_size=size))
        store.save(make_record(replace(spec, batch_size=size), str(size)))
    return store


def reading() -> tuple[float, float]:
    """Reading 50 records and reading 500: ten times the cells should take about ten times as long."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = store_of(Path(folder), 50), store_of(Path(folder), 500)
        return side_by_side(few.records, many.records)


def main() -> int:
    table = Table("what", "first, s", "second, s", "second / first")
    for name, measure in {
        "training iteration: plain, with memory counters": instrumentation,
        "reading records: 50, 500": reading,
    }.items():
        first, second = measure()
        table.add_row(name, f"{first:.4f}", f"{second:.4f}", f"{second / first:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
