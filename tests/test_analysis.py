"""Answers from records: synthetic ones, shaped like those of a real study of checkpointing on eight GPUs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sweep.analysis import (
    Row,
    Series,
    groups,
    headline,
    outcome,
    pairs,
    series_of,
    settings,
    size_text,
    table,
    varying_axes,
)
from sweep.record import CellRecord, Failure, MemoryPeak, NvmlMemory, Phase, RankRecord, Status
from sweep.spec import CellSpec, DeviceKind, DeviceSpec, EngineName, EngineSpec, GpuSpec, ModelSpec, Precision

MIB = 2**20
GIB = 2**30
CAPACITY = 81_050 * MIB
LLAMA = ModelSpec(name="llama3-8b", model_type="llama", parameters=8_030_261_248, config={"num_hidden_layers": 32})
CUDA = DeviceSpec(kind=DeviceKind.CUDA)
VIRTUAL = DeviceSpec(kind=DeviceKind.VIRTUAL, gpu=GpuSpec(key="a100-80gb"))
CPU = DeviceSpec(kind=DeviceKind.CPU, memory_limit_bytes=2 * GIB)
ZERO3 = EngineSpec(name=EngineName.DEEPSPEED, zero_stage=3)

# Peaks in MiB (active, reserved) and seconds per iteration by batch size; sequence length 2048, ZeRO-3.
NO_CHECKPOINTING = {1: (49086, 55030, 0.885), 2: (64180, 72638, 1.452)}
CHECKPOINTING = {
    1: (26523, 37594, 1.048), 2: (28519, 44734, 1.780), 3: (32194, 48414, 2.591), 4: (35406, 49978, 3.344),
    5: (40702, 55060, 4.121), 6: (43226, 61676, 4.927), 7: (46813, 68456, 5.705), 8: (50514, 67408, 6.443),
    9: (55384, 73322, 7.247), 10: (57886, 77492, 7.996), 11: (61313, 75690, 8.825), 12: (64870, 78068, 9.656),
}  # fmt: skip
CHECKPOINTING_EXPANDABLE = {
    1: (26520, 34750, 1.067), 2: (28516, 39390, 1.792), 3: (32040, 43890, 2.599), 4: (35629, 46210, 3.350),
    5: (40700, 52730, 4.128), 6: (43111, 57010, 4.929), 7: (46396, 60190, 5.708), 8: (51377, 66470, 6.441),
    9: (55542, 69750, 7.215), 10: (57771, 72930, 7.993), 11: (62112, 76932, 8.804), 12: (65478, 78030, 9.659),
    13: (69595, 76932, 10.587), 14: (69632, 78572, 17.139),
}  # fmt: skip


def spec(**changes: Any) -> CellSpec:
    values: dict[str, Any] = {
        "model": LLAMA, "engine": ZERO3, "device": CUDA, "world_size": 8, "batch_size": 1, "seq_len": 2048,
        "precision": Precision.BF16,
    }  # fmt: skip
    return CellSpec(**values | changes)


def rank_of(
    rank: int,
    allocated: int,
    reserved: int,
    seconds: float | None,
    *,
    capacity: int = CAPACITY,
    **changes: Any,
) -> RankRecord:
    """Peaks in MiB. The later ranks reserve a little less, as they do in life."""
    peak = MemoryPeak(
        allocated_bytes=allocated * MIB,
        active_bytes=allocated * MIB,
        reserved_bytes=(reserved - 400 * rank) * MIB,
    )
    values: dict[str, Any] = {
        "rank": rank,
        "device_name": "NVIDIA A100-SXM4-80GB",
        "capacity_bytes": capacity,
        "peaks": {Phase.BACKWARD: peak},
        "alloc_retries": 0,
        "seconds_per_iteration": None if seconds is None else (seconds, 0.98 * seconds, 1.03 * seconds),
    }
    return RankRecord(**values | changes)


def cell(
    cell_spec: CellSpec,
    status: Status = Status.OK,
    ranks: Sequence[RankRecord] = (),
    *,
    started: int = 0,
    environment: Mapping[str, Any] | None = None,
    **changes: Any,
) -> CellRecord:
    environment = {"torch": "2.9.1"} if environment is None else environment
    return CellRecord(
        cell_id=f"{cell_spec.series_id}-{cell_spec.batch_size}-{environment}-{started}",
        series_id=cell_spec.series_id,
        status=status,
        spec=cell_spec,
        environment=environment,
        command=f"python -m sweep.run batch_size={cell_spec.batch_size}",
        ranks=tuple(ranks),
        started_at=f"2026-01-02T03:04:{started:02d}",
        duration_seconds=9.0,
        **changes,
    )


def out_of_memory(cell_spec: CellSpec, phase: Phase = Phase.BACKWARD, requested: int = 2007 * MIB) -> CellRecord:
    failure = Failure(
        kind="OutOfMemoryError", message="CUDA out of memory.", phase=phase, rank=0, requested_bytes=requested
    )
    capacity = cell_spec.device.memory_limit_bytes or CAPACITY
    rank = RankRecord(rank=0, device_name="NVIDIA A100-SXM4-80GB", capacity_bytes=capacity, failure=failure, oom=True)
    return cell(cell_spec, Status.OOM, [rank], failure=failure)


def walk(
    figures: Mapping[int, tuple[int, int, float]],
    *,
    oom: int | None = None,
    ranks: int | None = None,
    **axes: Any,
) -> Iterator[CellRecord]:
    """The cells of one series; the virtual device plays one rank and measures no time."""
    for size, (allocated, reserved, seconds) in figures.items():
        one = spec(batch_size=size, **axes)
        virtual = one.device.kind is DeviceKind.VIRTUAL
        count = ranks or (1 if virtual else one.world_size)
        capacity = one.device.memory_limit_bytes or CAPACITY
        yield cell(
            one,
            Status.OK,
            [rank_of(k, allocated, reserved, None if virtual else seconds, capacity=capacity) for k in range(count)],
        )
    if oom is not None:
        yield out_of_memory(spec(batch_size=oom, **axes))


def thrashing(record: CellRecord, retries: int = 12) -> CellRecord:
    ranks = tuple(replace(rank, alloc_retries=retries) for rank in record.ranks)
    return replace(record, status=Status.THRASHING, ranks=ranks)


def study(device: DeviceSpec = CUDA) -> list[CellRecord]:
    """Three series: checkpointing off and on, and on with expandable segments, where 14 thrashes."""
    last = list(walk(CHECKPOINTING_EXPANDABLE, device=device, gradient_checkpointing=True, expandable_segments=True))
    cells = [
        *walk(NO_CHECKPOINTING, oom=3, device=device, expandable_segments=True),
        *walk(CHECKPOINTING, oom=13, device=device, gradient_checkpointing=True),
        *last[:-1],
        thrashing(last[-1]),
    ]
    return _in_order(cells)


def _in_order(records: Iterable[CellRecord]) -> list[CellRecord]:
    return [replace(r, started_at=f"2026-01-02T{i // 60:02d}:{i % 60:02d}:00") for i, r in enumerate(records)]


def grid(device: DeviceSpec = VIRTUAL) -> list[CellRecord]:
    """Sixteen series: checkpointing x expandable segments x precision x accumulation."""
    records: list[CellRecord] = []
    for checkpointing in (False, True):
        for expandable in (False, True):
            for precision, factor in ((Precision.BF16, 1.0), (Precision.FP32, 1.35)):
                for accumulation in (1, 4):
                    fixed = int(26_000 * factor) + (1000 if accumulation > 1 else 0)
                    step = 3_600 if checkpointing else 15_000
                    slack = 1.08 if expandable else 1.25
                    figures = {}
                    size = 1
                    while (allocated := fixed + int(step * factor * size)) * slack < 79_000:
                        figures[size] = (allocated, int(allocated * slack), 0.8 * size * accumulation)
                        size += 1
                    axes: dict[str, Any] = {
                        "gradient_checkpointing": checkpointing, "expandable_segments": expandable,
                        "precision": precision, "accumulation": accumulation, "device": device,
                    }  # fmt: skip
                    records += walk(figures, oom=size, **axes)
    return _in_order(records)


def only(records: Iterable[CellRecord]) -> Series:
    (one,) = series_of(records)
    return one


def row(records: Iterable[CellRecord]) -> Row:
    (one,) = table([only(records)])
    return one


def test_the_study_gives_three_answers() -> None:
    rows = table(series_of(study()))
    assert [r.configuration for r in rows] == [
        {"gradient_checkpointing": "no", "expandable_segments": "yes"},
        {"gradient_checkpointing": "yes", "expandable_segments": "no"},
        {"gradient_checkpointing": "yes", "expandable_segments": "yes"},
    ]
    assert [(r.largest, r.overall, r.effective) for r in rows] == [("2", 16, 16), ("12", 96, 96), ("13", 104, 104)]
    assert [r.next_size for r in rows] == [
        "3: OOM in backward, asked for 1.96 GiB",
        "13: OOM in backward, asked for 1.96 GiB",
        "14: thrashing, 12 allocator retries",
    ]
    assert rows[1].reserved_gib == 78068 / 1024
    assert rows[1].allocated_gib == 64870 / 1024
    assert rows[1].capacity_share == pytest.approx(78068 / 81050)
    assert rows[1].timing == "9.66"
    assert rows[1].tokens_per_second == pytest.approx(12 * 8 * 2048 / 9.656)
    assert rows[1].answer == ("largest that fits: 12 per device, 96 overall; 13: OOM in backward, asked for 1.96 GiB")


def test_no_time_is_shown_for_the_virtual_device() -> None:
    for one in table(series_of(study(VIRTUAL))):
        assert (one.timing, one.seconds_per_iteration, one.tokens_per_second) == ("not measured", None, None)


def test_effective_batch_counts_accumulation() -> None:
    one = row(walk({1: (10, 20, 1.0)}, oom=2, accumulation=4))
    assert (one.overall, one.effective) == (8, 32)


@pytest.mark.parametrize(
    ("records", "largest", "next_size"),
    [
        (walk({1: (10, 20, 1.0), 8: (10, 20, 1.0)}), "at least 8", "nothing larger was tried"),
        (
            [*walk({8: (10, 20, 1.0)}), cell(spec(batch_size=9), Status.FAILED, reason="rank 2 was killed")],
            "at least 8",
            "9: failed: rank 2 was killed",
        ),
        (
            walk({4: (10, 20, 1.0)}, oom=8),
            "at least 4",
            "8: OOM in backward, asked for 1.96 GiB (5 to 7 not tried)",
        ),
        (walk({4: (10, 20, 1.0)}, oom=6), "at least 4", "6: OOM in backward, asked for 1.96 GiB (5 not tried)"),
        ([out_of_memory(spec(), Phase.LOAD)], "none", "1: OOM in load, asked for 1.96 GiB"),
        (walk({}, oom=2), "none", "2: OOM in backward, asked for 1.96 GiB (1 not tried)"),
        (
            [cell(spec(), Status.UNSUPPORTED, reason="fp16 needs a GPU")],
            "unsupported",
            "1: unsupported: fp16 needs a GPU",
        ),
        ([cell(spec(), Status.TIMEOUT)], "unknown", "1: timeout"),
        ([cell(spec(), Status.BUSY_DEVICE, reason="pid 7 holds it")], "unknown", "1: device busy: pid 7 holds it"),
        (
            [*map(thrashing, walk({1: (10, 20, 1.0)})), *walk({}, oom=2)],
            "none",
            "1: thrashing, 12 allocator retries; 2: OOM in backward, asked for 1.96 GiB",
        ),
    ],
)
def test_only_tested_sizes_are_reported(records: Iterable[CellRecord], largest: str, next_size: str) -> None:
    one = row(records)
    assert (one.largest, one.next_size) == (largest, next_size)


def test_a_size_that_fails_below_one_that_fits_is_said() -> None:
    one = row([*walk({1: (10, 20, 1.0), 4: (10, 20, 1.0)}, oom=5), out_of_memory(spec(batch_size=3))])
    assert one.largest == "4"
    assert one.notes == ("3: OOM in backward, asked for 1.96 GiB, although 4 runs",)


def test_a_search_that_came_from_above_ends_at_the_smallest_size_that_fails() -> None:
    records = [*walk({1: (10, 20, 1.0), 2: (20, 30, 2.0)}, oom=8), *(out_of_memory(spec(batch_size=b)) for b in (4, 3))]
    one = only(records)
    assert (one.largest, one.first_oom, one.last_telling, one.bounded) == (2, 3, 3, True)


def test_memory_is_that_of_the_rank_that_reserved_most() -> None:
    ranks = [rank_of(0, 90, 100, 1.0), rank_of(1, 50, 900, 1.0)]
    one = row([cell(spec(), Status.OK, ranks), *walk({}, oom=2)])
    assert one.reserved_gib == 500 / 1024
    assert one.allocated_gib == 50 / 1024


def test_nvml_is_shown_without_what_was_used_before() -> None:
    nvml = NvmlMemory(baseline_bytes=GIB, peak_bytes=4 * GIB, samples=9, period_seconds=0.1)
    assert row([cell(spec(), Status.OK, [rank_of(0, 90, 100, 1.0, nvml=nvml)])]).nvml_gib == 3


def test_labels_name_only_what_varies() -> None:
    series = series_of(study())
    assert varying_axes(series) == ("gradient_checkpointing", "expandable_segments")
    assert [one.label(varying_axes(series)) for one in series] == [
        "no checkpointing, expandable segments",
        "checkpointing, no expandable segments",
        "checkpointing, expandable segments",
    ]
    assert headline(series) == "llama3-8b, ZeRO-3, 8 x A100-SXM4-80GB, sequence length 2048"
    assert settings(series) == "bf16, AdamW"
    assert varying_axes(series[:1]) == ()
    assert series[0].label(("accumulation", "engine")) == "accumulation 1, ZeRO-3"


def test_the_cpu_headline_names_its_limit() -> None:
    series = series_of(walk({1: (10, 20, 1.0)}, device=CPU, world_size=2))
    assert headline(series) == "llama3-8b, ZeRO-3, 2 CPU ranks (limit 2.00 GiB each), sequence length 2048"


def test_a_field_that_is_no_axis_sets_series_apart_all_the_same() -> None:
    series = series_of([*walk({1: (10, 20, 1.0)}, seed=1), *walk({1: (10, 20, 1.0)}, seed=2)])
    assert varying_axes(series) == ("seed",)
    assert [one.label(["seed"]) for one in series] == ["seed 1", "seed 2"]
    assert len(pairs(series, "seed")) == 1


def test_pairs_differ_in_one_axis_alone() -> None:
    series = series_of(study())
    assert [(a.label(["expandable_segments"]), b.largest) for a, b in pairs(series, "expandable_segments")] == [
        ("no expandable segments", 13)
    ]
    assert [(a.largest, b.largest) for a, b in pairs(series, "gradient_checkpointing")] == [(2, 13)]
    assert pairs(series, "precision") == []
    sixteen = series_of(grid())
    assert len(sixteen) == 16
    for axis in varying_axes(sixteen):
        for first, second in pairs(sixteen, axis):
            assert [a for a in first.axes if first.axes[a] != second.axes[a]] == [axis]
        assert len(groups(sixteen, axis)) == 8


def test_models_are_compared_although_their_sizes_differ() -> None:
    small = replace(LLAMA, name="small", parameters=1, config={"num_hidden_layers": 2})
    series = series_of([*walk({1: (10, 20, 1.0)}), *walk({1: (10, 20, 1.0)}, model=small)])
    assert varying_axes(series) == ("model",)
    assert len(pairs(series, "model")) == 1


def test_two_kinds_of_gpu_are_two_series() -> None:
    (here,) = walk({1: (10, 20, 1.0)}, ranks=1)
    there = replace(here, cell_id="there", ranks=(replace(here.ranks[0], device_name="NVIDIA H200"),))
    lost = cell(spec(batch_size=2), Status.FAILED, started=9)
    series = series_of([here, there, lost])
    assert varying_axes(series) == ("gpu",)
    assert [one.label(["gpu"]) for one in series] == ["A100-SXM4-80GB", "H200"]
    assert [list(one.records) for one in series] == [[1], [1, 2]]


def test_an_upgrade_starts_a_series_afresh() -> None:
    ranks = [rank_of(0, 10, 20, 1.0)]
    old = [cell(spec(batch_size=b), Status.OK, ranks, environment={"torch": "2.9.0"}) for b in (1, 2, 3)]
    new = cell(spec(batch_size=1), Status.OK, ranks, environment={"torch": "2.10.0"}, started=5)
    one = row([*old, new])
    assert one.largest == "at least 1"
    assert one.notes == ("older records from another environment, left out: 3",)


def test_outcomes_in_words() -> None:
    failure = Failure(kind="RuntimeError", message="NCCL error " + "x" * 300)
    assert outcome(cell(spec(), Status.OOM)) == "OOM"
    assert outcome(cell(spec(), Status.HOST_OOM, reason="the host ran out")) == "host out of memory: the host ran out"
    assert outcome(cell(spec(), Status.FAILED, failure=failure)).startswith("failed: RuntimeError: NCCL error")
    assert len(outcome(cell(spec(), Status.FAILED, failure=failure))) <= 100


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (2007 * MIB, "1.96 GiB"),
        (81_050 * MIB, "79.2 GiB"),
        (200 * GIB, "200 GiB"),
        (GIB // 2, "0.50 GiB"),
        (20 * MIB, "20 MiB"),
        (512, "512 bytes"),
    ],
)
def test_sizes_in_words(size: int, text: str) -> None:
    assert size_text(size) == text


def test_a_size_far_off_the_line_of_the_smaller_ones_is_not_usable() -> None:
    # Seconds per iteration of the published 8B study: the last size runs, and takes half as long again.
    seconds = {11: 8.825, 12: 9.663, 13: 10.587, 14: 17.139}
    (one,) = series_of(walk({size: (60, 70, t) for size, t in seconds.items()}, oom=15))
    assert (one.largest, one.largest_running, set(one.thrashing)) == (13, 14, {14})
    (row,) = table([one])
    assert row.next_size == "14: runs, but a sample takes 53% longer; 15: OOM in backward, asked for 1.96 GiB"


def test_small_batches_that_use_the_device_badly_are_no_slowdown() -> None:
    (one,) = series_of(walk({1: (10, 20, 1.0), 2: (10, 20, 1.1), 4: (10, 20, 2.5), 8: (10, 20, 4.9)}))
    assert one.largest == 8
    assert not one.thrashing
