"""Estimated times: counting, the roofline and its replay, fitting, and the marks that estimates carry."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from test_analysis import study, walk
from test_plots import store_of, words

from sweep import calibrate, compare, plots, recommend, virtual
from sweep.analysis import series_of, table, timing_of
from sweep.calibrate import apply, measured_cells
from sweep.estimate.count import _signature as signature_of
from sweep.estimate.count import operation_of
from sweep.estimate.factors import Calibration, Factors, calibration_of
from sweep.estimate.fit import Measured, adjusted, fit
from sweep.estimate.model import estimate, rates_of, seconds_per_iteration
from sweep.estimate.published import PublishedTable, read_table
from sweep.estimate.work import Kind, Step, Work, read_work
from sweep.launch import run_cell
from sweep.record import CellRecord, Status, TimeEstimate, TimingKind
from sweep.spec import CellSpec
from sweep.store import Store, row

MakeSpec = Callable[..., CellSpec]
DATA = REPOSITORY / "tests/data"
PUBLISHED = REPOSITORY / "sweep/studies/published"
A100 = virtual.gpu("a100-80gb")
FREE = Factors(kernel_seconds=0, collective_seconds=0, operation_seconds=0, launch_seconds=0, collective_call_seconds=0)
"""Nothing but arithmetic and bytes takes time."""
needs_virtual_gpu = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))


def seconds(*steps: Step, factors: Factors = FREE) -> float:
    rates = rates_of(A100, factors)
    assert rates is not None
    return seconds_per_iteration(Work(steps=steps), rates)[0]


def matmul(seconds: float, stream: int = 0) -> Step:
    flops = seconds * 312e12 * FREE.matmul_half
    return Step(Kind.MATMUL, 0, stream, launches=1, flops=flops, tile_flops=flops, detail="half")


def gather(seconds: float, stream: int = 1) -> Step:
    return Step(Kind.COLLECTIVE, 0, stream, launches=1, bytes=seconds * 300e9 * FREE.link, ranks=8, detail="all_gather")


def test_a_step_takes_the_larger_of_arithmetic_and_traffic() -> None:
    moved = 2039e9 * FREE.memory
    assert seconds(matmul(1.0)) == pytest.approx(1)
    assert seconds(matmul(1.0)._replace(bytes=3 * moved)) == pytest.approx(3)
    assert seconds(Step(Kind.MEMORY, 0, 0, launches=1, bytes=moved / 2)) == pytest.approx(0.5)


def test_attention_in_fp32_is_slower_than_in_16_bits() -> None:
    operator = signature_of(torch.ops.aten._scaled_dot_product_efficient_attention.default)
    taken = {}
    for dtype in (torch.bfloat16, torch.float32):
        query = torch.empty(1, 2, 16, 8, dtype=dtype)
        found = operation_of(operator, (query, query, query, None, False), {}, (query,))
        assert found.attention_flops == 2 * 2 * 16 * 16 * (8 + 8)
        taken[dtype] = seconds(Step(Kind.ATTENTION, 0, 0, launches=1, flops=1e12, detail=found.detail))
    assert taken[torch.bfloat16] == pytest.approx(1 / (312 * FREE.attention_efficient))
    assert taken[torch.float32] == pytest.approx(1 / (19.5 * FREE.matmul_single))


def test_communication_hides_behind_computation_as_far_as_events_let_it() -> None:
    contended = 0.19 * 2
    beside = seconds(gather(2.0), matmul(5.0))
    assert beside == pytest.approx(5 + contended)
    wait = (Step(Kind.RECORD, 0, 1, event=7), Step(Kind.WAIT, 0, 0, event=7))
    assert seconds(gather(2.0), *wait, matmul(5.0), Step(Kind.HOST_ALL, 0, -1)) >= 7


def test_side_streams_share_the_device() -> None:
    assert seconds(matmul(5.0), matmul(1.0, stream=3)) == pytest.approx(6)


def test_a_host_that_is_too_slow_shows_and_one_that_is_not_does_not() -> None:
    factors = replace(FREE, operation_seconds=1e-3)
    assert seconds(matmul(0.5)._replace(operations=2000), factors=factors) == pytest.approx(2.0, rel=0.3)
    assert seconds(matmul(0.5)._replace(operations=10), factors=factors) == pytest.approx(0.5, rel=0.03)


@needs_virtual_gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_work_of_a_cell_is_what_its_architecture_says(
    make_spec: MakeSpec, tmp_path: Path, checkpointing: bool
) -> None:
    spec = make_spec(
        device={"kind": "virtual", "gpu": {"key": "a100-80gb"}},
        seq_len=64,
        batch_size=4,
        world_size=8,
        gradient_checkpointing=checkpointing,
    )
    record = run_cell(spec, Store(tmp_path), [])
    assert record.status is Status.OK, record.failure
    sums = record.ranks[0].work
    assert sums is not None
    hidden, inner, vocabulary, layers, tokens = 256, 704, 4096, 4, 4 * 64
    head = vocabulary * hidden
    linear = 5048576 - 2 * head - (2 * layers + 1) * hidden  # without embedding, head and norms
    # Recomputation stops before the last product of a layer: nothing needs its result.
    again = linear - layers * inner * hidden if checkpointing else 0
    assert sums["matmul.single.flops"] == 2 * tokens * (3 * (linear + head) + again)
    assert sums["collective.all_reduce.bytes"] == pytest.approx(2 * 7 / 8 * 4 * 5048576, rel=0.01)
    assert record.timing_kind is TimingKind.ESTIMATED
    assert record.seconds_per_iteration is None
    assert record.estimate is not None
    assert record.estimate.uncertainty == 0.25
    other = run_cell(replace(spec, seed=1), Store(tmp_path), [])
    first, second = (read_work(tmp_path / "cells" / each.cell_id) for each in (record, other))
    assert first is not None
    assert first == second


@pytest.fixture(scope="module")
def llama() -> PublishedTable:
    return read_table(PUBLISHED / "checkpointing_8b.csv", "a100-80gb", DATA / "work", "8b", largest=13)


def test_the_published_study_is_met_without_fitting_to_it(llama: PublishedTable) -> None:
    found = llama.errors()
    assert max(map(abs, found)) < 0.25
    measured, estimated = llama.lines(), llama.lines(found)
    for checkpointing in (False, True):
        slope = estimated.per_sample[checkpointing] / measured.per_sample[checkpointing]
        assert abs(slope - 1) < 0.15
    assert abs(estimated.ratio / measured.ratio - 1) < 0.10


def test_a_small_model_on_a_consumer_gpu_is_met_within_a_quarter() -> None:
    small = read_table(PUBLISHED / "checkpointing_0.5b.csv", "rtx3090", DATA / "work", "05b")
    found = small.errors()
    assert max(map(abs, found)) < 0.25
    measured, estimated = small.lines(), small.lines(found)
    slopes = (estimated.per_sample[on] / measured.per_sample[on] for on in (False, True))
    assert all(abs(slope - 1) < 0.25 for slope in slopes)
    assert abs(estimated.ratio / measured.ratio - 1) < 0.10


def test_the_finding_of_the_study_comes_out_of_the_estimates(llama: PublishedTable) -> None:
    """Checkpointing does not pay in time: at no batch size is a sample faster than at the best size without it."""
    per_sample: dict[bool, list[float]] = {False: [], True: []}
    for each, error in zip(llama.cells, llama.errors(), strict=True):
        estimated = each.cell.seconds_per_iteration * (1 + error)
        per_sample[each.gradient_checkpointing].append(estimated / each.batch_size)
    assert min(per_sample[True]) > 1.05 * min(per_sample[False])


@pytest.mark.slow
def test_fitted_to_half_of_the_study_the_other_half_is_within_seven_percent(llama: PublishedTable) -> None:
    assert max(map(abs, llama.errors_of_other_half(0))) < 0.07


def test_a_fit_finds_the_factors_that_made_the_measurements() -> None:
    truth = adjusted(Factors(), {"arithmetic": -0.2, "memory": 0.15, "communication": 0.0, "host": 0.0})
    rates = rates_of(A100, truth)
    assert rates is not None
    cells = []
    for size in (1, 2, 4, 8):
        memory = Step(Kind.MEMORY, 0, 0, launches=1, bytes=1e12 + 1e11 * size)
        work = Work(steps=(matmul(0.3 * size), memory))
        cells.append(Measured(work=work, seconds_per_iteration=seconds_per_iteration(work, rates)[0]))
    found = fit(cells, A100, "made up")
    assert found.factors.matmul_half == pytest.approx(truth.matmul_half, rel=0.02)
    assert found.factors.memory == pytest.approx(truth.memory, rel=0.02)
    assert found.uncertainty == 0.10
    assert found.cells == 4


def test_a_calibration_is_kept_and_used(tmp_path: Path) -> None:
    slower = Calibration(gpu="a100-80gb", factors=replace(Factors(), memory=0.4), cells=3, source="here")
    slower.save(tmp_path)
    assert calibration_of("a100-80gb", tmp_path) == slower
    assert calibration_of("h200", tmp_path).cells == 0
    work = Work(steps=(Step(Kind.MEMORY, 0, 0, launches=1, bytes=1e12),))
    before, after = (
        estimate(work, A100, calibration_of("a100-80gb", folder)) for folder in (tmp_path / "no", tmp_path)
    )
    assert before is not None
    assert after is not None
    assert after.seconds_per_iteration == pytest.approx(2 * before.seconds_per_iteration, rel=0.01)
    assert "default factors" in before.model
    assert "fitted to 3 cells (here)" in after.model


def test_nothing_is_fitted_to_a_size_that_the_allocator_slows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: 1.0, 2: 2.0, 3: 9.0}
    cells = walk({size: (10_000, 20_000, seconds) for size, seconds in times.items()})
    records = [replace(record, cell_id=str(record.spec.batch_size)) for record in cells]
    counted: list[int] = []

    def count(twin: CellSpec, *_: object) -> CellRecord:
        counted.append(twin.batch_size)
        return records[0]

    monkeypatch.setattr(calibrate, "run_cell", count)
    monkeypatch.setattr(calibrate, "read_work", lambda path: Work(steps=()))
    (fitted,) = measured_cells(records, Store(tmp_path)).values()
    assert counted == [1, 2]
    assert [cell.seconds_per_iteration for cell in fitted] == [1.0, 2.0]


def estimated(records: list[CellRecord]) -> list[CellRecord]:
    """The same cells on the virtual GPU, with times that were computed."""
    found = []
    for record in records:
        ranks = tuple(replace(rank, seconds_per_iteration=None) for rank in record.ranks)
        time = record.seconds_per_iteration
        guess = TimeEstimate(seconds_per_iteration=1.1 * time, uncertainty=0.25, model="m") if time else None
        found.append(replace(record, ranks=ranks, estimate=guess))
    return found


def test_an_estimate_is_marked_wherever_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = estimated(study())
    series = series_of(records)
    shown = [r for r in table(series) if r.seconds_per_iteration]
    assert shown
    assert all(r.timing.endswith(" est.") and r.time_mark for r in shown)
    for name, figure in plots.figures(series):
        text = words(figure)
        if "time" in name or name in ("samples", "pareto"):
            assert "estimated" in text
            assert "expect the truth within 25%" in text.replace("\n", " ")
    store = store_of(tmp_path / "guessed", records)
    one = next(record for record in records if record.estimate)
    line = row(one)
    assert (line["timing"], line["seconds_per_iteration"]) == ("estimated", None)
    assert line["estimated_seconds_per_iteration"] == timing_of(one).seconds  # type: ignore[union-attr]
    assert recommend.main([str(store.path), "--effective-batch", "8"]) == 0
    assert "warning: no time was measured" in " ".join(capsys.readouterr().out.lower().split())
    assert apply(store, tmp_path) == 0  # nothing was counted here, and so nothing changes


def test_measured_against_estimated_gives_the_error_of_the_estimate() -> None:
    measured = study()
    guessed = estimated(study())
    found, _, _ = compare.differences(series_of(measured), series_of(guessed))
    errors = [one.estimate_error for one in found if one.estimate_error is not None]
    assert errors
    assert all(math.isclose(error, 0.1, rel_tol=1e-6) for error in errors)
    assert all(one.time is None for one in found)


def test_a_measured_time_wins_over_an_estimate() -> None:
    record = next(r for r in study() if r.seconds_per_iteration)
    both = replace(record, estimate=TimeEstimate(seconds_per_iteration=9.0, uncertainty=0.25, model="m"))
    timing = timing_of(both)
    assert timing is not None
    assert (timing.kind, timing.seconds) == (TimingKind.MEASURED, record.seconds_per_iteration)
    assert row(both)["timing"] == "measured"
