import csv
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sweep import store as store_module
from sweep.record import CellRecord, MemoryPeak, Phase, RankRecord, Status
from sweep.spec import CellSpec, from_json, to_json
from sweep.store import Store, StoreError


def make_record(spec: CellSpec, identifier: str, status: Status = Status.OK) -> CellRecord:
    ranks = tuple(
        RankRecord(
            rank=rank,
            device_name="GPU",
            capacity_bytes=100,
            peaks={
                Phase.FORWARD: MemoryPeak(allocated_bytes=10 + rank, active_bytes=11, reserved_bytes=20 + rank),
                Phase.BACKWARD: MemoryPeak(allocated_bytes=15, active_bytes=15, reserved_bytes=18),
            },
            alloc_retries=0,
            seconds_per_iteration=(1.0 + rank, 3.0, 2.0),
        )
        for rank in range(2)
    )
    return CellRecord(
        cell_id=identifier,
        series_id=spec.series_id,
        status=status,
        spec=spec,
        environment={"torch": "2"},
        command="python -m sweep.run",
        ranks=ranks,
        started_at="2026-01-01T00:00:00",
        duration_seconds=1.5,
    )


def test_a_record_without_a_place_is_kept_beside_it(make_spec: Callable[..., CellSpec], tmp_path: Path) -> None:
    store, record = Store(tmp_path), make_record(make_spec(), "cell")
    (tmp_path / "cells").mkdir()
    blocked = tmp_path / "cells/cell"
    blocked.write_text("a file where the folder should be")
    store.save(record)
    assert store.records() == [record]
    assert store.find("cell") == record
    blocked.unlink()
    store.cell("cell").begin(make_spec())
    store.save(record)
    assert not store.lost_path("cell").exists()
    assert Store(tmp_path).records() == [record]


def test_a_record_survives_json(make_spec: Callable[..., CellSpec]) -> None:
    record = make_record(make_spec(), "a")
    assert from_json(CellRecord, json.loads(json.dumps(to_json(record)))) == record


def test_the_headline_is_the_rank_that_reserved_most(make_spec: Callable[..., CellSpec]) -> None:
    largest = make_record(make_spec(), "a").largest_rank
    assert largest is not None
    assert (largest.rank, largest.reserved_peak_bytes, largest.allocated_peak_bytes) == (1, 21, 15)


def test_an_iteration_takes_as_long_as_its_slowest_rank(make_spec: Callable[..., CellSpec]) -> None:
    record = make_record(make_spec(world_size=2, batch_size=3, accumulation=2, seq_len=32), "a")
    assert record.iteration_seconds == (2.0, 3.0, 2.0)
    assert record.seconds_per_iteration == 2.0
    assert record.samples_per_second == 3 * 2 * 2 / 2.0
    assert record.tokens_per_second == 3 * 2 * 2 * 32 / 2.0


def test_records_come_back_by_series_and_batch_size(tmp_path: Path, make_spec: Callable[..., CellSpec]) -> None:
    store, spec = Store(tmp_path / "s"), make_spec()
    for size in (4, 1, 2):
        cell = store.cell(f"cell{size}")
        cell.begin(replace(spec, batch_size=size))
        store.save(make_record(replace(spec, batch_size=size), f"cell{size}"))
    assert [record.spec.batch_size for record in store.records()] == [1, 2, 4]
    store.write_table()
    rows = list(csv.DictReader(store.table_path.read_text().splitlines()))
    assert [row["batch_size"] for row in rows] == ["1", "2", "4"]
    assert rows[0]["reserved_peak_bytes"] == "21"
    assert rows[0]["timing"] == "measured"


def test_a_cell_without_a_record_starts_afresh(tmp_path: Path, make_spec: Callable[..., CellSpec]) -> None:
    cell = Store(tmp_path / "s").cell("a")
    cell.begin(make_spec())
    cell.rank_path(0).write_text("{half")
    assert cell.read_record() is None
    cell.begin(make_spec())
    assert cell.read_ranks() == []
    assert cell.read_spec() == make_spec()


def test_a_damaged_record_is_named(tmp_path: Path, make_spec: Callable[..., CellSpec]) -> None:
    store = Store(tmp_path / "s")
    store.cell("a").begin(make_spec())
    store.cell("a").record_path.write_text('{"cell_id": ')
    with pytest.raises(StoreError, match=r"record.json cannot be read .*; delete it to measure the cell again"):
        store.records()


def test_only_one_sweep_writes_a_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from sweep.store import Store\n"
        "with Store(Path(sys.argv[1])).lock(): pass"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "s")]
    with Store(tmp_path / "s").lock():
        second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another sweep is writing to" in second.stderr
    assert subprocess.run(command, check=False).returncode == 0


@pytest.fixture
def many(tmp_path: Path, make_spec: Callable[..., CellSpec], monkeypatch: pytest.MonkeyPatch) -> Store:
    """Twenty records, in a store that keeps an index from five on."""
    monkeypatch.setattr(store_module, "INDEXED_FROM", 5)
    store = Store(tmp_path / "many")
    for size in range(1, 21):
        store.cell(str(size)).begin(replace(make_spec(), batch_size=size))
        store.save(make_record(replace(make_spec(), batch_size=size), str(size)))
    return store


def test_the_index_gives_the_same_records(many: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from_files = many.records()
    assert many.index_path.exists()
    monkeypatch.setattr(store_module.CellDirectory, "read_record", None)
    assert Store(many.path).records() == from_files


def test_a_stale_index_is_noticed(many: Store) -> None:
    before = many.records()
    index = many.index_path.read_text()
    changed = replace(before[0], status=Status.FAILED, reason="another")
    many.save(changed)
    many.cell("20").record_path.unlink()
    for store in (many, Store(many.path)):
        assert store.records() == [changed, *before[1:-1]]
    assert many.index_path.read_text() == index, "two of twenty are read beside it"
    for record in before[1:5]:
        many.save(replace(record, reason="new"))
    assert [record.reason for record in Store(many.path).records()][1:5] == ["new"] * 4
    assert many.index_path.read_text() != index


@pytest.mark.parametrize("damage", ["{", '{"cell": 1}', "[]", '"x"', "\x00"])
def test_a_damaged_index_is_made_anew(many: Store, damage: str) -> None:
    before = many.records()
    many.index_path.write_text(damage + "\n")
    assert Store(many.path).records() == before
    assert many.index_path.read_text() != damage
