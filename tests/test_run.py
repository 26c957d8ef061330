"""The Hydra application as a user meets it, on the CPU device."""

import csv
import importlib
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

from sweep import models
from sweep.help import COMMANDS

Run = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ("device=cpu", "world_size=1", "seq_len=32", "warmup_iterations=1", "steps=2")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model=nope"], "model=nope is not known: choose one of bert-base, bert-large"),
        (["model.path=nobody/nothing"], "model.path=nobody/nothing is not valid: it is neither a folder nor in the"),
        (["model.path=./nothing"], "model.path=./nothing is not valid: there is no such folder"),
        (["model=path"], "model.path=??? is not valid: give it a value"),
        (["+model.config.foo=1"], "model.config.foo=1 is not valid: a configuration of llama has no such key"),
        (["model.config.num_attention_heads=7"], "model.name=llama3.2-1b is not valid: it cannot be built: "),
        (["gpu=nope"], "gpu=nope is not known: choose one of a10, a100-40gb"),
        (["batch_size=0"], "batch_size=0 is not valid: give a whole number of 1 or more"),
        (["batch_size=1,x"], "batch_size=x is not valid"),
        (["precision=int3"], "precision=int3 is not valid: choose one of fp32, tf32, bf16, fp16, bf16_pure."),
        (["precision=fp32,int3"], "precision=int3 is not valid"),
        (
            ["device=cpu", "model=llama3-8b"],
            "model=llama3-8b cannot be trained on this host's CPU: 2 ranks need",
        ),
        (["device=cpu", "engine.zero_stage=2"], "engine.zero_stage is not valid here: only engine=deepspeed"),
        (["device=cpu", "sweep=../up"], "sweep=../up is not valid: give a plain folder name"),
        (["batchsize=1"], "batchsize is not known: did you mean batch_size?"),
        (["MODEL=tiny"], "MODEL is not known: did you mean model?"),
        (["model=llama3-8b,nope"], "model=nope is not known: choose one of"),
        (["precision=glob(*)"], "precision=glob(*) names no values"),
        (["seed=interval(1,4)"], "seed=interval(1,4) names no values"),
        (["steps=0"], "steps=0 is not valid: give a whole number of 1 or more"),
        (["timeout_seconds=0"], "timeout_seconds=0.0 is not valid: give a number of seconds above 0, or null"),
        (["seed=-1"], "seed=-1 is not valid: give a whole number of 0 or more"),
        (["gradient_clipping=nan"], "gradient_clipping=nan is not valid"),
        (["hydra/sweeper=basic"], "hydra/sweeper=basic cannot run a sweep"),
        (["device.kind=gpu"], "device.kind=gpu is not valid: choose one of auto, cuda, virtual, cpu"),
        (["device=virtual", "gpu.total_memory_bytes=1000"], "gpu.total_memory_bytes=1000 is not valid"),
        (["device=virtual", "gpu.other_processes_bytes=999999999999"], "gpu.other_processes_bytes=999999999999 is not"),
        (["device=virtual", "world_size=1000"], "world_size=1000 is not valid: the virtual device has at most 64"),
        (["nonsense"], "nonsense is neither a command nor of the form key=value"),
        (["gpu=a100"], "did you mean a100-40gb or a100-80gb or a100-pcie-80gb?"),
        (["plotz"], "did you mean sweep plots?"),
        (["model=lama3-8b"], "model=lama3-8b is not known: did you mean llama3-8b or "),
        (["search.method=guess"], "search.method=guess is not valid: choose one of ascend, bisect, fit"),
        (["search.points=-1"], "search.points=-1 is not valid"),
        (["search.prior=gut"], "search.prior=gut is not valid: choose none or virtual"),
        (["seq_len=???"], "seq_len=??? is not valid: one of two is searched at a time: give batch_size"),
        (["search.seq_len_step=0"], "search.seq_len_step=0 is not valid"),
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


def test_help_shows_commands_groups_and_values_with_their_meaning(run_sweep: Run) -> None:
    done = run_sweep("engine=fsdp2", "--help")
    assert done.returncode == 0
    assert all(f"\n{command} " in done.stdout for command in COMMANDS)
    assert "bloom-560m, gemma-2b" in done.stdout
    assert "# Forward passes per optimizer step.\naccumulation: 1" in done.stdout
    assert "reshard_after_forward: null" in done.stdout
    assert "hydra" not in done.stdout


def test_every_command_that_the_help_names_is_there() -> None:
    for module, _ in COMMANDS.values():
        assert callable(importlib.import_module(module).main), module


def test_the_composed_configuration_can_be_shown(run_sweep: Run) -> None:
    done = run_sweep("--cfg", "job", "model=pythia-1.4b", "engine.zero_stage=2")
    assert "name: pythia-1.4b" in done.stdout
    assert "zero_stage: 2" in done.stdout


