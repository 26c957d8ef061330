"""One of four real gloo ranks is made to fail: the cell ends soon, says what and who it was, and leaves nothing."""

import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY

from sweep import launch
from sweep.launch import commands, run_cell, stall
from sweep.record import CellRecord, Phase, Status
from sweep.spec import CellSpec
from sweep.store import Store

MakeSpec = Callable[..., CellSpec]
PROMISED_SECONDS = 10

WORKER = """
    # The product's own worker, in which one rank goes wrong in the second iteration's backward pass.
    import os, pathlib, signal, sys, time
    import torch
    from sweep.worker import __main__ as worker, train

    folder, fault = pathlib.Path(sys.argv[-1]), {fault!r}
    iterate = train.iterate

    def faulty(spec, engine, batches, progress):
        backward = engine.backward

        def fail(loss):
            if os.environ["RANK"] == "2" and progress.iteration == 1:
                (folder.parent / "failed_at").write_text(str(time.time()))
                if fault == "allocate":
                    torch.empty(2**40)
                elif fault == "raise":
                    raise RuntimeError(os.environ["MESSAGE"])
                elif fault == "exit":
                    os._exit(1)
                elif fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault == "hang":
                    time.sleep(600)
                elif fault == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
            backward(loss)

        engine.backward = fail
        try:
            iterate(spec, engine, batches, progress)
        finally:
            engine.backward = backward

    train.iterate = faulty
    try:
        code = worker.main()
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 70
    sys.stderr.flush()
    os._exit(code)
"""


@pytest.fixture
def fail(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CellRecord]:
    """Runs four ranks of which rank 2 fails; checks the promises that hold for every fault."""

    def run(fault: str, promised_seconds: float = PROMISED_SECONDS, **changes: object) -> CellRecord:
        (tmp_path / "faulty_worker.py").write_text(textwrap.dedent(WORKER.format(fault=fault)))
        monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{tmp_path}")
        monkeypatch.setattr(commands, "worker_arguments", lambda folder: ["-m", "faulty_worker", str(folder)])
        spec = make_spec(world_size=4, accumulation=1, **changes)
        record = run_cell(spec, Store(tmp_path), [])
        ended_at = time.time()
        failed_at = float((tmp_path / "cells" / "failed_at").read_text())
        assert ended_at - failed_at < promised_seconds
        assert not [p for p in psutil.process_iter() if carries(p, record.cell_id)], "a process is left"
        assert not list((tmp_path / "cells" / record.cell_id).glob("progress*"))
        assert record.failure is not None
        assert record.failure.rank == 2
        assert record.failure.iteration == 1
        assert record.failure.phase is Phase.BACKWARD
        return record

    return run


def carries(process: psutil.Process, cell_id: str) -> bool:
    try:
        return process.environ().get("SWEEP_CELL") == cell_id
    except (psutil.Error, OSError):
        return False


def test_an_allocation_failure(fail: Callable[..., CellRecord]) -> None:
    record = fail("allocate")
    assert record.status is Status.OOM
    assert record.failure is not None
    assert record.failure.requested_bytes == 4 * 2**40


@pytest.mark.slow
def test_an_exit_without_a_word(fail: Callable[..., CellRecord]) -> None:
    record = fail("exit")
    assert record.status is Status.FAILED
    assert str(record.reason).startswith("rank 2 ended with exit code 1 without writing a record")


def test_a_sigkill_from_nowhere(fail: Callable[..., CellRecord]) -> None:
    record = fail("kill")
    assert record.status is Status.FAILED
    assert record.reason == "rank 2 killed by SIGKILL without writing a record"


@pytest.mark.slow
def test_a_sigkill_by_the_kernel_for_want_of_memory(
    fail: Callable[..., CellRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(launch, "oom_kills", lambda: next(counts))
    record = fail("kill")
    assert record.status is Status.HOST_OOM
    assert record.reason == "rank 2 was killed by the kernel: the host had no memory left"


@pytest.mark.parametrize("fault", ["hang", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_hang(fail: Callable[..., CellRecord], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(stall, "LEAST_SECONDS", 2.0)
    monkeypatch.setattr(stall, "TIMES_THE_LONGEST_STEP", 1)
    record = fail(fault)
    assert record.status is Status.TIMEOUT
    assert "the others wait for rank 2, in backward of iteration 1" in str(record.reason)


@pytest.mark.slow
def test_the_timeout_names_the_rank_that_the_others_wait_for(fail: Callable[..., CellRecord]) -> None:
    record = fail("hang", promised_seconds=50, timeout_seconds=45.0)
    assert record.status is Status.TIMEOUT
    assert "no result within 45 s; the others wait for rank 2" in str(record.reason)
