"""The parts of `make bench` about estimated times: how far they are from measured ones, and what counting costs."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from conftest import REPOSITORY, read_model
from rich.console import Console
from rich.table import Table

from sweep import virtual
from sweep.estimate.published import PublishedTable, read_table
from sweep.spec import CellSpec, from_json
from sweep.store import CellDirectory

DATA = REPOSITORY / "tests/data"
PUBLISHED = REPOSITORY / "sweep/studies/published"
ROUNDS = 3


def tables() -> list[PublishedTable]:
    """Every table of measured times that is here, with work counted under the software of its time."""
    work = DATA / "work"
    return [
        read_table(PUBLISHED / "checkpointing_8b.csv", "a100-80gb", work, "8b", largest=13),
        read_table(PUBLISHED / "checkpointing_0.5b.csv", "rtx3090", work, "05b"),
    ]


def estimates(console: Console) -> None:
    """Estimated against measured seconds per iteration: with the default factors, and fitted to half of the rows."""
    for table in tables():
        shown = Table("ckpt", "expandable", "batch", "measured, s", "estimated, s", "error", title=table.name)
        found = table.errors()
        for each, error in zip(table.cells, found, strict=True):
            measured = each.cell.seconds_per_iteration
            values = (each.gradient_checkpointing, each.expandable_segments, each.batch_size)
            shown.add_row(*map(str, values), f"{measured:.4f}", f"{measured * (1 + error):.4f}", f"{error:+.1%}")
        console.print(shown)
        truth, guess = table.lines(), table.lines(found)
        slopes = {on: guess.per_sample[on] / truth.per_sample[on] - 1 for on in (False, True)}
        console.print(
            f"default factors: level {min(found):+.1%} to {max(found):+.1%}; seconds per additional sample "
            f"{slopes[False]:+.1%} without, {slopes[True]:+.1%} with checkpointing; their ratio "
            f"{guess.ratio / truth.ratio - 1:+.1%} ({guess.ratio:.3f} for {truth.ratio:.3f})"
        )
        for first in (0, 1):
            left = table.errors_of_other_half(first)
            console.print(
                f"fitted to every second row from row {first + 1}: the others {min(left):+.1%} to {max(left):+.1%}"
            )


WORKER = """
import sys, time
import sweep.worker.train as train
from sweep.worker.__main__ import main

if sys.argv.pop(2) == "plain":
    train.count_work = lambda *_: {}
run_rank = train.run_rank

def timed(*arguments):
    start = time.process_time()
    records = run_rank(*arguments)
    print("seconds", time.process_time() - start)
    return records

train.run_rank = timed
sys.exit(main())
"""


def large_spec() -> CellSpec:
    content = {
        "model": read_model("llama3-8b"),
        "engine": {"name": "deepspeed", "zero_stage": 3},
        "device": {"kind": "virtual", "gpu": {"key": "a100-80gb"}},
        "world_size": 8,
        "batch_size": 2,
        "seq_len": 2048,
        "precision": "fp16",
    }
    return from_json(CellSpec, content)


def counting() -> tuple[float, float]:
    """A cell of an 8B model on the virtual GPU without counting its work, and with, in seconds of processor time.

    Importing the libraries does not count: a warm cell does not pay for it.
    """
    variables = os.environ | virtual.environment(virtual.gpu("a100-80gb"), world_size=8)
    variables["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY}"
    times: dict[str, list[float]] = {"plain": [], "counted": []}
    for number in range(ROUNDS):
        for how in times:
            with tempfile.TemporaryDirectory() as folder:
                directory = CellDirectory(Path(folder))
                directory.begin(replace(large_spec(), seed=number))
                command = [sys.executable, "-c", WORKER, folder, how]
                done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
                times[how].append(next(float(t[8:]) for t in done.stdout.splitlines() if t.startswith("seconds ")))
                work = json.loads(directory.rank_path(0).read_text(encoding="utf-8"))["work"]
                assert bool(work) == (how == "counted")
    return statistics.median(times["plain"]), statistics.median(times["counted"])
