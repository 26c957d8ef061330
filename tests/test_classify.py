"""What is told apart when a rank wrote nothing, and what an exception in a rank means."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

from sweep import virtual
from sweep.launch import run_cell
from sweep.launch.classify import Clues, classify
from sweep.launch.host_memory import oom_kills
from sweep.launch.process import Ended
from sweep.launch.progress import ProgressFile, RankProgress, farthest_behind, read_ended, read_progress
from sweep.launch.stacks import odd_one_out
from sweep.launch.stall import StallDetector
from sweep.record import Failure, Phase, RankRecord, Status
from sweep.spec import CellSpec
from sweep.store import Store
from sweep.worker.failure import Cause, Free, cause_of

MakeSpec = Callable[..., CellSpec]
GIB = 2**30
VIRTUAL = {"kind": "virtual", "gpu": {"key": "a100-80gb"}}
FULL, EMPTY, UNKNOWN = Free(100 << 20, 80 * GIB), Free(70 * GIB, 80 * GIB), Free(None, 80 * GIB)


@pytest.mark.parametrize(
    ("error", "free", "cause"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), EMPTY, Cause.DEVICE_MEMORY),
        (RuntimeError("CUDA error: out of memory"), FULL, Cause.DEVICE_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory", 2), FULL, Cause.DEVICE_MEMORY),
        (RuntimeError("CUDA driver error: out of memory"), FULL, Cause.DEVICE_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), FULL, Cause.DEVICE_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), FULL, Cause.DEVICE_MEMORY),
        (RuntimeError("NCCL error: unhandled cuda error, 'out of memory'"), FULL, Cause.DEVICE_MEMORY),
        (
            RuntimeError('!handles_.at(i) INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"'),
            FULL,
            Cause.DEVICE_MEMORY,
        ),
        # The same words with room to spare are something else.
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), EMPTY, Cause.OTHER),
        (RuntimeError("NCCL error: unhandled cuda error"), EMPTY, Cause.OTHER),
        (RuntimeError('INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"'), EMPTY, Cause.OTHER),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), UNKNOWN, Cause.OTHER),
        # Pinned memory of an offloading engine: the device's words, the host's memory.
        (RuntimeError("CUDA error: out of memory"), EMPTY, Cause.HOST_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), EMPTY, Cause.HOST_MEMORY),
        (MemoryError(), EMPTY, Cause.HOST_MEMORY),
        (MemoryError(), None, Cause.DEVICE_MEMORY),
        # Never a matter of memory, whatever is free.
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FULL, Cause.OTHER),
        (RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"), FULL, Cause.OTHER),
        (RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false."), FULL, Cause.OTHER),
        (RuntimeError("no kernel image is available"), FULL, Cause.OTHER),
    ],
)
def test_what_an_exception_means(error: BaseException, free: Free | None, cause: Cause) -> None:
    assert cause_of(error, free) is cause


@pytest.mark.parametrize(
    ("last_words", "device", "status"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", VIRTUAL, Status.OOM),
        ("torch.cuda.OutOfMemoryError: x", VIRTUAL, Status.OOM),
        ("CUBLAS_STATUS_ALLOC_FAILED", VIRTUAL, Status.OOM),
        ("CUDA out of memory\nCUDA error: an illegal memory access was encountered", VIRTUAL, Status.FAILED),
        ("triton: out of resource: shared memory", VIRTUAL, Status.FAILED),
        ("terminate called after throwing an instance of 'std::bad_alloc'", VIRTUAL, Status.HOST_OOM),
        ("terminate called after throwing an instance of 'std::bad_alloc'", None, Status.OOM),
        ("Segmentation fault", VIRTUAL, Status.FAILED),
        ("", VIRTUAL, Status.FAILED),
    ],
)
def test_last_words_are_a_fallback(
    make_spec: MakeSpec, tmp_path: Path, last_words: str, device: dict[str, object] | None, status: Status
) -> None:
    (tmp_path / "stderr").write_text(last_words)
    spec = make_spec(device=device) if device else make_spec()
    got, sentence, failure = classify(spec, [], Ended(exit_code=-6), tmp_path / "stderr")
    assert got is status
    assert str(sentence).startswith("the process killed by SIGABRT without writing a record")
    assert failure is not None
    assert failure.rank == 0


def rank(number: int, **fields: object) -> RankRecord:
    return RankRecord(rank=number, device_name="GPU", capacity_bytes=1, **fields)  # type: ignore[arg-type]


LOST = Failure(kind="RuntimeError", message="[gloo/pair.cc] Connection closed by peer [127.0.0.1]", rank=0)
PINNED = Failure(kind="RuntimeError", message="CUDA error: out of memory\nmore", rank=1)
INERT = Failure(kind="NotInEffectError", message="gradient_checkpointing=true is not in effect", rank=0)


def test_a_rank_that_lost_its_peers_is_not_the_one_that_failed(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec, ended = make_spec(world_size=2), Ended(exit_code=1)
    clues = Clues(exit_codes={1: -11, 0: 70})
    status, sentence, failure = classify(spec, [rank(0, failure=LOST)], ended, tmp_path / "none", clues)
    assert (status, sentence) == (Status.FAILED, "rank 1 killed by SIGSEGV without writing a record")
    assert failure is not None
    assert failure.rank == 1
    bug = Failure(kind="ValueError", message="wrong", rank=1)
    _, sentence, _ = classify(spec, [rank(0, failure=LOST), rank(1, failure=bug)], ended, tmp_path / "none")
    assert sentence == "rank 1: ValueError: wrong"


def test_the_hosts_memory_is_not_the_devices(make_spec: MakeSpec, tmp_path: Path) -> None:
    ranks = [rank(0), rank(1, failure=PINNED, host_oom=True)]
    status, sentence, _ = classify(make_spec(world_size=2), ranks, Ended(exit_code=1), tmp_path / "none")
    assert status is Status.HOST_OOM
    assert sentence == "rank 1: the host had no memory left: CUDA error: out of memory"


def test_a_configuration_without_effect_is_unsupported(make_spec: MakeSpec, tmp_path: Path) -> None:
    ranks = [rank(0, failure=INERT)]
    status, sentence, _ = classify(make_spec(), ranks, Ended(exit_code=70), tmp_path / "none")
    assert (status, sentence) == (Status.UNSUPPORTED, INERT.message)


def test_still_growing_is_told(make_spec: MakeSpec, tmp_path: Path) -> None:
    ranks = [rank(0, reserved_by_iteration_bytes=(1 << 30, 3 << 30))]
    status, sentence, _ = classify(make_spec(), ranks, Ended(exit_code=0), tmp_path / "none")
    assert (status, sentence) == (
        Status.OK,
        "still growing: reserved memory rose by 2048 MiB while it was measured",
    )


def test_a_record_that_makes_no_sense_is_a_failure(make_spec: MakeSpec, tmp_path: Path) -> None:
    clues = Clues(unreadable={1: "Expecting value"})
    status, sentence, _ = classify(make_spec(world_size=2), [rank(0)], Ended(exit_code=0), tmp_path / "none", clues)
    assert (status, sentence) == (Status.FAILED, "rank 1 left a record that cannot be read: Expecting value")


@pytest.mark.parametrize("version", [1, 2])
def test_the_kernels_counters_are_read_in_both_versions(tmp_path: Path, version: int) -> None:
    line = "4:memory:/a/b" if version == 1 else "0::/a/b"
    name = "memory/a/b/memory.oom_control" if version == 1 else "a/b/memory.events"
    counter = tmp_path / "sys/fs/cgroup" / name
    for path, text in (
        (tmp_path / "proc/self/cgroup", f"9:cpu:/\n{line}\n"),
        (tmp_path / "proc/vmstat", "pgfault 9\noom_kill 2\n"),
        (counter, "oom_kill_disable 0\nlow 0\noom_kill 5\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kills(tmp_path) == 7
    counter.write_text("oom_kill 6\n")
    assert oom_kills(tmp_path) == 8


def test_no_counters_are_no_kills(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
    assert oom_kills() >= 0


def progress(number: int, beats: int) -> RankProgress:
    return RankProgress(rank=number, pid=1, beats=beats, phase=Phase.FORWARD, iteration=1)


def test_who_the_others_wait_for() -> None:
    behind = farthest_behind([progress(0, 5), progress(1, 4), progress(2, 5)])
    assert behind is not None
    assert behind.rank == 1
    assert farthest_behind([progress(0, 4), progress(1, 4), progress(2, 5)]) is None
    assert farthest_behind([]) is None

    waiting, working = '  File "/x/torch/autograd/graph.py", line 1', '  File "/x/model.py", line 9'
    assert odd_one_out({0: waiting, 1: waiting, 2: working}) == 2
    assert odd_one_out({0: waiting, 1: ""}) == 1
    assert odd_one_out({0: waiting, 1: waiting}) is None
    assert odd_one_out({0: waiting}) is None


def test_progress_is_written_in_place_and_read_back(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, 3)
    file.beat(Phase.OPTIMIZER, 123456)
    file.beat(Phase.LOAD, None)
    (tmp_path / "progress4.json").write_text("garbage")
    (found,) = read_progress(tmp_path)
    assert (found.rank, found.beats, found.phase, found.iteration) == (3, 3, Phase.LOAD, None)
    assert found.alive
    assert found.sentence == "in load"
    (tmp_path / "ended.json").write_text("[1")
    assert read_ended(tmp_path) == {}


def test_a_stall_is_judged_by_the_cells_own_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    detector, file = StallDetector(tmp_path), ProgressFile(tmp_path, 0)
    assert detector.stalled_seconds() is None
    now[0] = 500
    assert detector.stalled_seconds() is None, "starting may take long"
    for second in (510, 520, 530):  # ten seconds a step
        file.beat(Phase.FORWARD, 1)
        now[0] = second
        assert detector.stalled_seconds() is None
    now[0] = 530 + 20 * 10
    assert detector.stalled_seconds() is None
    now[0] = 530 + 20 * 10 + 1
    assert detector.stalled_seconds() == 201


needs_virtual_gpu = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))


@needs_virtual_gpu
def test_the_size_that_was_refused_is_exact() -> None:
    program = """
        import torch
        from sweep.worker.failure import RefusedRequest, requested_bytes
        refused = RefusedRequest()
        refused.watch()
        try:
            torch.empty(100 * 2**30 + 5 * 2**20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            rounded = requested_bytes(str(error))
            print(rounded, refused.exactly(rounded), refused.exactly(2 * rounded), refused.exactly(None))
    """
    variables = os.environ | virtual.environment(virtual.gpu("a100-80gb"))
    variables["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY}"
    command = [sys.executable, "-c", textwrap.dedent(program)]
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    rounded = round(100.01 * 2**30)
    # PyTorch asks the device for multiples of 2 MiB; its message has two digits after the point.
    assert printed.split() == [str(rounded), str(100 * 2**30 + 6 * 2**20), str(2 * rounded), "None"]


@needs_virtual_gpu
def test_optimizer_states_that_do_not_fit_are_found_in_the_first_step(make_spec: MakeSpec, tmp_path: Path) -> None:
    from conftest import read_model

    # 1.24e9 parameters: 9.2 GiB of weights and gradients fit into 16 GiB, as much again of states does not.
    device = {"kind": "virtual", "gpu": {"key": "a100-80gb", "total_memory_bytes": 16 * GIB}}
    record = run_cell(make_spec(model=read_model("llama3.2-1b"), device=device), Store(tmp_path), [])
    assert record.status is Status.OOM
    failure = record.failure
    assert failure is not None
    assert (failure.phase, failure.iteration, failure.rank) == (Phase.OPTIMIZER, 0, 0)
    assert failure.requested_bytes is not None
    assert failure.free_bytes is not None
    assert failure.allocated_bytes is not None
    assert failure.reserved_bytes is not None
    assert failure.requested_bytes > failure.free_bytes
    assert failure.reserved_bytes >= failure.allocated_bytes > 8 * GIB
