"""How far each rank is: what a stall is noticed by, and which rank is then named.

    progress<k>.json   rank k's process, phase and iteration; rewritten in place at every edge between phases
    ended.json         the exit codes that torch.distributed.run saw, by rank

Both lie in the cell's folder and matter only while it runs and when it ends without a word.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from sweep.record import Phase

PHASES = tuple(Phase)
_WIDTH = 96


def ended_path(directory: Path) -> Path:
    return directory / "ended.json"


class ProgressFile:
    """The writing side, in the rank. One small write in place, without a rename: it happens in every phase."""

    def __init__(self, directory: Path, rank: int) -> None:
        path = directory / f"progress{rank}.json"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._beats = 0
        self.beat(None, None)

    def beat(self, phase: Phase | None, iteration: int | None) -> None:
        self._beats += 1
        content = [os.getpid(), self._beats, None if phase is None else PHASES.index(phase), iteration]
        with suppress(OSError):  # a full disk must not end a training run
            os.pwrite(self._file, json.dumps(content).ljust(_WIDTH).encode(), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    rank: int
    pid: int
    beats: int
    phase: Phase | None
    iteration: int | None

    @property
    def sentence(self) -> str:
        where = "while starting" if self.phase is None else f"in {self.phase.value}"
        return where if self.iteration is None else f"{where} of iteration {self.iteration}"

    @property
    def alive(self) -> bool:
        """Whether its process still runs; a zombie does not."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def read_progress(directory: Path) -> list[RankProgress]:
    """The ranks that have begun, in order; what cannot be read is left out."""
    found = []
    for path in directory.glob("progress*.json"):
        try:
            pid, beats, phase, iteration = json.loads(path.read_text(encoding="utf-8"))
            rank = int(path.stem.removeprefix("progress"))
            where = None if phase is None else PHASES[phase]
        except (OSError, ValueError, TypeError, IndexError):
            continue
        found.append(RankProgress(rank=rank, pid=pid, beats=beats, phase=where, iteration=iteration))
    return sorted(found, key=lambda progress: progress.rank)


def farthest_behind(ranks: list[RankProgress]) -> RankProgress | None:
    """The one rank that made fewer steps than every other: the others wait for it. None where there is no such."""
    behind = sorted(ranks, key=lambda progress: progress.beats)
    if not behind or (len(behind) > 1 and behind[0].beats == behind[1].beats):
        return None
    return behind[0]


def read_ended(directory: Path) -> dict[int, int]:
    """Exit codes by rank; a negative one is the signal. The rank that failed first comes first."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        content = json.loads(ended_path(directory).read_text(encoding="utf-8"))
        return {int(rank): int(code) for rank, code in content.items()}
    return {}
