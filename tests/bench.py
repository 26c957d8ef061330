"""`make bench`: what this project's own work costs, as ratios measured side by side in one run.

Absolute seconds are printed for orientation; only the ratios mean something on another machine.
"""

import functools
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import find_executable_batch_size
from bench_estimate import counting, estimates
from conftest import REPOSITORY, read_model
from rich.console import Console
from rich.table import Table

from sweep import plots, virtual
from sweep.launch import run_cell
from sweep.launch.progress import ProgressFile
from sweep.measure.memory import CpuCounters, PhaseMemory
from sweep.measure.timing import CpuTimer
from sweep.plan import Outcome, Search, SearchMethod, limits, next_batch_size, outcome_of
from sweep.record import CellRecord, Phase, Status
from sweep.report import markdown, page, print_summary
from sweep.spec import CellSpec, Precision, from_json, to_json
from sweep.store import Store
from sweep.worker.engines import make_engine
from sweep.worker.model import build_model
from sweep.worker.random_tokens import RandomBatches
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
    """One training iteration on the CPU without and with what is done at the phase edges: counters, marks, progress."""
    spec, device = small_spec(), torch.device("cpu")
    engine = make_engine(spec, device)
    engine.load(lambda dtype: build_model(spec, dtype))
    engine.prepare()
    batches = RandomBatches(spec, 0, device)
    plain = Progress(Uninstrumented(CpuCounters()), iteration=0)
    timer = CpuTimer()
    timer.start()

    def one(progress: Progress) -> None:
        iterate(spec, engine, batches, progress)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other wherever the machine does something else
    with tempfile.TemporaryDirectory() as folder:
        counted = Progress(PhaseMemory(CpuCounters()), ProgressFile(Path(folder), 0), timer=timer, iteration=0)
        one(plain)
        both = side_by_side(lambda: one(plain), lambda: one(counted))
    torch.set_num_threads(threads)
    return both


EDGES = """
import sys, tempfile, time
from pathlib import Path
import torch
from sweep.launch.progress import ProgressFile
from sweep.measure.memory import CudaCounters, PhaseMemory
from sweep.measure.nvml import NvmlSampler
from sweep.measure.timing import CudaTimer, Part
from sweep.record import Phase
from sweep.worker.train import Progress

device = torch.device("cuda", 0)
torch.empty(1, device=device)
with tempfile.TemporaryDirectory() as folder, NvmlSampler() as nvml:
    nvml.bind(str(torch.cuda.get_device_properties(device).uuid))
    timer = CudaTimer()
    progress = Progress(PhaseMemory(CudaCounters(device)), ProgressFile(Path(folder), 0), nvml, timer, iteration=0)
    timer.start()
    start = time.perf_counter()
    for _ in range(200):
        timer.mark(Part.DATA)
        progress.memory.enter(Phase.FORWARD)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            progress.enter(phase)
        timer.lap()
    print((time.perf_counter() - start) / 200)
"""
TARGET_SECONDS = 0.05


