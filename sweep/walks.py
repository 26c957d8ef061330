"""The walks of one sweep: which cell of which series is next, what is known already, and when to stop.

No Hydra here and no processes: the sweeper plugin composes and launches what this asks for.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sweep import environment
from sweep.config import Job
from sweep.plan import Limits, Outcome, Search, limits, next_batch_size, outcome_of
from sweep.record import CellRecord, Status
from sweep.spec import CellSpec, SizeAxis, SpecError, cell_id, to_json
from sweep.store import Store

RETRIED_ONCE = (Status.FAILED, Status.TIMEOUT)
DISTANCE = {"accumulation": 1, "expandable_segments": 2}
"""Fields of a spec that move a series' limit little or not at all, and how much compared to each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much a sweep may spend. Cells that are stored already cost nothing."""

    minutes: float | None = None
    cells: int | None = None

    def __post_init__(self) -> None:
        for name in ("minutes", "cells"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise SpecError(f"budget.{name}", value, "give a number above 0, or null for no limit")


class Spent:
    """What a sweep has spent of its budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._start = time.monotonic()
        self.cells = 0

    @property
    def exhausted(self) -> str | None:
        """Which limit is reached, in words."""
        if self._budget.cells is not None and self.cells >= self._budget.cells:
            return f"budget.cells={self._budget.cells} is spent"
        if self._budget.minutes is not None and time.monotonic() - self._start >= 60 * self._budget.minutes:
            return f"budget.minutes={self._budget.minutes:g} are spent"
        return None


@dataclass(kw_only=True)
class Walk:
    """One series on its way."""

    overrides: list[str]
    """Hydra's overrides of all its cells: everything but the batch size."""
    job: Job
    search: Search
    axis: SizeAxis = SizeAxis.BATCH_SIZE
    """What is searched."""
    unit: int = 1
    """A size of the search is so many of the axis."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    guess: int | None = None
    _failed_once: set[int] = field(default_factory=set)

    @property
    def series_id(self) -> str:
        return self.job.spec.series_along(self.axis)

    def spec_at(self, size: int) -> CellSpec:
        changes: dict[str, Any] = {self.axis.value: size * self.unit}
        return replace(self.job.spec, **changes)

    def overrides_at(self, size: int) -> list[str]:
        searched = [] if self.axis is SizeAxis.BATCH_SIZE else [f"search.axis={self.axis.value}"]
        return [*self.overrides, *searched, f"{self.axis.value}={size * self.unit}"]

    def size_of(self, spec: CellSpec) -> int | None:
        """None where it lies between the steps of the search."""
        size, rest = divmod(int(getattr(spec, self.axis.value)), self.unit)
        return None if rest else size

    def next(self) -> int | None:
        return next_batch_size(self.outcomes, self.search, self.guess)

    def take(self, size: int, record: CellRecord) -> None:
        """Learn from a record; a failure counts only when it happens again."""
        if record.status in RETRIED_ONCE and size not in self._failed_once:
            self._failed_once.add(size)
            return
        self.outcomes[size] = outcome_of(record)

    @property
    def limits(self) -> Limits:
        return limits(self.outcomes)


def parts_meant(parts: Sequence[Mapping[str, Any]], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The parts of an experiment that a command line means.

    A value given there picks the parts that have it; where none has, it replaces what the parts say.
    """
    chosen = [dict(part) for part in parts]
    for key, _, value in (argument.partition("=") for argument in arguments):
        if alike := [part for part in chosen if str(part.get(key)) == value]:
            chosen = alike
        else:
            chosen = [{name: given for name, given in part.items() if name != key} for part in chosen]
    return chosen


def series_along(record: CellRecord, axis: SizeAxis) -> str:
    """Of a record, without the work where it says so itself."""
    return record.series_id if axis is SizeAxis.BATCH_SIZE else record.spec.series_along(axis)


def recall(walks: Iterable[Walk], stores: Mapping[str, Store]) -> int:
    """Take every stored record that answers one of these walks' cells as measured here; gives their number."""
    found = 0
    by_series = {walk.series_id: walk for walk in walks}
    along = {walk.axis for walk in by_series.values()}
    for store in stores.values():
        for record in store.records():
            walk = next((by_series[s] for axis in along if (s := series_along(record, axis)) in by_series), None)
            size = walk.size_of(record.spec) if walk else None
            if walk is None or size is None or not record.status.final or stores[walk.job.sweep] is not store:
                continue
            if record.cell_id == cell_id(record.spec, environment.identity(record.spec.device)):
                walk.take(size, record)
                found += 1
    return found


def guess_from_similar(walk: Walk, others: Iterable[Walk]) -> int | None:
    """The limit of a finished series that differs in axes that matter little, the most similar one first."""
    mine = to_json(walk.job.spec)
    best: tuple[int, int] | None = None
    for other in others:
        known = other.limits
        if other is walk or (other.axis, other.unit) != (walk.axis, walk.unit) or not known.settled or known.fits == 0:
            continue
        theirs = to_json(other.job.spec)
        different = [key for key in mine if mine[key] != theirs[key] and key != walk.axis.value]
        if not set(different) <= set(DISTANCE):
            continue
        distance = sum(DISTANCE[key] for key in different)
        if best is None or distance < best[0]:
            best = (distance, known.fits)
    return None if best is None else best[1]
