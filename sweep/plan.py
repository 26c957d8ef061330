"""Which batch size of a series comes next: pure decisions on the outcomes so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sweep.record import Status

ENDS_A_WALK = (Status.OOM, Status.THRASHING)


class SearchMethod(str, Enum):
    ASCEND = "ascend"
    """1, 2, 3, ... until one does not fit."""
    BISECT = "bisect"
    """1, 2, 4, 8, ... until one does not fit, then halve the interval between the largest that fits and that one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    method: SearchMethod = SearchMethod.BISECT
    max_batch_size: int = 4096
    batch_sizes: tuple[int, ...] | None = None
    """Only these, in ascending order, up to the first that does not fit; None leaves the choice to the method."""


def next_batch_size(outcomes: Mapping[int, Status], search: Search) -> int | None:
    """The next batch size to try, or None when the walk is over.

    A walk is over when the largest size that fits and the next larger one are both known, when the cap or the given
    sizes are exhausted, or when a size neither fitted nor ran out of memory: nothing can be concluded from a crash.
    """
    if any(status is not Status.OK and status not in ENDS_A_WALK for status in outcomes.values()):
        return None
    too_large = min((size for size, status in outcomes.items() if status in ENDS_A_WALK), default=None)
    if search.batch_sizes is not None:
        if too_large is not None:
            return None
        return next((size for size in sorted(search.batch_sizes) if size not in outcomes), None)
    fits = max((size for size in outcomes if too_large is None or size < too_large), default=0)
    if too_large is None:
        if fits >= search.max_batch_size:
            return None
        step = fits + 1 if search.method is SearchMethod.ASCEND else max(1, 2 * fits)
        return min(step, search.max_batch_size)
    if too_large - fits <= 1:
        return None
    return fits + 1 if search.method is SearchMethod.ASCEND else (fits + too_large) // 2
