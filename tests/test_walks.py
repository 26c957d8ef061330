from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_store import make_record

from sweep import environment
from sweep.config import Job
from sweep.plan import Outcome, Search
from sweep.record import Status
from sweep.spec import CellSpec, SpecError, cell_id, from_json
from sweep.store import Store
from sweep.walks import Budget, Spent, Walk, guess_from_similar, recall

MakeSpec = Callable[..., CellSpec]


def walk_of(spec: CellSpec, fits: int | None = None) -> Walk:
    walk = Walk(overrides=[], job=Job(sweep="s", spec=spec), search=Search(points=0))
    if fits is not None:
        walk.outcomes = {fits: Outcome(status=Status.OK), fits + 1: Outcome(status=Status.OOM)}
    return walk


def test_the_budget_is_counted_in_cells_and_in_minutes() -> None:
    assert Spent(Budget()).exhausted is None
    assert Spent(Budget(cells=2)).exhausted is None
    assert Spent(Budget(minutes=1e-9)).exhausted == "budget.minutes=1e-09 are spent"
    spent = Spent(Budget(cells=2))
    spent.cells = 2
    assert spent.exhausted == "budget.cells=2 is spent"


@pytest.mark.parametrize("content", [{"cells": 0}, {"minutes": -1.0}])
def test_a_budget_of_nothing_is_refused(content: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="give a number above 0"):
        from_json(Budget, content, "budget.")


@pytest.mark.parametrize("status", [Status.FAILED, Status.TIMEOUT])
def test_a_failure_is_tried_once_more_and_never_counts_as_an_oom(make_spec: MakeSpec, status: Status) -> None:
    spec = make_spec()
    walk = walk_of(spec)
    assert walk.next() == 1
    walk.take(1, make_record(spec, "a", status))
    assert walk.next() == 1, "once more"
    walk.take(1, make_record(spec, "a", status))
    assert walk.next() is None
    assert walk.limits.too_large is None


def test_stored_records_count_as_measured(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec, store = make_spec(), Store(tmp_path / "s")
    identity = environment.identity(spec.device)

    def save(size: int, status: Status, identifier: str | None = None) -> None:
        sized = replace(spec, batch_size=size)
        identifier = identifier or cell_id(sized, identity)
        store.cell(identifier).begin(sized)
        store.save(make_record(sized, identifier, status))

    save(1, Status.OK)
    save(2, Status.FAILED)  # runs again
    save(3, Status.OK, "measured with another torch")
    walk, other = walk_of(spec), walk_of(make_spec(accumulation=2))
    assert recall([walk, other], {"s": store}) == 1
    assert list(walk.outcomes) == [1]
    assert other.outcomes == {}


def test_a_guess_comes_from_the_most_similar_finished_series(make_spec: MakeSpec) -> None:
    mine = walk_of(make_spec())
    unfinished, other_model = walk_of(make_spec(accumulation=2)), walk_of(make_spec(seq_len=64), fits=3)
    assert guess_from_similar(mine, [mine, unfinished, other_model]) is None
    expandable = walk_of(make_spec(expandable_segments=True), fits=9)
    assert guess_from_similar(mine, [expandable]) == 9
    accumulated = walk_of(make_spec(accumulation=4), fits=7)
    assert guess_from_similar(mine, [expandable, accumulated]) == 7
    assert guess_from_similar(mine, [walk_of(make_spec(accumulation=8), fits=0)]) is None
