"""How long a cell may take where nobody has said: from what the cells before it took.

Only a backstop, hence generous: a rank that fails and a cell that stops moving are noticed much sooner.
"""

import math
from contextlib import suppress
from pathlib import Path

from sweep.record import CellRecord, Status
from sweep.spec import CellSpec
from sweep.store import Store, StoreError

FIRST_SECONDS = 900.0
"""At least, as long as no cell of the series has come to its end."""
LEAST_SECONDS = 300.0
TIMES_THE_LONGEST = 10


class Pace:
    """Learns from each results folder apart."""

    def __init__(self) -> None:
        self._longest: dict[Path, dict[str, tuple[int, float]]] = {}

    def recall(self, store: Store) -> None:
        """Take into account what earlier sweeps have stored; the folder is read once in a process."""
        if store.path in self._longest:
            return
        self._longest[store.path] = {}
        with suppress(OSError, StoreError):
            for record in store.records():
                self.learn(store.path, record)

    def learn(self, folder: Path, record: CellRecord) -> None:
        """Take a cell into account that ran to its end; others say nothing about how long one takes."""
        if record.status not in (Status.OK, Status.THRASHING):
            return
        series = self._longest.setdefault(folder, {})
        if record.duration_seconds > series.get(record.series_id, (0, 0.0))[1]:
            series[record.series_id] = (_work(record.spec), record.duration_seconds)

    def timeout_seconds(self, folder: Path, spec: CellSpec) -> float:
        """What was set; else a multiple of the longest of the series, or of the sweep, scaled to this cell's work."""
        if spec.timeout_seconds is not None:
            return spec.timeout_seconds
        known = self._longest.get(folder, {})
        same = known.get(spec.series_id)
        longest = max(
            (seconds * max(1.0, _work(spec) / work) for work, seconds in ([same] if same else known.values())),
            default=0.0,
        )
        return float(max(LEAST_SECONDS if same else FIRST_SECONDS, math.ceil(TIMES_THE_LONGEST * longest)))


def _work(spec: CellSpec) -> int:
    """Tokens of one rank in the whole cell."""
    iterations = spec.warmup_iterations + spec.measured_iterations
    return spec.batch_size * spec.seq_len * spec.accumulation * iterations