def test_tab_completion_knows_the_models() -> None:
    environment = os.environ | {"COMP_LINE": "sweep model=llama3", "COMP_POINT": "18"}
    done = subprocess.run(
        [sys.executable, "-m", "sweep.run", "-sc", "query=bash"],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [f"model={name}" for name in models.names() if name.startswith("llama3")]


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
    done = run_sweep(*SMALL, "batch_size=1", "grid=none", "+model.config.attention_dropout=2.0")
    assert done.returncode == 3
    assert "failed" in done.stdout
    assert json.loads(next(tmp_path.glob("results/*/cells/*/record.json")).read_text())["status"] == "failed"


def start_sweep(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A sweep of which the third cell is under way when this returns."""
    sweep = subprocess.Popen(
        [sys.executable, "-m", "sweep.run", *SMALL, "grid=none", "batch_size=1,2,3,4", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # Tests may run in the background of a script, where SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    cells = tmp_path / "results/tiny-cpu/cells"
    while len(list(cells.glob("*/record.json"))) < 2 or len(list(cells.glob("*"))) < 3:
        assert sweep.poll() is None
        time.sleep(0.05)
    return sweep


def statuses(tmp_path: Path) -> dict[int, str]:
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/tiny-cpu/cells/*/record.json")]
    return {record["spec"]["batch_size"]: record["status"] for record in records}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_shows_what_there_is_and_goes_on_later(run_sweep: Run, tmp_path: Path, number: int) -> None:
    sweep = start_sweep(tmp_path)
    children = psutil.Process(sweep.pid).children(recursive=True)
    sweep.send_signal(number)
    shown, _ = sweep.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [], "nothing outlives the sweep"
    assert sweep.returncode == 130
    assert "Interrupted: this is what there is so far" in shown
    assert "largest" in shown
    assert statuses(tmp_path) == {1: "ok", 2: "ok", 3: "interrupted"}
    done = run_sweep(*SMALL, "grid=none", "batch_size=1,2,3,4")
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path) == {1: "ok", 2: "ok", 3: "ok", 4: "ok"}


def test_a_spent_budget_ends_the_sweep_in_good_order(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep(*SMALL, "grid=none", "batch_size=1,2,3", "budget.cells=1")
    assert done.returncode == 0, done.stderr
    assert "budget.cells=1 is spent: 1 of 1 series are not finished" in done.stdout
    assert statuses(tmp_path) == {1: "ok"}


def test_a_dry_run_shows_the_first_cells_and_runs_nothing(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep(*SMALL, "grid=quick", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "tiny ddp, fp32, checkpointing, batch 1" in done.stdout
    assert "2 of 2 series are not finished" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_killed_at_any_moment_it_resumes(run_sweep: Run, tmp_path: Path) -> None:
    sweep = start_sweep(tmp_path)
    cells = tmp_path / "results/tiny-cpu/cells"
    children = psutil.Process(sweep.pid).children(recursive=True)
    sweep.kill()
    sweep.communicate()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [], "nothing outlives the sweep"
    done_before = {path: path.read_bytes() for path in cells.glob("*/record.json")}
    assert len(done_before) == 2

    done = run_sweep(*SMALL, "grid=none", "batch_size=1,2,3,4")
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path) == {1: "ok", 2: "ok", 3: "ok", 4: "ok"}
    assert len(list(cells.glob("*/record.json"))) == 4
    assert all(path.read_bytes() == content for path, content in done_before.items())
    assert list(cells.glob("*/.*partial")) == []
    assert "2 cells of these series are stored already" in done.stdout


def test_commas_within_a_value_do_not_split_the_sweep(run_sweep: Run, tmp_path: Path) -> None:
    for name in ("a,b.txt", "c.txt"):
        (tmp_path / name).write_text("some words\n\nand more")
    text = ("model=tiny", "workload=text", "workload.lengths=maximum", *SMALL, "grid=none", "batch_size=1", "--dry-run")
    one = run_sweep(*text, "workload.path='a,b.txt'")
    assert "1 of 1 series are not finished" in one.stdout, one.stderr
    two = run_sweep(*text, "workload.path='a,b.txt',c.txt")
    assert "2 of 2 series are not finished" in two.stdout, two.stderr


def test_ranks_do_not_run_the_sweep_again(run_sweep: Run, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text("from sweep.run import main\nmain()\n")
    done = run_sweep("--standalone", "--nproc-per-node=2", "again.py", *SMALL, module="torch.distributed.run")
    assert done.returncode != 0
    assert "sweep: this is one of several ranks, and each would run the whole sweep: start it once" in done.stderr
    assert not (tmp_path / "results").exists()
