"""What a record concludes from its ranks."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from sweep.record import CellRecord, MemoryPeak, NvmlMemory, Phase, RankRecord, Status
from sweep.spec import CellSpec, from_json, to_json

MakeSpec = Callable[..., CellSpec]


def rank(number: int, **fields: Any) -> RankRecord:
    return RankRecord(rank=number, device_name="GPU", capacity_bytes=1, **fields)


def record(spec: CellSpec, *ranks: RankRecord) -> CellRecord:
    return CellRecord(
        cell_id="a",
        series_id="b",
        status=Status.OK,
        spec=spec,
        environment={},
        command="",
        ranks=ranks,
        started_at="2026-01-01",
        duration_seconds=1.0,
    )


def test_throughput_is_the_worlds_and_counts_accumulation_once(make_spec: MakeSpec) -> None:
    spec = make_spec(world_size=2, batch_size=3, accumulation=4, seq_len=32)
    # The slowest rank of each iteration counts; the median of (2, 4, 2) is 2 seconds.
    both = record(spec, rank(0, seconds_per_iteration=(2.0, 1.0, 2.0)), rank(1, seconds_per_iteration=(1.0, 4.0, 1.0)))
    assert both.iteration_seconds == (2.0, 4.0, 2.0)
    assert both.seconds_per_iteration == 2.0
    assert both.samples_per_second == 3 * 4 * 2 / 2
    assert both.tokens_per_second == 3 * 4 * 2 * 32 / 2


def test_tokens_of_one_process_with_several_devices_are_counted_once(make_spec: MakeSpec) -> None:
    content = to_json(make_spec(engine={"name": "device_map"}, world_size=2))
    padded = {"name": "text", "path": "a.txt", "lengths": "maximum"}
    spec = from_json(CellSpec, content | {"workload": padded})
    both = record(spec, rank(0, seconds_per_iteration=(2.0, 2.0), measured_tokens=40), rank(1))
    assert both.tokens_per_second == 10


def test_devices_are_never_summed(make_spec: MakeSpec) -> None:
    def peaks(size: int) -> dict[Phase, MemoryPeak]:
        return {Phase.LOAD: MemoryPeak(allocated_bytes=size, active_bytes=size, reserved_bytes=size + 3)}

    largest = record(make_spec(world_size=2), rank(0, peaks=peaks(5)), rank(1, peaks=peaks(7))).largest_rank
    assert largest is not None
    assert (largest.rank, largest.reserved_peak_bytes, largest.allocated_peak_bytes) == (1, 10, 7)
    assert largest.peaks[Phase.LOAD].fragmentation_bytes == 3


def test_a_record_from_before_a_field_existed_still_loads() -> None:
    old = to_json(rank(0, nvml=NvmlMemory(baseline_bytes=1, peak_bytes=3, samples=2, period_seconds=0.1)))
    for name in ("segments", "reserved_by_iteration_bytes", "parts", "iterations", "in_effect", "host_oom"):
        del old[name]
    for name in ("info_version", "process_bytes"):
        del old["nvml"][name]
    loaded = from_json(RankRecord, old)
    assert loaded.host_oom is False
    assert loaded.reserved_growth_bytes is None
    assert loaded.nvml is not None
    assert (loaded.nvml.used_peak_bytes, loaded.nvml.process_bytes) == (2, None)


def test_a_record_passes_between_processes(make_spec: MakeSpec) -> None:
    one = record(make_spec(), rank(0, nvml=NvmlMemory(baseline_bytes=1, peak_bytes=3, samples=2, period_seconds=0.1)))
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301


def test_unknown_is_none(make_spec: MakeSpec) -> None:
    nothing = record(make_spec(), rank(0))
    assert (nothing.seconds_per_iteration, nothing.tokens_per_second, nothing.largest_rank) == (None, None, None)
    with pytest.raises(AttributeError):
        nothing.cell_id = "other"  # type: ignore[misc]
