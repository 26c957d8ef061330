"""Two hundred cells in a row with random faults: the sweep finishes, and every cell has one status."""

import collections
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
    "full results": None,
    "no folder": None,
}
"""None: the folder cannot hold a record; the screen tells of the failure and the cell runs again next time."""


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
        timeout=850,
        check=False,
    )
    assert done.returncode == 3, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/faults/cells/*/record.json")]
    statuses = {record["spec"]["seed"]: record["status"] for record in records}
    assert len(records) == len(statuses), "no cell has two"
    expected = {seed: wanted for seed in range(CELLS) if (wanted := WANTED[fault_of(seed)]) is not None}
    assert statuses == expected
    assert set(collections.Counter(map(fault_of, range(CELLS)))) == set(FAULTS), "every fault has occurred"

    assert bystander.poll() is None, "only its own processes are touched"
    bystander.kill()
    bystander.wait()
    left = [p for p in psutil.process_iter() if p.pid not in before and str(tmp_path) in " ".join(command_of(p))]
    assert left == []
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


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
