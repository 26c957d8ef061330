"""Where each rank of a cell that hangs is: asked by signal, answered by Python itself, also out of native code.

The others wait in a collective, in the same frame; the one that they wait for is somewhere else or does not answer.
"""

import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from sweep.launch.progress import read_progress

ASK = signal.SIGUSR1
ANSWER_SECONDS = 1.0
WAITING = re.compile(r"/torch/(distributed|autograd)/")


def answer_when_asked(directory: Path, rank: int) -> None:
    """In the rank: from now on `ASK` leaves the main thread's stack in the cell's folder."""
    file = (directory / f"stack{rank}.txt").open("w", encoding="utf-8")  # stays open as long as the process
    faulthandler.register(ASK, file=file, all_threads=False)


def ask(directory: Path) -> dict[int, str]:
    """The stacks of the ranks that still run, innermost frame first; empty for one that does not answer."""
    alive = [rank for rank in read_progress(directory) if rank.alive]
    for rank in alive:
        os.kill(rank.pid, ASK)
    time.sleep(ANSWER_SECONDS)
    stacks = {}
    for rank in alive:
        path = directory / f"stack{rank.rank}.txt"
        stacks[rank.rank] = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return stacks


def odd_one_out(stacks: Mapping[int, str]) -> int | None:
    """The one rank that is not where all the others are; None where no single one stands out."""
    frames = {rank: next(iter(re.findall(r"File .*", stack)), "") for rank, stack in stacks.items()}
    for odd in (
        [rank for rank, frame in frames.items() if not frame],
        [rank for rank, frame in frames.items() if not WAITING.search(frame)],
        [rank for rank, frame in frames.items() if frame not in _most_common(frames)],
    ):
        if len(odd) == 1 and len(frames) > 1:
            return odd[0]
    return None


def _most_common(frames: Mapping[int, str]) -> list[str]:
    counts = Counter(frames.values())
    return [frame for frame, count in counts.items() if count == max(counts.values())]
