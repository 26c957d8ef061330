"""The searches on made-up series: thousands of them, of every shape that memory has or might have."""

import itertools
import math
import random
from collections.abc import Callable

import pytest

from sweep.plan import TOO_LARGE, Limits, Outcome, Search, SearchMethod, limits, next_batch_size, predicted_limit
from sweep.record import Status
from sweep.spec import SpecError, from_json

Fits = Callable[[int], Outcome]
GIB = 2**30
CAP = 512


def walk(outcome_at: Fits, search: Search, guess: int | None = None) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    while (size := next_batch_size(outcomes, search, guess)) is not None:
        assert size not in outcomes, "a size is tried once"
        assert 1 <= size <= search.max_batch_size
        outcomes[size] = outcome_at(size)
        assert len(outcomes) <= search.max_batch_size, "a walk ends"
    return outcomes


def limit(largest: int, beyond: Status = Status.OOM) -> Fits:
    return lambda size: Outcome(status=Status.OK if size <= largest else beyond)


def affine(fixed: float, per_sample: float, slack: float, budget: float = 78 * GIB) -> Fits:
    """`slack` is reserved over allocated; half of it is given back near the limit."""

    def outcome(size: int) -> Outcome:
        allocated = fixed + per_sample * size
        fits = allocated * (1 + (slack - 1) / 2) <= budget
        return Outcome(
            status=Status.OK if fits else Status.OOM,
            allocated_bytes=round(allocated),
            reserved_bytes=round(min(allocated * slack, budget)),
            budget_bytes=round(budget),
        )

    return outcome


@pytest.mark.parametrize("method", SearchMethod)
@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 13, 31, 32, 33])
def test_a_walk_ends_between_the_largest_that_fits_and_the_next(method: SearchMethod, largest: int) -> None:
    outcomes = walk(limit(largest), Search(method=method))
    assert limits(outcomes) == Limits(fits=largest, too_large=largest + 1)


def test_bisection_takes_few_cells() -> None:
    assert len(walk(limit(1000), Search(method=SearchMethod.BISECT, points=0))) <= 21


def test_ascending_takes_every_size() -> None:
    assert list(walk(limit(4), Search(method=SearchMethod.ASCEND))) == [1, 2, 3, 4, 5]


def test_ascending_in_steps_still_ends_between_neighbours() -> None:
    assert list(walk(limit(6), Search(method=SearchMethod.ASCEND, step=4, points=0))) == [1, 5, 9, 6, 7]


@pytest.mark.parametrize("slack", [1.0, 1.2, 1.5])
@pytest.mark.parametrize("per_sample", [0.5, 1.0, 3.3, 16.25, 40.0])
def test_fit_needs_four_cells_where_memory_is_affine(per_sample: float, slack: float) -> None:
    outcomes = walk(affine(18 * GIB, per_sample * GIB, slack), Search(points=0))
    assert limits(outcomes).settled
    assert len(outcomes) <= 5


def test_fit_needs_two_cells_where_a_similar_series_is_known() -> None:
    series = affine(18 * GIB, 3.3 * GIB, 1.2)
    known = limits(walk(series, Search(points=0))).fits
    assert len(walk(series, Search(points=0), guess=known)) == 2
    for wrong in (1, known - 1, known + 1, known + 2, 10 * known):
        outcomes = walk(series, Search(points=0), guess=wrong)
        assert limits(outcomes) == Limits(fits=known, too_large=known + 1)


@pytest.mark.parametrize("method", SearchMethod)
@pytest.mark.parametrize("cap", [1, 5, 6, 8])
def test_the_cap_itself_is_measured_and_never_exceeded(method: SearchMethod, cap: int) -> None:
    outcomes = walk(limit(10**6), Search(method=method, max_batch_size=cap))
    assert max(outcomes) == cap


def test_given_sizes_are_walked_in_order_up_to_the_first_that_does_not_fit() -> None:
    outcomes = walk(limit(5), Search(batch_sizes=(8, 2, 4, 16)))
    assert [(size, o.status) for size, o in outcomes.items()] == [(2, Status.OK), (4, Status.OK), (8, Status.OOM)]


def test_thrashing_ends_a_walk_like_an_oom() -> None:
    outcomes = walk(limit(5, Status.THRASHING), Search())
    assert limits(outcomes) == Limits(fits=5, too_large=6)


