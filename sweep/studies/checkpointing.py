"""Gradient checkpointing x expandable segments: what each gains in batch size, and what it costs."""

import statistics
from collections.abc import Iterator, Sequence

from sweep import analysis
from sweep.analysis import GIB, MIB, Series, size_text
from sweep.record import CellRecord, Status
from sweep.studies.answer import Answer

CHECKPOINTING, SEGMENTS = "gradient_checkpointing", "expandable_segments"


def answers(records: Sequence[CellRecord]) -> list[Answer]:
    """One per model and device; the series are told apart by checkpointing and expandable segments."""
    series = [one for one in analysis.series_of(records) if one.measured]
    titles = dict.fromkeys(analysis.headline([one]) for one in series)
    return [
        Answer(title=title, sentences=tuple(_sentences([one for one in series if analysis.headline([one]) == title])))
        for title in titles
    ]


def _sentences(series: Sequence[Series]) -> Iterator[str]:
    checkpointed, segmented = (analysis.pairs(series, axis) for axis in (CHECKPOINTING, SEGMENTS))
    for without, with_ in checkpointed:
        yield f"Checkpointing, {_name(with_, SEGMENTS)}: {_gain(without, with_)}."
    yield from _times(checkpointed, "Checkpointing", SEGMENTS)
    for without, with_ in segmented:
        gain = f"{_gain(without, with_)}; {_reserved(without, with_)}"
        yield f"Expandable segments, {_name(with_, CHECKPOINTING)}: {gain}."
    yield from _times(segmented, "Expandable segments", CHECKPOINTING)
    for one in series:
        yield f"The last batch, {_name(one, CHECKPOINTING, SEGMENTS)}: {_last(one)}."
    for one in series:
        if activations := _activations(one):
            yield f"Activations, {_name(one, CHECKPOINTING, SEGMENTS)}: {activations}."
    yield from _duplicated(series)


def _name(one: Series, *axes: str) -> str:
    return one.label(axes)


def _gain(without: Series, with_: Series) -> str:
    """`the largest batch that runs goes from 2 to 14 per device (7 times), ...`."""
    before, after = without.largest_running or 0, with_.largest_running or 0
    world = with_.spec.world_size
    text = f"the largest batch that runs {_change(before, after)} per device"
    if world > 1:
        text += f" ({after * world} overall)"
    if before and after != before:
        text += f", {after / before:.3g} times"
    if (before, after) != (useful := (without.largest or 0, with_.largest or 0)):
        text += f"; the largest that is usable {_change(*useful)}"
    return text


def _change(before: int, after: int) -> str:
    return f"stays at {after}" if after == before else f"goes from {before} to {after}"


def _times(pairs: Sequence[tuple[Series, Series]], what: str, other: str) -> Iterator[str]:
    """Whether it pays: the fewest seconds a sample with it, at any batch size, against the fewest without."""
    timed = [(a, b) for a, b in pairs if a.fastest and b.fastest]
    for without, with_ in timed:
        (verdict,) = analysis.verdicts([[without, with_]], CHECKPOINTING if other == SEGMENTS else SEGMENTS)
        alike = sorted(set(_seconds(without)) & set(_seconds(with_)))
        text = f"{what} in time, {_name(with_, other)}: {_plain(verdict)}"
        if alike:
            ratios = [_seconds(with_)[size] / _seconds(without)[size] - 1 for size in alike]
            text += f"; an iteration of as many samples takes {_span(ratios)}"
        yield text + "."
    if len(timed) < len(pairs):
        yield f"{what} in time: not answered here for {len(pairs) - len(timed)} of {len(pairs)} pairs, without times."


def _plain(verdict: str) -> str:
    """A chart's verdict without the chart."""
    return verdict.replace("never gets below the dotted line", "does not pay").replace(
        "gets below the dotted line", "pays"
    )


def _seconds(one: Series) -> dict[int, float]:
    """Seconds per iteration by batch size, of the usable sizes."""
    found = {size: analysis.timing_of(record) for size, record in one.records.items() if size not in one.thrashing}
    return {size: timing.seconds for size, timing in found.items() if timing}


