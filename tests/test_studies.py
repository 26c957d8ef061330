"""The studies' sentences and pages follow from records: other records, other sentences."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweep.record import CellRecord, Failure, MemoryPeak, Phase, RankRecord, Status
from sweep.spec import CellSpec, from_json, to_json
from sweep.store import Store
from sweep.studies import accumulation_throughput, answers, draw, reasons
from sweep.studies.pages import take, write
from sweep.studies.published import Sources, error, figures_of, published, virtual_then

MakeSpec = Callable[..., CellSpec]
MIB = 2**20


def record_of(spec: CellSpec, allocated: int, reserved: int, losses: Sequence[float] = ()) -> CellRecord:
    peak = MemoryPeak(allocated_bytes=allocated, active_bytes=allocated, reserved_bytes=reserved)
    rank = RankRecord(
        rank=0,
        device_name="made up",
        capacity_bytes=48 * 2**30,
        peaks={Phase.BACKWARD: peak},
        parameters=spec.model.parameters,
        loss_by_iteration=tuple(losses) or None,
    )
    name = "-".join(map(str, (spec.precision.value, spec.accumulation, spec.batch_size)))
    return CellRecord(
        cell_id=name,
        series_id=spec.series_id,
        status=Status.OK,
        spec=spec,
        environment={},
        command="",
        ranks=(rank,),
        started_at="2026-01-01T00:00:00",
        duration_seconds=1.0,
    )


def text_of(questions: str, records: Sequence[CellRecord]) -> str:
    return "\n".join(sentence for answer in answers(questions, records) for sentence in answer.sentences)


def test_the_answers_of_the_study_come_from_its_table() -> None:
    large = [record for record in published("checkpointing") if record.spec.model.name == "llama3-8b"]
    text = text_of("checkpointing", large)
    for part in (
        "Checkpointing, expandable segments: the largest batch that runs goes from 2 to 14 per device (112 overall), 7",
        "Checkpointing in time, expandable segments: checkpointing does not pay",
        "the largest batch that runs goes from 12 to 14 per device",
        "14 runs, but does not count as usable: a sample takes 53% longer",
        "Activations, no checkpointing, expandable segments: 14.74 GiB per sample of 2048 tokens",
        "All 8 GPUs peaked within 0.6% of each other",
    ):
        assert part in text
    smaller = [record for record in large if record.spec.batch_size < 14]
    assert "the largest batch that runs goes from 2 to 13 per device" in text_of("checkpointing", smaller)
    assert "not count as usable" not in text_of("checkpointing", smaller)


def test_what_accumulation_takes_is_explained_only_where_the_figures_agree(make_spec: MakeSpec) -> None:
    spec = make_spec(optimizer="sgd", gradient_checkpointing=True, seq_len=8)
    parameters = spec.model.parameters
    assert parameters is not None
    states, embedding = 8 * parameters, 4096 * 256
    copies = 2 * (parameters - embedding)

    def table(grown: int) -> list[CellRecord]:
        sizes = {("fp32", 1): states, ("fp32", 2): states + 4 * embedding, ("bf16", 1): states}
        sizes["bf16", 2] = states + grown
        return [
            record_of(
                from_json(CellSpec, to_json(spec) | {"precision": precision, "accumulation": n}), size, size + MIB
            )
            for (precision, n), size in sizes.items()
        ]

    (answer,) = answers("accumulation-memory", table(copies))
    first, second, third = answer.sentences
    assert first.startswith("fp32: accumulation 2 takes +4 MiB allocated")
    assert "this is all of it (100.0%)" in first
    assert second.startswith(f"bf16: accumulation 2 takes +{copies / MIB:.0f} MiB allocated")
    assert "this is all of it (100.0%)" in second
    assert "peaks at the same as fp32" in third
    rows = {row[0]: row for row in answer.rows}
    assert rows["bf16: 2 less 1"][-1] == f"+{copies / parameters:.2f}", "in bytes per parameter"
    assert "measured is 200% of that" in text_of("accumulation-memory", table(2 * copies))


@pytest.mark.parametrize(("apart", "verdict"), [(1e-6, "agree: they differ by 1.0e-06"), (0.1, "do not agree")])
def test_loss_curves_are_compared(make_spec: MakeSpec, tmp_path: Path, apart: float, verdict: str) -> None:
    spec = make_spec()
    losses = (0.7, 0.8, 0.6)
    records = [
        record_of(spec, 10 * MIB, 20 * MIB, losses),
        record_of(replace(spec, batch_size=4), 30 * MIB, 60 * MIB, losses),
        record_of(replace(spec, accumulation=4), 12 * MIB, 24 * MIB, [loss * (1 + apart) for loss in losses]),
    ]
    text = text_of("accumulation-throughput", records)
    assert f"fp32: the loss curves of accumulated and real batches {verdict}" in text
    assert (
        "accumulating 4 samples takes 2 MiB more than batch size 1 without accumulation, a real batch of 4 20 MiB"
        in text
    )
    (path,) = draw("accumulation-throughput", records, tmp_path)
    assert path.stat().st_size > 1000
    assert accumulation_throughput.figure(records[:1]) is None, "nothing to compare"


def test_published_and_virtual_figures_lie_side_by_side() -> None:
    assert error(95, 100, 110) == pytest.approx(-0.05)
    assert error(105, 100, 110) == 0
    then = virtual_then()
    for key, figures in figures_of(published("accumulation-memory")).items():
        ours, theirs = then[key].reserved, figures.reserved
        assert ours is not None
        assert theirs is not None
        assert abs(error(ours[1], *theirs)) < 0.005, "with the software of that time"


def test_weights_that_were_kept_are_told_where_they_were_run_again() -> None:
    table = published("checkpointing")
    ran = [
        record_of(record.spec, 50_000 * MIB, 60_000 * MIB)
        for record in table
        if record.spec.model.name == "llama3-8b"
        and not record.spec.gradient_checkpointing
        and record.spec.batch_size == 1
    ]
    assert len(ran) == 1
    sides: dict[str, Any] = {"published": table, "then": {}, "today": table, "here": []}
    told = "\n".join(reasons.checkpointing(Sources(**sides, weights_kept=ran)))
    assert "49086 and 50000 MiB at batch size 1" in told
    assert "no checkpointing, expandable segments: 1 instead of 2" in told
    assert "What changed" not in "\n".join(reasons.checkpointing(Sources(**sides, weights_kept=[])))


def test_committed_records_hold_no_traceback(make_spec: MakeSpec, tmp_path: Path) -> None:
    failure = Failure(kind="OutOfMemoryError", message="asked for 1 GiB", stderr_tail="a machine's paths")
    record = record_of(make_spec(), MIB, MIB)
    record = replace(
        record, status=Status.OOM, failure=failure, ranks=tuple(replace(r, failure=failure) for r in record.ranks)
    )
    store = Store(tmp_path / "results" / "checkpointing-tiny-cpu")
    store.cell(record.cell_id).begin(record.spec)
    store.save(record)
    take(tmp_path / "results", tmp_path / "records")
    (taken,) = Store(tmp_path / "records" / store.name).records()
    for kept in (taken.failure, taken.ranks[0].failure):
        assert kept == replace(failure, stderr_tail=None)


def test_pages_are_written_from_results(make_spec: MakeSpec, tmp_path: Path) -> None:
    store = Store(tmp_path / "results" / "accumulation-throughput-tiny-cpu")
    spec = make_spec()
    for record in (
        record_of(spec, MIB, MIB, (0.7, 0.8)),
        record_of(replace(spec, batch_size=4), MIB, MIB, (0.7, 0.8)),
        record_of(replace(spec, accumulation=4), MIB, MIB, (0.7, 0.8)),
    ):
        store.cell(record.cell_id).begin(record.spec)
        store.save(record)
    take(tmp_path / "results", tmp_path / "records")
    assert len(Store(tmp_path / "records" / store.name).records()) == 3
    written = list(write(tmp_path / "records", tmp_path / "docs", ["accumulation-throughput", "accumulation-memory"]))
    page, memory = (path.read_text() for path in written)
    assert "differ by 0.0e+00 at most" in page
    assert (
        "![The loss of accumulated and real batches, iteration by iteration](accumulation-throughput/losses.png)"
        in page
    )
    assert (tmp_path / "docs/accumulation-throughput/losses.png").is_file()
    assert "| bf16 | 2 | 14094 | 14106 (+0.1%) | 15104 |" in memory, "a side that was not run has no column"
