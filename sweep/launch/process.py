"""Start a cell's processes, watch them, and end all of them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

POLL_SECONDS = 0.05
GRACE_SECONDS = 4.0
"""What torch.distributed.run gets to end the other ranks, and these to write a record, once one has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the process tree ended."""

    exit_code: int | None
    """Negative: the signal; None: it was ended from here."""
    timeout_seconds: float | None = None
    """It was ended because it took longer than this."""
    stalled_seconds: float | None = None
    """It was ended because nothing had moved for so long."""


class Child(Protocol):
    """What watching needs of `subprocess.Popen`; a cell of the warm server has it too."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...


def start_process(command: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path) -> Child:
    """A process in a session of its own, its output in the two files."""
    with stdout.open("wb") as out, stderr.open("wb") as err:
        return subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )


def watch(
    child: Child,
    *,
    timeout_seconds: float,
    failed_rank: Callable[[], bool],
    stalled_seconds: Callable[[], float | None] = lambda: None,
    before_ending: Callable[[], None] = lambda: None,
    mark: Mapping[str, str] | None = None,
) -> Ended:
    """Wait for the end. As soon as `failed_rank` says so, the others have `GRACE_SECONDS` and are then ended.

    `stalled_seconds` gives for how long nothing has moved once that is too long. `before_ending` is called while a cell
    that takes too long still runs. Whatever happens, nothing of the child's process tree is left, nor any process that
    carries the variables of `mark` in its environment.
    """
    try:
        ended = _wait(child, timeout_seconds, failed_rank, stalled_seconds)
        if ended.timeout_seconds is not None or ended.stalled_seconds is not None:
            before_ending()
        return ended
    finally:
        end_tree(child.pid)
        child.wait()
        if mark:
            end_marked(mark)


def _wait(
    child: Child,
    timeout_seconds: float,
    failed_rank: Callable[[], bool],
    stalled_seconds: Callable[[], float | None],
) -> Ended:
    deadline = time.monotonic() + timeout_seconds
    failed_at: float | None = None
    while True:
        try:
            return Ended(exit_code=child.wait(timeout=POLL_SECONDS))
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if failed_at is None and failed_rank():
            failed_at = now
        if failed_at is not None:
            if now - failed_at > GRACE_SECONDS:
                return Ended(exit_code=None)
            continue
        if now > deadline:
            return Ended(exit_code=None, timeout_seconds=timeout_seconds)
        stalled = stalled_seconds()
        if stalled is not None:
            return Ended(exit_code=None, stalled_seconds=stalled)


def end_tree(pid: int) -> None:
    """Kill a process and all that descend from it, also those that have made sessions of their own."""
    try:
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        tree = []
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    psutil.wait_procs(tree, timeout=10)


def end_marked(mark: Mapping[str, str]) -> None:
    """Kill what a cell left behind outside its tree: only processes that were started with all of these variables."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            variables = process.environ()
            if process.pid != os.getpid() and all(variables.get(name) == value for name, value in mark.items()):
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=10)
