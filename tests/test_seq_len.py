"""The sequence length as what is searched: the walk, the series, and the whole of it on the virtual GPU."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_store import make_record

from sweep import analysis, environment, virtual
from sweep.config import Job
from sweep.plan import Outcome, Search
from sweep.record import CellRecord, Status
from sweep.spec import CellSpec, SizeAxis, cell_id
from sweep.store import Store
from sweep.walks import Walk, guess_from_similar, recall

MakeSpec = Callable[..., CellSpec]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def length_walk(spec: CellSpec) -> Walk:
    return Walk(overrides=["a=1"], job=Job(sweep="s", spec=spec), search=Search(), axis=SizeAxis.SEQ_LEN, unit=64)


def cells(spec: CellSpec, lengths: dict[int, Status], searched: SizeAxis = SizeAxis.SEQ_LEN) -> list[CellRecord]:
    sized = {length: replace(spec, seq_len=length) for length in lengths}
    return [
        replace(make_record(sized[length], f"{spec.batch_size} {length}", status), searched=searched)
        for length, status in lengths.items()
    ]


def test_a_walk_counts_steps_of_the_sequence_length(make_spec: MakeSpec) -> None:
    walk = length_walk(make_spec(seq_len=64))
    assert walk.next() == 1
    assert walk.spec_at(3).seq_len == 192
    assert walk.overrides_at(3) == ["a=1", "search.axis=seq_len", "seq_len=192"]
    assert walk.size_of(walk.spec_at(3)) == 3
    assert walk.size_of(replace(walk.job.spec, seq_len=100)) is None, "between two steps"
    assert walk.series_id == length_walk(make_spec(seq_len=512)).series_id
    assert walk.series_id != length_walk(make_spec(seq_len=64, batch_size=2)).series_id


def test_stored_cells_of_any_search_are_reused(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec, store = make_spec(), Store(tmp_path / "s")
    for length in (64, 100, 192):
        sized = replace(spec, seq_len=length)
        identifier = cell_id(sized, environment.identity(spec.device))
        store.cell(identifier).begin(sized)
        store.save(make_record(sized, identifier))
    walk = length_walk(replace(spec, seq_len=64))
    assert recall([walk], {"s": store}) == 2
    assert sorted(walk.outcomes) == [1, 3]


def test_a_guess_does_not_come_from_a_search_of_another_kind(make_spec: MakeSpec) -> None:
    outcomes = {5: Outcome(status=Status.OK), 6: Outcome(status=Status.OOM)}
    lengths, other = length_walk(make_spec(seq_len=64)), length_walk(make_spec(seq_len=64, accumulation=2))
    sizes = Walk(overrides=[], job=Job(sweep="s", spec=make_spec(seq_len=64)), search=Search())
    sizes.outcomes, other.outcomes = dict(outcomes), dict(outcomes)
    assert guess_from_similar(lengths, [sizes]) is None
    assert guess_from_similar(lengths, [sizes, other]) == 5


def answers(records: Sequence[CellRecord]) -> list[str]:
    return [row.answer for row in analysis.table(analysis.series_of(records))]


def test_the_largest_length_is_bounded_by_the_next_step(make_spec: MakeSpec) -> None:
    spec = make_spec(batch_size=2)
    ran = {64: Status.OK, 128: Status.OK, 256: Status.OK}
    (one,) = analysis.series_of(cells(spec, ran | {320: Status.OOM}))
    assert (one.size_axis, one.largest, one.first_oom, one.step, one.bounded) == (SizeAxis.SEQ_LEN, 256, 320, 64, True)
    assert one.slowdowns == {}, "a longer sequence may cost more per token"
    assert answers(cells(spec, ran | {320: Status.OOM})) == ["largest that fits: 256; 320: OOM"]
    gap = cells(spec, ran | {512: Status.OOM})
    assert answers(gap) == ["largest that fits: at least 256; 512: OOM (320 to 448 not tried)"]
    assert "batch size 2" in analysis.headline(analysis.series_of(gap))


def test_a_cell_may_belong_to_both_kinds_of_series(make_spec: MakeSpec) -> None:
    lengths = cells(make_spec(), {64: Status.OK, 128: Status.OOM})
    sizes = [replace(make_record(make_spec(seq_len=64, batch_size=size), f"b{size}")) for size in (2, 3)]
    found = {one.size_axis: list(one.records) for one in analysis.series_of([*sizes, *lengths])}
    assert found == {SizeAxis.BATCH_SIZE: [1, 2, 3], SizeAxis.SEQ_LEN: [64, 128]}
    listed = cells(make_spec(), {64: Status.OK, 128: Status.OOM}, SizeAxis.BATCH_SIZE)
    assert [one.size_axis for one in analysis.series_of(listed)] == [SizeAxis.BATCH_SIZE] * 2, "as they were asked for"


@pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))
def test_the_longest_sequence_at_a_batch_size(run_sweep: Run, tmp_path: Path) -> None:
    """Memory is quadratic in the length with eager attention: the answer is measured on both sides all the same."""
    device = ("device=virtual", "gpu.total_memory_bytes=2147483648", "world_size=1", "engine=ddp", "precision=fp32")
    done = run_sweep(
        "model=tiny", *device, "grid=none", "batch_size=8", "seq_len=???", "search.seq_len_step=128", "search.points=0",
        "attention=eager", "steps=1", "sweep=length",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/length/cells/*/record.json")]
    statuses = {record["spec"]["seq_len"]: record["status"] for record in records}
    longest = max(length for length, status in statuses.items() if status == "ok")
    assert statuses[longest + 128] == "oom"
    assert all(length % 128 == 0 for length in statuses)
    assert "longest" in done.stdout
    assert (tmp_path / "plots/length").is_dir()

    again = run_sweep("report", "results/length", module="sweep.cli")
    assert "longest sequence that fits, in tokens" in (tmp_path / "results/length/summary.md").read_text(), again.stderr
