"""How long a cell may take, from what those before it took."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from test_store import make_record

from sweep.launch import run_cell
from sweep.launch.pace import FIRST_SECONDS, LEAST_SECONDS, Pace
from sweep.record import CellRecord, Status
from sweep.spec import CellSpec
from sweep.store import Store

MakeSpec = Callable[..., CellSpec]
FOLDER = Path("sweep")


def took(spec: CellSpec, seconds: float, status: Status = Status.OK) -> CellRecord:
    return replace(make_record(spec, "id"), duration_seconds=seconds, status=status)


def test_the_first_cell_of_a_series_has_a_generous_limit(make_spec: MakeSpec) -> None:
    pace, spec = Pace(), make_spec()
    assert pace.timeout_seconds(FOLDER, spec) == FIRST_SECONDS
    pace.learn(FOLDER, took(spec, 1))
    assert pace.timeout_seconds(FOLDER, replace(spec, accumulation=2)) == FIRST_SECONDS
    pace.learn(FOLDER, took(spec, 200))
    assert pace.timeout_seconds(FOLDER, replace(spec, accumulation=2)) == 2 * 10 * 200


def test_the_longest_of_the_series_decides_scaled_to_the_batch(make_spec: MakeSpec) -> None:
    pace, spec = Pace(), make_spec(batch_size=2)
    pace.learn(FOLDER, took(spec, 1))
    assert pace.timeout_seconds(FOLDER, spec) == LEAST_SECONDS
    pace.learn(FOLDER, took(spec, 50))
    pace.learn(FOLDER, took(replace(spec, batch_size=8), 40))
    assert pace.timeout_seconds(FOLDER, replace(spec, batch_size=1)) == 500
    assert pace.timeout_seconds(FOLDER, replace(spec, batch_size=6)) == 1500
    assert pace.timeout_seconds(Path("other"), spec) == FIRST_SECONDS


def test_a_cell_that_did_not_come_to_its_end_teaches_nothing(make_spec: MakeSpec) -> None:
    pace, spec = Pace(), make_spec()
    for status in (Status.TIMEOUT, Status.OOM, Status.FAILED):
        pace.learn(FOLDER, took(spec, 5000, status))
    assert pace.timeout_seconds(FOLDER, spec) == FIRST_SECONDS


def test_a_sweep_that_goes_on_knows_the_pace_of_what_is_stored(make_spec: MakeSpec, tmp_path: Path) -> None:
    store, spec = Store(tmp_path), make_spec()
    store.cell("id").begin(spec)
    store.save(took(spec, 200))
    pace = Pace()
    pace.recall(store)
    assert pace.timeout_seconds(tmp_path, replace(spec, batch_size=2)) == 2 * 10 * 200
    store.cell("id").record_path.write_text("garbage")
    pace.recall(store)
    assert pace.timeout_seconds(tmp_path, spec) == 10 * 200, "read once"
    unreadable = Pace()
    unreadable.recall(store)
    assert unreadable.timeout_seconds(tmp_path, spec) == FIRST_SECONDS


def test_what_is_set_holds(make_spec: MakeSpec, tmp_path: Path) -> None:
    pace, spec = Pace(), make_spec(timeout_seconds=0.5)
    pace.learn(FOLDER, took(spec, 5000))
    assert pace.timeout_seconds(FOLDER, spec) == 0.5
    record = run_cell(spec, Store(tmp_path), [])
    assert (record.status, record.reason) == (Status.TIMEOUT, "no result within 0.5 s")
