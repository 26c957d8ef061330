"""What happened to a cell: from what its ranks wrote; from how its processes ended only where they wrote nothing."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sweep.launch.commands import REPOSITORY
from sweep.launch.process import Ended
from sweep.launch.progress import RankProgress, farthest_behind
from sweep.launch.stacks import odd_one_out
from sweep.record import Failure, RankRecord, Status
from sweep.spec import CellSpec, DeviceKind

TAIL_LINES = 15
Verdict = tuple[Status, str | None, Failure | None]
"""Status, a sentence where the status does not say it all, and what failed."""

NOT_IN_EFFECT = "NotInEffectError"
"""The class of the exception with which a rank says that its configuration does not do what it says."""

LAST_WORDS: tuple[tuple[str, Status | None], ...] = (
    (r"illegal memory access|misaligned address|device-side assert", Status.FAILED),
    (r"out of resource: shared memory", Status.FAILED),
    (r"torch\.(cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA (driver )?error: out of memory", Status.OOM),
    (r"C[UB]DNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED", Status.OOM),
    (r"bad_alloc|Cannot allocate memory|MemoryError", None),
)
"""Of a process that wrote no record, the first that is found. None: the host's memory, which is the device's on CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clues:
    """What is known beside the ranks' records."""

    progress: Sequence[RankProgress] = ()
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """By rank, the first to fail first."""
    oom_kills: int = 0
    """Processes that the kernel killed for want of memory while the cell ran."""
    unreadable: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose record cannot be read, and why."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """Where the ranks of a cell that took too long were."""


def classify(
    spec: CellSpec, ranks: Sequence[RankRecord], ended: Ended, stderr: Path, clues: Clues | None = None
) -> Verdict:
    clues = clues or Clues()
    tail = stderr_tail(stderr)
    expected = 1 if spec.device.kind is DeviceKind.VIRTUAL else spec.processes
    missing = sorted(set(range(expected)) - {rank.rank for rank in ranks})
    reported = _reported(ranks, missing, tail)
    if reported is not None:
        return reported
    if ended.timeout_seconds is not None or ended.stalled_seconds is not None:
        return _too_late(ranks, ended, clues, tail)
    for rank, why in clues.unreadable.items():
        sentence = f"rank {rank} left a record that cannot be read: {why}"
        return Status.FAILED, sentence, Failure(kind="RecordError", message=sentence, rank=rank, stderr_tail=tail)
    if missing:
        return _silent(spec, missing, ended, clues, tail)
    return _finished(spec, ranks)


def _reported(ranks: Sequence[RankRecord], missing: Sequence[int], tail: str) -> Verdict | None:
    """What a rank itself says went wrong."""
    failed = [(rank, rank.failure) for rank in ranks if rank.failure is not None]
    for rank, failure in failed:
        if rank.oom:  # any rank's OOM is the cell's
            return Status.OOM, None, replace(failure, stderr_tail=tail)
    for rank, failure in failed:
        if rank.host_oom:
            sentence = f"rank {rank.rank}: the host had no memory left: {_first_line(failure.message)}"
            return Status.HOST_OOM, sentence, replace(failure, stderr_tail=tail)
    # A rank that lost its peers fails because of another: one that failed on its own account tells more.
    for rank, failure in sorted(failed, key=lambda item: (_lost_its_peers(item[1]), item[0].rank)):
        if failure.kind == NOT_IN_EFFECT:
            return Status.UNSUPPORTED, failure.message, replace(failure, stderr_tail=tail)
        if missing and _lost_its_peers(failure):
            return None
        return _failed(rank, failure, tail)
    return None


def _failed(rank: RankRecord, failure: Failure, tail: str) -> Verdict:
    sentence = f"rank {rank.rank}: {failure.kind}: {_first_line(failure.message)}"
    return Status.FAILED, sentence, replace(failure, stderr_tail=tail)


def _first_line(message: str) -> str:
    return message.splitlines()[0] if message else ""


def _lost_its_peers(failure: Failure) -> bool:
    return re.search(r"Connection (closed|reset) by peer|Broken pipe|peer .*closed", failure.message) is not None


def _too_late(ranks: Sequence[RankRecord], ended: Ended, clues: Clues, tail: str) -> Verdict:
    if ended.timeout_seconds is not None:
        sentence = f"no result within {ended.timeout_seconds:g} s"
    else:
        sentence = f"nothing moved for {ended.stalled_seconds:.0f} s"
    done = {rank.rank for rank in ranks}
    waiting = [rank for rank in clues.progress if rank.rank not in done]
    odd = odd_one_out({rank: stack for rank, stack in clues.stacks.items() if rank not in done})
    behind = farthest_behind(waiting) or next((rank for rank in waiting if rank.rank == odd), None)
    failure = Failure(kind="Timeout", message=sentence, stderr_tail=tail)
    if behind is None:
        return Status.TIMEOUT, sentence, failure
    sentence += f"; the others wait for rank {behind.rank}, {behind.sentence}"
    failure = replace(failure, message=sentence, rank=behind.rank, phase=behind.phase, iteration=behind.iteration)
    stack = clues.stacks.get(behind.rank)
    return Status.TIMEOUT, sentence, replace(failure, stderr_tail=_relative(stack)) if stack else failure


def _silent(spec: CellSpec, missing: list[int], ended: Ended, clues: Clues, tail: str) -> Verdict:
    """Ranks without a record: the one that ended first, how, and whether the kernel or a pattern says why."""
    dead = next((rank for rank in clues.exit_codes if rank in missing), None)
    if dead is None and len(missing) == 1:
        dead = missing[0]
    code = clues.exit_codes.get(dead, ended.exit_code) if dead is not None else ended.exit_code
    if dead is None:
        gone = [rank.rank for rank in clues.progress if rank.rank in missing and not rank.alive]
        dead = gone[0] if len(gone) == 1 else None
    if code is not None and code < 0:
        ending = f"killed by {signal.Signals(-code).name}"
    else:
        ending = f"ended with exit code {code}" if code is not None else "ended"
    alone = spec.processes == 1 or spec.device.kind is DeviceKind.VIRTUAL
    who = "the process" if alone else f"{len(missing)} ranks" if dead is None else f"rank {dead}"
    sentence = f"{who} {ending} without writing a record"
    at = next((rank for rank in clues.progress if rank.rank == dead), None)
    failure = Failure(
        kind="ProcessEnded",
        message=sentence,
        rank=dead,
        phase=at.phase if at else None,
        iteration=at.iteration if at else None,
        stderr_tail=tail,
    )

    def verdict(status: Status, text: str) -> Verdict:
        return status, text, replace(failure, message=text)

    if code == -signal.SIGKILL and clues.oom_kills > 0:
        return verdict(Status.HOST_OOM, f"{who} was killed by the kernel: the host had no memory left")
    for pattern, status in LAST_WORDS:
        found = re.search(f".*({pattern}).*", tail)
        if found:
            host = Status.OOM if spec.device.kind is DeviceKind.CPU else Status.HOST_OOM
            return verdict(status or host, f"{sentence}: {found.group().strip()}")
    last = tail.splitlines()[-1] if tail else ""
    return verdict(Status.FAILED, f"{sentence}: {last}" if last and code != -signal.SIGKILL else sentence)


def _finished(spec: CellSpec, ranks: Sequence[RankRecord]) -> Verdict:
    """Every rank has reported and none failed."""
    wanted = spec.expandable_segments
    for rank in ranks:
        settings = rank.allocator_settings
        if settings is not None and bool(settings.get("expandable_segments", False)) != wanted:
            return Status.UNSUPPORTED, f"the allocator did not take expandable_segments={wanted} here", None
    retried = max((rank.alloc_retries or 0 for rank in ranks), default=0)
    if retried:
        times = "once" if retried == 1 else f"{retried} times"
        return Status.THRASHING, f"the allocator freed its cache {times} in the measured iterations", None
    growth = max((rank.reserved_growth_bytes or 0 for rank in ranks), default=0)
    if growth > 0:
        return Status.OK, f"still growing: reserved memory rose by {growth / 2**20:.0f} MiB while it was measured", None
    return Status.OK, None, None


def stderr_tail(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return _relative("\n".join(lines))


def _relative(text: str) -> str:
    """Without this machine's path to the project: records are shared."""
    return text.replace(f"{REPOSITORY}{os.sep}", "")
