"""Has a cell stopped moving? Judged by its own pace, so that no one has to know how long an iteration takes."""

import time
from pathlib import Path

from sweep.launch.progress import read_progress

START_SECONDS = 600.0
"""Until an iteration has been finished: building, sharding and compiling have no pace yet."""
LEAST_SECONDS = 60.0
TIMES_THE_LONGEST_STEP = 20


class StallDetector:
    """Asked again and again; knows when any rank last moved, and the longest that this took so far."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: list[tuple[int, int]] = []
        self._moved_at = time.monotonic()
        self._longest = 0.0
        self._has_pace = False

    def stalled_seconds(self) -> float | None:
        """For how long nothing has moved, once that is too long."""
        ranks, now = read_progress(self._directory), time.monotonic()
        seen = [(rank.rank, rank.beats) for rank in ranks]
        still = now - self._moved_at
        if seen != self._seen:
            if self._has_pace:
                self._longest = max(self._longest, still)
            self._seen, self._moved_at = seen, now
            self._has_pace = bool(ranks) and all((rank.iteration or 0) >= 1 for rank in ranks)
            return None
        limit = max(LEAST_SECONDS, TIMES_THE_LONGEST_STEP * self._longest) if self._has_pace else START_SECONDS
        return still if still > limit else None
