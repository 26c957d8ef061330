"""What a cell's record holds besides its headline, in words; and which of it a reader should not miss."""

from collections.abc import Iterator

from sweep.analysis.timing import timing_of
from sweep.analysis.words import failure_of, size_text
from sweep.record import CellRecord, InEffect, IterationParts, NvmlMemory, RankRecord

NEAR_ZERO_BYTES = 100 * 2**20
"""In use before the cell began: what a driver or a display takes of an idle device stays below."""
UNEVEN = 0.05
"""Part of the largest rank's reserved memory by which the smallest may be lower before it is worth a word."""
SHORT_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Fact = tuple[str, str]
"""What it is about, and what there is to say."""


def details(record: CellRecord) -> list[Fact]:
    """Everything of a cell that its record knows; what is not known is left out."""
    return [*_failed(record), *_memory(record), *_time(record), *_in_effect(record)]


def noteworthy(record: CellRecord) -> list[Fact]:
    """What makes a cell's figures less than plain: others on the device, memory that still grows, uneven ranks."""
    return [*_others(record), *_growth(record), *_spread(record, at_least=UNEVEN)]


def _failed(record: CellRecord) -> Iterator[Fact]:
    failure = failure_of(record)
    if failure is None:
        return
    sizes = {
        "asked for": failure.requested_bytes,
        "free on the device": failure.free_bytes,
        "allocated": failure.allocated_bytes,
        "reserved": failure.reserved_bytes,
    }
    if said := [f"{name} {size_text(size)}" for name, size in sizes.items() if size is not None]:
        yield f"when it failed on rank {failure.rank or 0}", ", ".join(said)


def _memory(record: CellRecord) -> Iterator[Fact]:
    rank = record.largest_rank
    if rank is not None and rank.peaks:
        phases = (f"{phase.value} {size_text(peak.allocated_bytes)}" for phase, peak in rank.peaks.items())
        yield "allocated, peak by phase", ", ".join(phases)
    if rank is not None and rank.nvml is not None:
        yield "NVML", f"{size_text(rank.nvml.used_peak_bytes)} more than before, in {rank.nvml.samples} samples"
    yield from _spread(record)
    yield from _others(record)
    yield from _growth(record)
    yield from _settling(record)
    if rank is not None and rank.warmup_alloc_retries:
        yield "allocator retries", f"{rank.warmup_alloc_retries} in the warm-up, {rank.alloc_retries or 0} measured"


def _spread(record: CellRecord, at_least: float = 0.0) -> Iterator[Fact]:
    known = {rank.rank: size for rank in record.ranks if (size := rank.reserved_peak_bytes) is not None}
    if len(known) < 2:
        return
    low, high = (pick(known, key=lambda rank: known[rank]) for pick in (min, max))
    part = 1 - known[low] / known[high] if known[high] else 0.0
    if part >= at_least:
        yield (
            "reserved, by rank",
            f"{size_text(known[low])} (rank {low}) to {size_text(known[high])} (rank {high}), {part:.1%} apart",
        )


def _others(record: CellRecord) -> Iterator[Fact]:
    for rank in record.ranks:
        nvml = rank.nvml
        if nvml is not None and nvml.baseline_bytes > NEAR_ZERO_BYTES:
            yield "in use before", f"{size_text(nvml.baseline_bytes)} of {_device(rank)}{_since(nvml)}"


def _since(nvml: NvmlMemory) -> str:
    others = nvml.other_processes_bytes
    return "" if others is None else f"; others held {size_text(others)} at the end"


def _device(rank: RankRecord) -> str:
    name = rank.device_name.removeprefix("NVIDIA ")
    return f"rank {rank.rank}'s {name}{f' ({rank.device_uuid})' if rank.device_uuid else ''}"


def _growth(record: CellRecord) -> Iterator[Fact]:
    """Where the last of several measured iterations still reserved more; after the first one it may just settle."""
    for rank in record.ranks:
        reserved = rank.reserved_by_iteration_bytes or ()
        if len(reserved) > 2 and reserved[-1] > reserved[-2]:
            yield (
                "reserved",
                f"still growing: on rank {rank.rank} by {size_text(reserved[-1] - reserved[-2])} in the last iteration "
                f"and {size_text(reserved[-1] - reserved[0])} since the warm-up, so that a longer run may need more",
            )


def _settling(record: CellRecord) -> Iterator[Fact]:
    rank = record.largest_rank
    reserved = (rank.reserved_by_iteration_bytes or ()) if rank else ()
    if reserved and reserved[0] != reserved[-1]:
        ends = f"{size_text(reserved[0])} after the warm-up, {size_text(reserved[-1])} at the end"
        yield "reserved, by iteration", ends


def _time(record: CellRecord) -> Iterator[Fact]:
    timing = timing_of(record)
    if timing is not None and timing.fastest_seconds < timing.slowest_seconds:
        yield "seconds per iteration", f"{timing.fastest_seconds:.4g} to {timing.slowest_seconds:.4g}"
    slowest = max(
        (rank for rank in record.ranks if rank.parts and rank.seconds_per_iteration),
        key=lambda rank: sum(rank.seconds_per_iteration or ()),
        default=None,
    )
    if slowest is not None and slowest.parts is not None and (shares := _shares(slowest.parts)):
        yield "parts of an iteration", shares + (f" (rank {slowest.rank})" if len(record.ranks) > 1 else "")


def _shares(parts: IterationParts) -> str:
    """Of the device's time; the host's time for data runs beside it, and is given as a part of the same whole."""
    device = {
        "forward": sum(parts.forward_seconds),
        "backward": sum(parts.backward_seconds),
        "optimizer": sum(parts.optimizer_seconds),
    }
    whole = sum(device.values())
    if not whole:
        return ""
    said = [f"{name} {seconds / whole:.0%}" for name, seconds in device.items()]
    return f"{', '.join(said)}; the host makes the data in {sum(parts.data_seconds) / whole:.1%} of that"


def _in_effect(record: CellRecord) -> Iterator[Fact]:
    seen = next((rank.in_effect for rank in record.ranks if rank.in_effect), None)
    if seen is not None:
        yield "in effect", _effects(seen)


def _effects(seen: InEffect) -> str:
    kinds = {
        "computes in": seen.compute_dtypes,
        "parameters": seen.parameter_dtypes,
        "gradients": seen.gradient_dtypes,
        "optimizer states": seen.optimizer_state_dtypes,
    }
    said = [f"{name} {' and '.join(SHORT_TYPES.get(t, t) for t in types)}" for name, types in kinds.items() if types]
    if seen.layer_forwards is not None:
        times = {1: "once", 2: "twice, which recomputes it"}.get(seen.layer_forwards, f"{seen.layer_forwards} times")
        said.append(f"a layer's forward runs {times}")
    return ", ".join(said)
