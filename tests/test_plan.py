from collections.abc import Callable

import pytest

from sweep.plan import Search, SearchMethod, next_batch_size
from sweep.record import Status


def walk(fits: Callable[[int], Status], search: Search) -> dict[int, Status]:
    outcomes: dict[int, Status] = {}
    while (size := next_batch_size(outcomes, search)) is not None:
        assert size not in outcomes, "a size is tried once"
        outcomes[size] = fits(size)
    return outcomes


def limit(largest: int) -> Callable[[int], Status]:
    return lambda size: Status.OK if size <= largest else Status.OOM


@pytest.mark.parametrize("method", SearchMethod)
@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 13, 31, 32, 33])
def test_a_walk_ends_between_the_largest_that_fits_and_the_next(method: SearchMethod, largest: int) -> None:
    outcomes = walk(limit(largest), Search(method=method))
    assert outcomes[largest + 1] is Status.OOM
    assert largest == 0 or outcomes[largest] is Status.OK


def test_bisection_takes_few_cells() -> None:
    assert len(walk(limit(1000), Search(method=SearchMethod.BISECT))) <= 21


def test_ascending_takes_every_size() -> None:
    assert list(walk(limit(4), Search(method=SearchMethod.ASCEND))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("method", SearchMethod)
@pytest.mark.parametrize("cap", [1, 5, 6, 8])
def test_the_cap_itself_is_measured_and_never_exceeded(method: SearchMethod, cap: int) -> None:
    outcomes = walk(limit(10**6), Search(method=method, max_batch_size=cap))
    assert max(outcomes) == cap


def test_given_sizes_are_walked_in_order_up_to_the_first_that_does_not_fit() -> None:
    search = Search(batch_sizes=(8, 2, 4, 16))
    assert walk(limit(5), search) == {2: Status.OK, 4: Status.OK, 8: Status.OOM}


def test_thrashing_ends_a_walk_like_an_oom() -> None:
    outcomes = walk(lambda size: Status.OK if size < 6 else Status.THRASHING, Search())
    assert outcomes[5] is Status.OK
    assert outcomes[6] is Status.THRASHING


@pytest.mark.parametrize(
    "status", [Status.FAILED, Status.TIMEOUT, Status.HOST_OOM, Status.BUSY_DEVICE, Status.UNSUPPORTED]
)
def test_a_crash_is_never_taken_for_a_step_of_the_search(status: Status) -> None:
    assert walk(lambda size: Status.OK if size < 4 else status, Search()) == {
        1: Status.OK,
        2: Status.OK,
        4: status,
    }
