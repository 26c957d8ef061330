"""The launcher with real processes, and the classification of how they ended."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY

from sweep import virtual
from sweep.launch import commands, run_cell
from sweep.launch.classify import classify
from sweep.launch.commands import command, environment
from sweep.launch.process import Ended, end_marked, start_process, watch
from sweep.record import Failure, Phase, RankRecord, Status
from sweep.spec import CellSpec
from sweep.store import Store

MakeSpec = Callable[..., CellSpec]


def run_python(
    program: str, tmp_path: Path, *, timeout: float = 60, failed: Callable[[], bool] = lambda: False
) -> Ended:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    child = start_process(command, os.environ, tmp_path / "out", tmp_path / "err")
    return watch(child, timeout_seconds=timeout, failed_rank=failed)


def test_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    ended = run_python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)", tmp_path)
    assert ended == Ended(exit_code=5)
    assert (tmp_path / "out").read_text() == "out\n"
    assert (tmp_path / "err").read_text() == "err\n"


GRANDCHILD = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_timeout_ends_the_whole_tree(tmp_path: Path) -> None:
    ended = run_python(GRANDCHILD, tmp_path, timeout=2)
    assert ended.timeout_seconds == 2
    assert not psutil.pid_exists(int((tmp_path / "out").read_text()))


def test_one_failed_rank_ends_the_others(tmp_path: Path) -> None:
    ended = run_python(GRANDCHILD, tmp_path, failed=lambda: (tmp_path / "out").read_text() != "")
    assert ended == Ended(exit_code=None)
    assert not psutil.pid_exists(int((tmp_path / "out").read_text()))


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    child = (
        "import time; from sweep.launch.lifeline import die_with_parent\n"
        "die_with_parent(); print(1, flush=True); time.sleep(600)"
    )
    program = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        print(child.pid, flush=True)
        child.wait()
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    pytest.fail("the child outlived its parent")


def rank(number: int, *, failure: Failure | None = None, oom: bool = False, retries: int = 0) -> RankRecord:
    return RankRecord(rank=number, device_name="GPU", capacity_bytes=1, failure=failure, oom=oom, alloc_retries=retries)


OOM = Failure(kind="OutOfMemoryError", message="CUDA out of memory.", phase=Phase.BACKWARD, rank=1)
BUG = Failure(kind="ValueError", message="wrong\nmore", phase=Phase.LOAD, rank=0)


@pytest.mark.parametrize(
    ("ranks", "ended", "status", "reason"),
    [
        ([rank(0), rank(1)], Ended(exit_code=0), Status.OK, None),
        ([rank(0), rank(1, failure=OOM, oom=True)], Ended(exit_code=1), Status.OOM, None),
        ([rank(0, failure=BUG), rank(1, failure=OOM, oom=True)], Ended(exit_code=1), Status.OOM, None),
        ([rank(0, failure=BUG)], Ended(exit_code=None), Status.FAILED, "rank 0: ValueError: wrong"),
        ([rank(0), rank(1, retries=2)], Ended(exit_code=0), Status.THRASHING, "freed its cache 2 times"),
        ([], Ended(exit_code=None, timeout_seconds=900.0), Status.TIMEOUT, "no result within 900 s"),
        ([rank(0)], Ended(exit_code=-9), Status.FAILED, "killed by SIGKILL without writing a record"),
        ([], Ended(exit_code=3), Status.FAILED, "2 ranks ended with exit code 3 without writing a record"),
    ],
)
def test_classification(
    make_spec: MakeSpec,
    tmp_path: Path,
    ranks: list[RankRecord],
    ended: Ended,
    status: Status,
    reason: str | None,
) -> None:
    got, sentence, failure = classify(make_spec(world_size=2), ranks, ended, tmp_path / "none")
    assert got is status
    assert (sentence is None) == (reason is None)
    assert (reason or "") in (sentence or "")
    assert (failure is None) == (status in (Status.OK, Status.THRASHING))


def test_an_allocator_that_ignores_a_setting_is_unsupported(make_spec: MakeSpec, tmp_path: Path) -> None:
    deaf = RankRecord(rank=0, device_name="GPU", capacity_bytes=1, allocator_settings={"expandable_segments": True})
    status, sentence, _ = classify(make_spec(), [deaf], Ended(exit_code=0), tmp_path / "none")
    assert status is Status.UNSUPPORTED
    assert "expandable_segments=False" in str(sentence)


def test_what_would_change_a_result_is_not_inherited(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:1")
    monkeypatch.setenv("WORLD_SIZE", "64")
    variables = environment(make_spec(), "id")
    assert "WORLD_SIZE" not in variables
    assert "PYTORCH_ALLOC_CONF" not in variables
    assert variables["SWEEP_CELL"] == "id"


def test_a_taken_port_does_not_matter(make_spec: MakeSpec, tmp_path: Path) -> None:
    with socket.socket() as other_job:
        with suppress(OSError):  # then somebody else has it, which is as good
            other_job.bind(("127.0.0.1", 29500))
            other_job.listen()
        record = run_cell(make_spec(world_size=2), Store(tmp_path), [])
    assert record.status is Status.OK, record.reason


def test_only_processes_with_the_whole_mark_are_ended() -> None:
    def sleeper(**variables: str) -> "subprocess.Popen[bytes]":
        program = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
        child = subprocess.Popen(program, env=os.environ | variables, stdout=subprocess.PIPE, start_new_session=True)
        assert child.stdout is not None
        with child.stdout:
            child.stdout.readline()
        return child

    left = sleeper(SWEEP_CELL="a", SWEEP_PARENT_PID="1")
    others = [sleeper(SWEEP_CELL="a", SWEEP_PARENT_PID="2"), sleeper(SWEEP_CELL="b", SWEEP_PARENT_PID="1"), sleeper()]
    end_marked({"SWEEP_CELL": "a", "SWEEP_PARENT_PID": "1"})
    left.wait(timeout=10)
    assert not psutil.pid_exists(left.pid)
    assert [other.poll() for other in others] == [None] * 3
    for other in others:
        other.kill()
        other.wait()


def test_several_ranks_are_started_by_torch(make_spec: MakeSpec) -> None:
    line = " ".join(command(make_spec(world_size=2), Path("/cell")))
    assert "sweep.launch.elastic --standalone --nproc-per-node=2 --max-restarts=0" in line
    assert line.endswith("-m sweep.worker /cell")
    assert "elastic" not in " ".join(command(make_spec(), Path("/cell")))


@pytest.mark.parametrize(
    ("torch_version", "variable"),
    [
        ("2.8.0+cu126", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.0", "PYTORCH_ALLOC_CONF"),
        ("2.10.0a0+git1", "PYTORCH_ALLOC_CONF"),
        ("3.0.0", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_allocators_variable_has_the_name_that_this_torch_knows(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, torch_version: str, variable: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:1,expandable_segments:True")
    monkeypatch.setattr("importlib.metadata.version", lambda _name: torch_version)
    monkeypatch.setattr(commands, "visible_gpus", list)
    variables = environment(make_spec(device={"kind": "cuda"}), "id")
    assert {name: value for name, value in variables.items() if "ALLOC_CONF" in name} == {
        variable: "expandable_segments:False"
    }


@pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))
def test_an_allocator_variable_that_torch_does_not_know_is_noticed_by_reading_back(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "allocator_variable", lambda: "PYTORCH_ALLOCATOR")
    device = {"kind": "virtual", "gpu": {"key": "a100-80gb"}}
    record = run_cell(make_spec(device=device, expandable_segments=True), Store(tmp_path), [])
    assert (record.status, record.reason) == (
        Status.UNSUPPORTED,
        "the allocator did not take expandable_segments=True here",
    )


def test_a_rank_knows_nothing_of_sweeps() -> None:
    loaded = "import sys, sweep.worker.train; print([name for name in sys.modules if 'hydra' in name])"
    done = subprocess.run(
        [sys.executable, "-c", loaded],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
