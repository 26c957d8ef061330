"""Which batch size of a series comes next: pure decisions on the outcomes so far.

Whatever the method, a walk ends only between a size that was measured to fit and the next larger one, measured not to,
or at a cap that was itself measured. A prediction only chooses what to measure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sweep.record import CellRecord, Status
from sweep.spec import DeviceKind, SpecError

TOO_LARGE = (Status.OOM, Status.THRASHING)
PATIENCE = 6
"""Cells that `fit` may spend before it stops trusting its line and halves the interval."""
REACH = 8
"""How far beyond the largest size known to fit a line is trusted. The smallest sizes may peak elsewhere in the step."""
GUESS_PATIENCE = 2
"""Cells that may be spent on a guess from a similar series before the series' own line is drawn."""


class SearchMethod(str, Enum):
    ASCEND = "ascend"
    """1, 2, 3, ... until one does not fit."""
    BISECT = "bisect"
    """1, 2, 4, 8, ... until one does not fit, then halve the interval between the largest that fits and that one."""
    FIT = "fit"
    """Memory is affine in the batch size: two cells predict the limit, two more confirm it from both sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    method: SearchMethod = SearchMethod.FIT
    step: int = 1
    """`ascend` only: by how much to go up until a size does not fit."""
    points: int = 6
    """Once the limit is known, this many sizes, evenly spread from 1 to the limit, are measured for the charts."""
    max_batch_size: int = 4096
    """No larger size is tried."""
    seq_len_step: int = 256
    """Where the sequence length is searched, it is a multiple of this; the sizes of the search count such steps."""
    max_seq_len: int | None = None
    """No longer sequence is tried; None: as long as the model's positions reach."""
    past_thrashing: bool = False
    """Once the limit is known, sizes that run but thrash are passed one by one, to the first that does not run."""
    batch_sizes: tuple[int, ...] | None = None
    """Only these, in ascending order, up to the first that does not fit; None leaves the choice to the method."""

    def __post_init__(self) -> None:
        for field in ("step", "points", "max_batch_size", "seq_len_step", "max_seq_len"):
            value, least = getattr(self, field), 0 if field == "points" else 1
            if value is not None and value < least:
                raise SpecError(f"search.{field}", value, f"give a whole number of {least} or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What planning needs of a record."""

    status: Status
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    budget_bytes: int | None = None
    """The most that the allocator could have reserved: the device's memory less what others hold of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    fits: int
    """The largest size measured to fit below every size that does not; 0 where none is known to."""
    too_large: int | None
    """The smallest size measured not to fit."""

    @property
    def settled(self) -> bool:
        return self.too_large is not None and self.too_large - self.fits == 1


def outcome_of(record: CellRecord) -> Outcome:
    largest = record.largest_rank
    if largest is None or largest.reserved_peak_bytes is None:
        return Outcome(status=record.status)
    reserved = largest.reserved_peak_bytes
    outside = 0 if largest.nvml is None else largest.nvml.peak_bytes - reserved
    # What is mapped counts against the limit of the CPU device, resident or not: there is no slack to reclaim.
    on_cpu = record.spec.device.kind is DeviceKind.CPU
    return Outcome(
        status=record.status,
        allocated_bytes=reserved if on_cpu else largest.allocated_peak_bytes,
        reserved_bytes=reserved,
        budget_bytes=largest.capacity_bytes - max(0, outside),
    )


def limits(outcomes: Mapping[int, Outcome]) -> Limits:
    too_large = min((size for size, outcome in outcomes.items() if outcome.status in TOO_LARGE), default=None)
    fitting = (size for size, outcome in outcomes.items() if outcome.status is Status.OK)
    return Limits(fits=max((s for s in fitting if too_large is None or s < too_large), default=0), too_large=too_large)


def next_batch_size(outcomes: Mapping[int, Outcome], search: Search, guess: int | None = None) -> int | None:
    """The next batch size to measure, or None when the walk is over.

    `guess` is the limit of a similar series, if one is known: a place to look first, for `fit`. A size that neither
    fitted nor ran out of memory ends the walk, for nothing can be concluded from a crash.
    """
    if search.batch_sizes is not None:
        outcomes = {size: outcomes[size] for size in search.batch_sizes if size in outcomes}
    if any(o.status is not Status.OK and o.status not in TOO_LARGE for o in outcomes.values()):
        return None
    known = limits(outcomes)
    if search.batch_sizes is not None:
        if known.too_large is not None:
            return None
        return next((size for size in sorted(search.batch_sizes) if size not in outcomes), None)
    if known.settled or (known.too_large is None and known.fits >= search.max_batch_size):
        if search.past_thrashing and (size := _past_thrashing(outcomes, known, search.max_batch_size)):
            return size
        return _next_point(outcomes, known.fits, search.points)
    if search.method is SearchMethod.ASCEND:
        size = _ascend(known, search)
    elif search.method is SearchMethod.BISECT:
        size = _bisect(known)
    else:
        size = _fit(outcomes, known, guess)
    return min(size, search.max_batch_size)


def _past_thrashing(outcomes: Mapping[int, Outcome], known: Limits, largest: int) -> int | None:
    size = known.too_large or largest + 1
    while size in outcomes and outcomes[size].status is not Status.OOM:
        size += 1
    return None if size in outcomes or size > largest else size


def _ascend(known: Limits, search: Search) -> int:
    return known.fits + (search.step if known.fits and known.too_large is None else 1)


def _bisect(known: Limits) -> int:
    if known.too_large is None:
        return max(1, 2 * known.fits)
    return (known.fits + known.too_large) // 2


def _fit(outcomes: Mapping[int, Outcome], known: Limits, guess: int | None) -> int:
    if len(outcomes) >= PATIENCE:
        return _bisect(known)
    believed = guess if guess is not None and len(outcomes) < GUESS_PATIENCE else predicted_limit(outcomes)
    if believed is None:
        return next((size for size in (1, 2) if size > known.fits and size not in outcomes), _bisect(known))
    if known.too_large is None:
        if known.fits and believed > REACH * known.fits:
            return believed // 2
        return max(known.fits + 1, believed)
    if believed - (known.too_large - 1) > max(2, believed // 8):  # too high again and again: the line is wrong
        return _bisect(known)
    return max(known.fits + 1, min(believed, known.too_large - 1))


def predicted_limit(outcomes: Mapping[int, Outcome]) -> int | None:
    """The largest size that should fit, from the line through the allocated peaks of the two largest that do.

    The allocator reserves more than is allocated. Near the limit it gives part of that slack back before it fails:
    half of it is counted, which comes out to the size or next to it on the published 8B grid with and without
    checkpointing and expandable segments.
    """
    points = sorted(
        (size, o.allocated_bytes, o.reserved_bytes, o.budget_bytes)
        for size, o in outcomes.items()
        if o.status is Status.OK and o.allocated_bytes and o.reserved_bytes and o.budget_bytes
    )
    if len(points) < 2:
        return None
    (small, small_bytes, _, _), (large, large_bytes, _, budget) = points[-2:]
    per_sample = (large_bytes - small_bytes) / (large - small)
    if per_sample <= 0:
        return None
    # Where the device is nearly full, what is reserved stops growing and tells nothing of the slack.
    roomy = [point for point in points if point[2] < 0.9 * budget] or points
    slack = 1 + max(0.0, roomy[-1][2] / roomy[-1][1] - 1) / 2
    return max(0, math.floor(large + (budget / slack - large_bytes) / per_sample))


def _next_point(outcomes: Mapping[int, Outcome], fits: int, points: int) -> int | None:
    """An evenly spread size without a measured one within half the spacing."""
    if points < 1 or fits < 1:
        return None
    spacing = (fits - 1) / max(1, points - 1)
    wanted = [1 + round(i * spacing) for i in range(points)]
    return next(
        (size for size in wanted if size not in outcomes and min(abs(size - s) for s in outcomes) > spacing / 2), None
    )
