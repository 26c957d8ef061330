"""Answers from records: synthetic ones, shaped like those of a real study of checkpointing on eight GPUs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sweep.record import CellRecord, Failure, MemoryPeak, NvmlMemory, Phase, RankRecord, Status
from sweep.spec import CellSpec, DeviceKind, DeviceSpec, EngineName, EngineSpec, GpuSpec, ModelSpec, Precision

MIB = 2**20
GIB = 2**30
CAPACITY = 81_050 * MIB
LLAMA = ModelSpec(
    name="llama3-8b", model_type="llama", parameters=8_030_261_248, config={"num_hidden_layers": 32}
)
CUDA = DeviceSpec(kind=DeviceKind.CUDA)
VIRTUAL = DeviceSpec(kind=DeviceKind.VIRTUAL, gpu=GpuSpec(key="a100-80gb"))
CPU = DeviceSpec(kind=DeviceKind.CPU, memory_limit_bytes=2 * GIB)
ZERO3 = EngineSpec(name=EngineName.DEEPSPEED, zero_stage=3)

# Peaks in MiB (active, reserved) and seconds per iteration by batch size: sequence length 2048, ZeRO-3, AdamW.
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


def out_of_memory(
    cell_spec: CellSpec, phase: Phase = Phase.BACKWARD, requested: int = 2007 * MIB
) -> CellRecord:
    failure = Failure(
        kind="OutOfMemoryError", message="CUDA out of memory.", phase=phase, rank=0, requested_bytes=requested
    )
    capacity = cell_spec.device.memory_limit_bytes or CAPACITY
    rank = RankRecord(
        rank=0, device_name="NVIDIA A100-SXM4-80GB", capacity_bytes=capacity, failure=failure, oom=True
    )
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
            [
                rank_of(k, allocated, reserved, None if virtual else seconds, capacity=capacity)
                for k in range(count)
            ],
        )
    if oom is not None:
        yield out_of_memory(spec(batch_size=oom, **axes))


def thrashing(record: CellRecord, retries: int = 12) -> CellRecord:
    ranks = tuple(replace(rank, alloc_retries=retries) for rank in record.ranks)
    return replace(record, status=Status.THRASHING, ranks=ranks)


def study(device: DeviceSpec = CUDA) -> list[CellRecord]:
    """Three series: checkpointing off and on, and on with expandable segments, where 14 thrashes."""
    last = list(
        walk(CHECKPOINTING_EXPANDABLE, device=device, gradient_checkpointing=True, expandable_segments=True)
    )
    return [
        *walk(NO_CHECKPOINTING, oom=3, device=device, expandable_segments=True),
        *walk(CHECKPOINTING, oom=13, device=device, gradient_checkpointing=True),
        *last[:-1],
        thrashing(last[-1]),
    ]


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
    return records