def edges_on_the_virtual_gpu() -> tuple[float, float]:
    """An iteration of 50 ms, and the host's cost of all that is done at its edges: counters, CUDA events, progress.

    The virtual GPU's events cost the host less than a real one's; what PyTorch does for them is the same.
    """
    variables = os.environ | virtual.environment(virtual.gpu("a100-80gb"))
    variables["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY}"
    done = subprocess.run([sys.executable, "-c", EDGES], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return TARGET_SECONDS, float(done.stdout)


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


class Counted:
    """Cells of one series on the virtual GPU: how many were run, and how long they took."""

    def __init__(self, folder: Path) -> None:
        content = {
            "model": read_model("llama3.2-1b"),
            "engine": {"name": "ddp"},
            "device": {"kind": "virtual", "gpu": {"key": "a100-80gb"}},
            "world_size": 1,
            "batch_size": 1,
            "seq_len": 2048,
            "gradient_checkpointing": True,
            # Without them, fragmentation lets some sizes fail that are smaller than the largest that fits.
            "expandable_segments": True,
            "measured_iterations": 1,
        }
        self._spec = from_json(CellSpec, content)
        self._store = Store(folder)
        self.cells, self.seconds = 0, 0.0

    def run(self, size: int) -> CellRecord:
        start = time.perf_counter()
        record = run_cell(replace(self._spec, batch_size=size), self._store, [])
        self.cells += 1
        self.seconds += time.perf_counter() - start
        return record


def our_search(series: Counted, method: SearchMethod) -> int:
    outcomes: dict[int, Outcome] = {}
    while (size := next_batch_size(outcomes, Search(method=method, points=0))) is not None:
        outcomes[size] = outcome_of(series.run(size))
    return limits(outcomes).fits


def executable_batch_size(series: Counted) -> int:
    """accelerate's decorator as it is: from 128, a tenth less after each out-of-memory."""

    @find_executable_batch_size(starting_batch_size=128)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        if series.run(batch_size).status is Status.OOM:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    found: int = train()
    return found


def halving(series: Counted) -> int:
    size = 128
    while size > 1 and series.run(size).status is Status.OOM:
        size //= 2
    return size


def searches(console: Console) -> None:
    """Every search on one series (llama3.2-1b, one A100-80GB, checkpointing), each from an empty store."""
    table = Table("search", "cells", "seconds", "cells / fit's", "largest reported")
    ways: dict[str, Callable[[Counted], int]] = {
        **{method.value: functools.partial(our_search, method=method) for method in reversed(SearchMethod)},
        "accelerate's find_executable_batch_size": executable_batch_size,
        "halving from 128": halving,
    }
    fit_cells = 0
    for name, search in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            series = Counted(Path(folder))
            largest = search(series)
        fit_cells = fit_cells or series.cells
        table.add_row(name, str(series.cells), f"{series.seconds:.1f}", f"{series.cells / fit_cells:.1f}", str(largest))
    console.print(table)


def ten_thousand(folder: Path) -> Store:
    """500 series of 20 batch sizes with two ranks each, timed; written without fsync, which is not what is measured."""
    from test_store import make_record

    store, spec = Store(folder / "large"), small_spec()
    axes = itertools.product((False, True), (False, True), list(Precision), range(1, 26), range(1, 21))
    for number, (checkpointing, expandable, precision, accumulation, size) in enumerate(axes):
        cell = replace(
            spec,
            gradient_checkpointing=checkpointing,
            expandable_segments=expandable,
            precision=precision,
            accumulation=accumulation,
            batch_size=size,
        )
        path = store.cell(f"{number:016x}").record_path
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(to_json(make_record(cell, f"{number:016x}")), indent=1))
    return store


def scale(console: Console) -> None:
    """What a results folder of 10,000 cells costs to read and to show."""
    table = Table("10,000 cells", "s")
    with tempfile.TemporaryDirectory() as folder:
        store = ten_thousand(Path(folder))
        table.add_row("load, without an index", f"{seconds(Store(store.path).records):.2f}")
        table.add_row("load, from the index", f"{seconds(Store(store.path).records):.2f}")
        records = store.records()
        table.add_row("load again in one process", f"{seconds(store.records):.2f}")
        table.add_row(
            "summary on screen", f"{seconds(lambda: print_summary(Console(file=io.StringIO()), records)):.2f}"
        )
        table.add_row("summary.md", f"{seconds(lambda: markdown('large', records)):.2f}")
        table.add_row("report.html, charts included", f"{seconds(lambda: page('large', records)):.2f}")
        table.add_row("charts as PNG and SVG", f"{seconds(lambda: plots.draw(store, Path(folder) / 'plots')):.2f}")
    console.print(table)


def main() -> int:
    if sys.argv[1:] == ["scale"]:
        scale(Console())
        return 0
    table = Table("what", "first, s", "second, s", "second / first")
    for name, measure in {
        "training iteration on the CPU: plain, with all instruments": instrumentation,
        "reading records: 50, 500": reading,
    }.items():
        first, second = measure()
        table.add_row(name, f"{first:.4f}", f"{second:.4f}", f"{second / first:.2f}")
    if virtual.check() is None:
        first, second = edges_on_the_virtual_gpu()
        name = "50 ms, and the instruments of an iteration on the virtual GPU"
        table.add_row(name, f"{first:.4f}", f"{second:.4f}", f"{second / first:.4f}")
        first, second = counting()
        name = "a cell of an 8B model on the virtual GPU: its work not counted, counted"
        table.add_row(name, f"{first:.4f}", f"{second:.4f}", f"{second / first:.2f}")
    console = Console()
    console.print(table)
    estimates(console)
    scale(console)
    if (problem := virtual.check()) is None:
        searches(console)
    else:
        console.print(f"no searches: {problem}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
