"""The Hydra application as a user meets it, on the CPU device."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ("device=cpu", "world_size=1", "seq_len=32", "warmup_iterations=1", "measured_iterations=2")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model=nope"], "model=nope is not known: choose one of bloom-560m, llama3-8b"),
        (["gpu=nope"], "gpu=nope is not known: choose one of a10, a100-40gb"),
        (["batch_size=0"], "batch_size=0 is not valid: give a whole number of 1 or more"),
        (["batch_size=1,x"], "batch_size=x is not valid"),
        (["precision=int3"], "precision=int3 is not valid: choose one of fp32, tf32, bf16, fp16, bf16_pure."),
        (["precision=fp32,int3"], "precision=int3 is not valid"),
        (
            ["device=cpu", "model=llama3-8b"],
            "model=llama3-8b cannot be trained on this host's CPU: 2 ranks need",
        ),
        (["device=cpu", "engine.zero_stage=2"], "engine.zero_stage=2 is not valid: only engine=deepspeed"),
        (["device=cpu", "sweep=../up"], "sweep=../up is not valid: give a plain folder name"),
        (["batchsize=1"], "Could not override 'batchsize'"),
        (["nonsense"], "missing EQUAL"),
        (["search.method=guess"], "search.method=guess is not valid: choose one of ascend, bisect, fit"),
        (["search.points=-1"], "search.points=-1 is not valid"),
        (["search.prior=gut"], "search.prior=gut is not valid: choose none or virtual"),
        (["budget.cells=0"], "budget.cells=0 is not valid"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    run_sweep: Run, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = run_sweep(*arguments)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_help_shows_groups_and_values(run_sweep: Run) -> None:
    done = run_sweep("--help")
    assert done.returncode == 0
    assert "model: bloom-560m, llama3-8b" in done.stdout
    assert "gradient_checkpointing: false" in done.stdout


def test_the_composed_configuration_can_be_shown(run_sweep: Run) -> None:
    done = run_sweep("--cfg", "job", "model=pythia-1.4b", "engine.zero_stage=2")
    assert "name: pythia-1.4b" in done.stdout
    assert "zero_stage: 2" in done.stdout


def test_tab_completion_knows_the_models() -> None:
    environment = os.environ | {"COMP_LINE": "sweep model=ll", "COMP_POINT": "14"}
    done = subprocess.run(
        [sys.executable, "-m", "sweep.run", "-sc", "query=bash"],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["model=llama3-8b", "model=llama3.2-1b"]


def test_a_sweep_leaves_records_a_table_and_charts(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep("-m", *SMALL, "batch_size=1,2", "gradient_checkpointing=false,true")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "results/tiny-cpu/cells.csv").read_text().splitlines()))
    assert [(row["gradient_checkpointing"], row["batch_size"], row["status"]) for row in rows] == [
        ("False", "1", "ok"),
        ("False", "2", "ok"),
        ("True", "1", "ok"),
        ("True", "2", "ok"),
    ]
    assert list((tmp_path / "plots/tiny-cpu").glob("*.png"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plots", "results"]

    again = run_sweep("-m", *SMALL, "batch_size=1,2", "gradient_checkpointing=false,true")
    assert again.returncode == 0
    assert "4 cells of these series are stored already" in again.stdout


@pytest.mark.slow
def test_a_series_ends_at_a_real_out_of_memory(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep(*SMALL, "grid=none", "seq_len=512")
    assert done.returncode == 0, done.stderr
    outcomes = {
        int(row["batch_size"]): row["status"]
        for row in csv.DictReader((tmp_path / "results/tiny-cpu/cells.csv").read_text().splitlines())
    }
    largest = max(size for size, status in outcomes.items() if status == "ok")
    assert outcomes[largest + 1] == "oom"


def test_a_failed_cell_makes_the_exit_code_say_so(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep(*SMALL, "batch_size=1", "grid=none", "model.config.num_attention_heads=7")
    assert done.returncode == 3
    assert "failed" in done.stdout
    assert json.loads(next(tmp_path.glob("results/*/cells/*/record.json")).read_text())["status"] == "failed"


def test_killed_at_any_moment_it_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sweep.run", *SMALL, "grid=none", "batch_size=1,2,3,4"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    sweep = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    cells = tmp_path / "results/tiny-cpu/cells"
    while len(list(cells.glob("*/record.json"))) < 2:
        assert sweep.poll() is None
        time.sleep(0.05)
    while len(list(cells.glob("*"))) < 3:  # the third cell is under way
        time.sleep(0.05)
    children = psutil.Process(sweep.pid).children(recursive=True)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [], "nothing outlives the sweep"
    done_before = {path: path.read_bytes() for path in cells.glob("*/record.json")}
    assert len(done_before) == 2

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = list(cells.glob("*/record.json"))
    assert sorted(json.loads(path.read_text())["spec"]["batch_size"] for path in records) == [1, 2, 3, 4]
    assert all(path.read_bytes() == content for path, content in done_before.items())
    assert list(cells.glob("*/.*partial")) == []
    assert "2 cells of these series are stored already" in done.stdout
