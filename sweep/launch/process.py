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
GRACE_SECONDS = 2.0
"""What the other ranks get to write their own record once one of them has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the process tree ended."""

    exit_code: int | None
    """Negative: the signal; None: it was ended from here."""
    timed_out: bool = False


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


def watch(child: Child, *, timeout_seconds: float, failed_rank: Callable[[], bool]) -> Ended:
    """Wait for the end. As soon as `failed_rank` says so, the others have `GRACE_SECONDS` and are then ended.

    Whatever happens, nothing of the child's process tree is left.
    """
    try:
        return _wait(child, timeout_seconds, failed_rank)
    finally:
        end_tree(child.pid)
        child.wait()


def _wait(child: Child, timeout_seconds: float, failed_rank: Callable[[], bool]) -> Ended:
    deadline = time.monotonic() + timeout_seconds
    failed_at: float | None = None
    while True:
        try:
            return Ended(exit_code=child.wait(timeout=POLL_SECONDS))
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if failed_at is None and failed_rank():
            failed_at = now
        if failed_at is not None and now - failed_at > GRACE_SECONDS:
            return Ended(exit_code=None)
        if now > deadline:
            return Ended(exit_code=None, timed_out=True)


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
