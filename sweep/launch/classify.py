"""What happened to a cell: from what its ranks wrote; from how its processes ended only where they wrote nothing."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sweep.launch.process import Ended
from sweep.record import Failure, RankRecord, Status
from sweep.spec import CellSpec, DeviceKind

TAIL_LINES = 15


def classify(
    spec: CellSpec, ranks: Sequence[RankRecord], ended: Ended, stderr: Path
) -> tuple[Status, str | None, Failure | None]:
    """Status, a sentence where the status does not say it all, and what failed."""
    expected = 1 if spec.device.kind is DeviceKind.VIRTUAL else spec.world_size
    tail = stderr_tail(stderr)
    failed = [rank for rank in ranks if rank.failure is not None]
    for rank in failed:
        if rank.oom and rank.failure is not None:  # any rank's OOM is the cell's
            return Status.OOM, None, rank.failure
    if failed and failed[0].failure is not None:
        failure = replace(failed[0].failure, stderr_tail=tail)
        return (
            Status.FAILED,
            f"rank {failure.rank}: {failure.kind}: {failure.message.splitlines()[0]}",
            failure,
        )
    if ended.timed_out:
        sentence = f"no result within {spec.timeout_seconds:g} s"
        return Status.TIMEOUT, sentence, Failure(kind="Timeout", message=sentence, stderr_tail=tail)
    if len(ranks) < expected:
        return _silent(spec, expected - len(ranks), ended, tail)
    wanted = spec.expandable_segments
    for rank in ranks:
        settings = rank.allocator_settings
        if settings is not None and bool(settings.get("expandable_segments", False)) != wanted:
            return Status.UNSUPPORTED, f"the allocator did not take expandable_segments={wanted} here", None
    retried = max((rank.alloc_retries or 0 for rank in ranks), default=0)
    if retried:
        times = "once" if retried == 1 else f"{retried} times"
        return Status.THRASHING, f"the allocator freed its cache {times} in the measured iterations", None
    return Status.OK, None, None


def _silent(spec: CellSpec, missing: int, ended: Ended, tail: str) -> tuple[Status, str, Failure]:
    code = ended.exit_code
    if spec.device.kind is DeviceKind.CPU and "bad_alloc" in tail:
        # A library's own thread met the rank's memory limit: no Python was there to catch it.
        failure = Failure(kind="bad_alloc", message="memory limit reached outside Python", stderr_tail=tail)
        return Status.OOM, "the memory limit was reached in a library's own thread", failure
    if code is not None and code < 0:
        ending = f"killed by {signal.Signals(-code).name}"
    else:
        ending = f"ended with exit code {code}" if code is not None else "ended"
    who = "the process" if missing == 1 else f"{missing} ranks"
    sentence = f"{who} {ending} without writing a record"
    last = tail.splitlines()[-1] if tail else ""
    message = f"{sentence}: {last}" if last else sentence
    return Status.FAILED, message, Failure(kind="ProcessEnded", message=message, stderr_tail=tail)


def stderr_tail(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-TAIL_LINES:])