def test_sizes_that_thrash_are_passed_on_request() -> None:
    def outcome(size: int) -> Outcome:
        return Outcome(status=Status.OK if size <= 3 else Status.THRASHING if size <= 6 else Status.OOM)

    outcomes = walk(outcome, Search(points=0, past_thrashing=True))
    assert limits(outcomes) == Limits(fits=3, too_large=4)
    assert [outcomes[size].status for size in (4, 5, 6, 7)] == [Status.THRASHING] * 3 + [Status.OOM]
    assert max(walk(outcome, Search(points=0, past_thrashing=True, max_batch_size=5))) == 5


@pytest.mark.parametrize(
    "status", [Status.FAILED, Status.TIMEOUT, Status.HOST_OOM, Status.BUSY_DEVICE, Status.UNSUPPORTED]
)
def test_a_crash_is_never_taken_for_a_step_of_the_search(status: Status) -> None:
    outcomes = walk(limit(3, status), Search(method=SearchMethod.BISECT))
    assert [(size, o.status) for size, o in outcomes.items()] == [(1, Status.OK), (2, Status.OK), (4, status)]


def test_points_are_spread_once_the_limit_is_known() -> None:
    few = walk(limit(60), Search(method=SearchMethod.BISECT, points=0))
    many = walk(limit(60), Search(method=SearchMethod.BISECT, points=6))
    added = set(many) - set(few)
    assert added
    assert all(size < 60 for size in added)
    sizes = sorted(size for size in many if size <= 60)
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= 2 * 60 / 5


def test_nothing_is_predicted_from_too_little() -> None:
    assert predicted_limit({}) is None
    assert predicted_limit({1: affine(1, 1, 1)(1)}) is None
    flat = Outcome(status=Status.OK, allocated_bytes=5, reserved_bytes=5, budget_bytes=9)
    assert predicted_limit({1: flat, 2: flat}) is None


@pytest.mark.parametrize(("field", "value"), [("step", 0), ("points", -1), ("max_batch_size", 0)])
def test_bad_search_settings_are_named(field: str, value: int) -> None:
    with pytest.raises(SpecError, match=f"search.{field}={value} is not valid"):
        from_json(Search, {field: value}, "search.")


def made_up(chance: random.Random) -> Fits:
    """A series of a random shape; the same size always gives the same outcome."""
    fixed, per_sample = chance.uniform(0, 90) * GIB, 10 ** chance.uniform(-2, 1.6) * GIB
    slack, shape = chance.uniform(1, 1.6), chance.choice(["affine", "convex", "stepped", "noisy", "flat"])
    surprising = chance.random() < 0.2
    breaking = chance.random() < 0.1
    seed = chance.random()

    def outcome(size: int) -> Outcome:
        at = random.Random(f"{seed} {size}")
        allocated = (
            fixed
            + per_sample
            * {
                "affine": size,
                "convex": size**1.3,
                "stepped": 8 * math.ceil(size / 8),
                "noisy": size * at.uniform(0.8, 1.2),
                "flat": 1,
            }[shape]
        )
        fits = allocated * at.uniform(1, slack) <= 78 * GIB
        if surprising and at.random() < 0.15:
            fits = not fits
        status = Status.OK if fits else at.choice([Status.OOM, Status.OOM, Status.OOM, Status.THRASHING])
        if breaking and at.random() < 0.2:
            status = at.choice([Status.FAILED, Status.TIMEOUT])
        if status is Status.OOM and at.random() < 0.3:
            return Outcome(status=status)
        reserved = round(min(allocated * slack, 78 * GIB))
        return Outcome(status=status, allocated_bytes=round(allocated), reserved_bytes=reserved, budget_bytes=78 * GIB)

    return outcome


@pytest.mark.parametrize("method", SearchMethod)
def test_thousands_of_made_up_series(method: SearchMethod) -> None:
    for number in range(1500):
        chance = random.Random(number)
        series = made_up(chance)
        points = chance.choice([0, 0, 6])
        guess = chance.choice([None, None, chance.randint(1, CAP)])
        search = Search(method=method, max_batch_size=CAP, points=points, step=chance.choice([1, 1, 3]))
        outcomes = walk(series, search, guess)

        known, statuses = limits(outcomes), [o.status for o in outcomes.values()]
        broken = any(status is not Status.OK and status not in TOO_LARGE for status in statuses)
        if not broken:
            assert known.settled or (known.too_large is None and outcomes[CAP].status is Status.OK)
            if known.fits:
                assert outcomes[known.fits].status is Status.OK
        if method is not SearchMethod.ASCEND and points == 0:
            # Doubling up to the cap and halving back, after what `fit` may spend on predictions.
            assert len(outcomes) <= 2 * math.log2(CAP) + 2 + PATIENCE_OF[method]


PATIENCE_OF = {SearchMethod.BISECT: 0, SearchMethod.FIT: 6}
