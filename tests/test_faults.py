"""Two hundred cells in a row with random faults: the sweep finishes, and every cell has one status."""

import collections
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY
from faulty_sweep import FAULTS, fault_of

CELLS = 200
WANTED = {
    "none": "ok",
    "orphan": "ok",
    "kill": "failed",
    "exit": "failed",
    "hang": "timeout",
    "garbage": "failed",
    "truncated": "failed",
    "full disk": "failed",
    "full results": "ok",
    "no folder": "failed",
}
LOST = ("full results", "no folder")
"""The cell's folder cannot hold a record: it is kept beside it."""


@pytest.mark.slow
def test_two_hundred_cells_with_random_faults(tmp_path: Path) -> None:
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | {"SWEEP_CELL": "another sweep's"}
    )
    before = {process.pid for process in psutil.process_iter()}
    seeds = ",".join(map(str, range(CELLS)))
    arguments = ["device=cpu", "world_size=1", "grid=none", "batch_size=1", f"seed={seeds}", "sweep=faults"]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests/faulty_sweep.py"), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 3, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    folder = tmp_path / "results/faults"
    paths = [*folder.glob("cells/*/record.json"), *folder.glob("lost/*.json")]
    records = [(path, json.loads(path.read_text())) for path in paths]
    statuses = {record["spec"]["seed"]: record["status"] for _, record in records}
    assert len(records) == len(statuses) == CELLS, "every cell has one and none has two"
    assert statuses == {seed: WANTED[fault_of(seed)] for seed in range(CELLS)}
    assert {path.parent.name == "lost" for path, r in records if fault_of(r["spec"]["seed"]) in LOST} == {True}
    assert {path.parent.name == "lost" for path, r in records if fault_of(r["spec"]["seed"]) not in LOST} == {False}
    rows = list(csv.DictReader((folder / "cells.csv").read_text().splitlines()))
    assert {row["cell_id"]: row["status"] for row in rows} == {r["cell_id"]: r["status"] for _, r in records}
    assert len(rows) == CELLS
    assert set(collections.Counter(map(fault_of, range(CELLS)))) == set(FAULTS), "every fault has occurred"

    assert bystander.poll() is None, "only its own processes are touched"
    bystander.kill()
    bystander.wait()
    left = [p for p in psutil.process_iter() if p.pid not in before and str(tmp_path) in " ".join(command_of(p))]
    assert left == []
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_results_that_cannot_be_written_at_all_end_the_sweep_in_one_sentence(tmp_path: Path) -> None:
    seeds = [seed for seed in range(200) if fault_of(seed) == "none"][:3]
    done = subprocess.run(
        [
            *(sys.executable, str(REPOSITORY / "tests/faulty_sweep.py"), "device=cpu", "world_size=1", "grid=none"),
            *("batch_size=1", f"seed={','.join(map(str, seeds))}", "sweep=full"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "FULL_FROM_SEED": str(seeds[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("sweep: the results cannot be written: No space left on device (results/full/lost/")
    (path,) = tmp_path.glob("results/full/cells/*/record.json")
    assert json.loads(path.read_text())["spec"]["seed"] == seeds[0], "what was measured before is kept"


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_two_sweeps_into_one_folder(tmp_path: Path) -> None:
    good = [str(seed) for seed in range(200) if fault_of(seed) == "none"][:6]
    arguments = ["device=cpu", "world_size=1", "grid=none", "batch_size=1", "sweep=both"]

    def start(seeds: list[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, str(REPOSITORY / "tests/faulty_sweep.py"), *arguments, f"seed={','.join(seeds)}"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "FAKE_WORK_SECONDS": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    both = [start(good[:4]), start(good[2:])]
    ended = [(sweep.communicate(timeout=300)[1], sweep.returncode) for sweep in both]
    refused = [
        i for i, (said, _) in enumerate(ended) if "another sweep is writing to results/both; wait for it" in said
    ]
    assert len(refused) == 1, ended
    assert ended[1 - refused[0]][1] == 0

    def seeds() -> list[str]:
        paths = tmp_path.glob("results/both/cells/*/record.json")
        records = [json.loads(path.read_text()) for path in paths]
        assert {record["status"] for record in records} == {"ok"}
        return sorted(str(record["spec"]["seed"]) for record in records)

    assert seeds() == sorted(good[2:] if refused == [0] else good[:4])
    again = start(good[:4] if refused == [0] else good[2:])
    again.communicate(timeout=300)
    assert again.returncode == 0
    assert seeds() == sorted(good), "none lost, none twice"