def _span(ratios: Sequence[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"{low:+.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:+.1%} to {high:+.1%}"


def _reserved(without: Series, with_: Series) -> str:
    sizes = [size for size in _reserved_by_size(without) if size in _reserved_by_size(with_)]
    if not sizes:
        return "no batch size ran both ways"
    saved = [_reserved_by_size(without)[size] - _reserved_by_size(with_)[size] for size in sizes]
    which = f"at batch size {sizes[0]}" if len(sizes) == 1 else f"at the {len(sizes)} sizes that run both ways"
    middle = statistics.median(saved)
    return f"PyTorch reserves {size_text(round(abs(middle)))} {'less' if middle >= 0 else 'more'} {which} (median)"


def _reserved_by_size(one: Series) -> dict[int, int]:
    return {r.spec.batch_size: rank.reserved_peak_bytes or 0 for r in one.measured if (rank := r.largest_rank)}


def _last(one: Series) -> str:
    """Whether the largest batch that runs is usable, and why not."""
    last = one.records[one.largest_running or 0]
    size, rank = last.spec.batch_size, last.largest_rank
    assert rank is not None
    room = f"{size_text(rank.reserved_peak_bytes or 0)} of {size_text(rank.capacity_bytes)} are reserved"
    why = []
    if last.status is Status.THRASHING:
        retries = max(each.alloc_retries or 0 for each in last.ranks) / last.spec.measured_iterations
        why.append(
            f"in every iteration the allocator runs out of room, and empties its cache and asks again"
            f"{'' if retries == 1 else f' {retries:.3g} times'}, which makes the device wait"
            + ("" if last.time_is_measured else " (how long was not measured)")
        )
    if slow := one.slowdowns.get(size):
        why.append(f"a sample takes {slow - 1:.0%} longer than at the best smaller size")
    if why:
        best = f"; the largest usable one is {one.largest}" if one.largest else "; no size is usable"
        return f"{size} runs, but does not count as usable: {' and '.join(why)}; {room}{best}"
    fast = "as fast per sample as the others" if last.time_is_measured else "no allocator retries"
    return f"{size} is usable: {fast}; {room}"


def memory_line(one: Series) -> tuple[float, float] | None:
    """Bytes that do not depend on the batch, and bytes that each sample adds: the line through the usable sizes' peaks.

    The peak is PyTorch's `active`, which others published; resident memory on the CPU device. From size 3 on where
    there are enough: at the smallest sizes the peak is in the optimizer's step and not among the activations.
    """
    used = {
        r.spec.batch_size: rank.active_peak_bytes or rank.allocated_peak_bytes
        for r in one.measured
        if r.spec.batch_size not in one.thrashing and (rank := r.largest_rank)
    }
    points = [(size, value) for size, value in sorted(used.items()) if value]
    points = [point for point in points if point[0] >= 3] if len(points) > 4 else points
    if len(points) < 2:
        return None
    line = statistics.linear_regression(*zip(*points, strict=True))
    return line.intercept, line.slope


def _activations(one: Series) -> str | None:
    line = memory_line(one)
    if line is None:
        return None
    slope = line[1]
    spec = one.spec
    text = f"{slope / GIB:.2f} GiB per sample of {spec.seq_len} tokens"
    config, dtypes = spec.model.config, _compute_dtypes(one)
    hidden, vocabulary, layers = (config.get(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    if hidden and vocabulary and layers:
        logits = spec.seq_len * vocabulary * 4
        text += f", of which one fp32 copy of the logits is {size_text(logits)}"
        state = spec.seq_len * hidden * 2
        if one.value(CHECKPOINTING):
            text += f" and the kept inputs of {layers} layers are {size_text(layers * state)} in 16 bits"
        else:
            times = (slope - logits) / layers / state
            text += (
                f"; the rest is {times:.0f} hidden states of 16 bits ({state / MIB:.0f} MiB) in each of {layers} layers"
            )
    if dtypes:
        text += f". The layers were seen to compute in {' and '.join(dtypes)}: that is the activations' precision"
    return text


def _compute_dtypes(one: Series) -> list[str]:
    seen = [rank.in_effect for r in one.measured for rank in r.ranks if rank.in_effect]
    return sorted({dtype for each in seen for dtype in each.compute_dtypes})


def _duplicated(series: Sequence[Series]) -> Iterator[str]:
    """Whether each device holds the activations of its own samples, or of all."""
    world = series[0].spec.world_size
    if world == 1:
        return
    spreads = [
        (max(peaks) - min(peaks)) / max(peaks)
        for one in series
        for record in one.measured
        if len(peaks := [r.allocated_peak_bytes or r.active_peak_bytes or 0 for r in record.ranks]) == world
    ]
    slopes = [line[1] for one in series if not one.value(CHECKPOINTING) and (line := memory_line(one))]
    capacity = series[0].capacity_bytes
    if slopes and capacity:
        every, fits = slopes[0] * world, max(one.largest_running or 0 for one in series if not one.value(CHECKPOINTING))
        yield (
            f"Duplicated per GPU? No: batch size {fits} runs on each of {world} GPUs of {size_text(capacity)}. If each "
            f"held the activations of all {world}, one sample on each would take {size_text(round(every))} of every "
            "GPU. ZeRO-3 shards parameters, gradients and optimizer states; activations are of a GPU's own samples."
        )
    if spreads:
        yield f"All {world} GPUs peaked within {max(spreads):.1%} of each other, each with its own samples."
