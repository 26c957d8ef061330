"""Cells on real GPUs take turns, whichever sweep and folder they belong to: one lock per device, named by its UUID.

The locks lie in /tmp, whatever TMPDIR says, for all users alike, and go with the process that holds them, however it
ends. Work that is not a sweep's takes no turn; it is noticed by the memory that it holds (`clean_slate`).
"""

import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sweep.environment import Gpu

FOLDER = Path("/tmp")  # noqa: S108  (nothing secret, and opened without following links)


def lock_path(gpu: Gpu) -> Path:
    return FOLDER / f"sweep-{gpu.uuid}.lock"


@contextmanager
def turn(gpus: Sequence[Gpu], who: str) -> Iterator[None]:
    """Wait for all these devices and keep them; while it waits it says on stderr who holds one."""
    with ExitStack() as held:
        for gpu in sorted(gpus, key=lambda each: each.uuid):  # in one order, so that no two wait for each other
            try:
                file = _open(lock_path(gpu))
            except OSError:  # no such place here: the device's memory alone tells then whether it is free
                continue
            held.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"sweep: waiting for {gpu.name} ({gpu.uuid}), held by {_holder(file)}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(OSError):  # another user's file can be locked but not written
                os.ftruncate(file, 0)
                os.pwrite(file, f"{who} (pid {os.getpid()})".encode(), 0)
        yield


def _open(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    # Where others may write, the kernel lets nobody "create" a file that another user has made: fs.protected_regular.
    for mode in (os.O_RDWR, os.O_RDWR | os.O_CREAT):
        with suppress(FileNotFoundError, PermissionError):
            file = os.open(path, flags | mode, 0o666)
            with suppress(PermissionError):
                os.fchmod(file, 0o666)  # whatever the umask of the user who came first
            return file
    return os.open(path, flags | os.O_RDONLY)


def _holder(file: int) -> str:
    return os.pread(file, 4096, 0).decode(errors="replace") or "another sweep"
