"""Series beside each other: in what they differ, which belong together, what they have in common."""

import itertools
from collections.abc import Iterable, Sequence

from sweep.analysis.series import Series
from sweep.analysis.timing import timing_of
from sweep.analysis.words import axis_cell, axis_label, size_text
from sweep.record import TimingKind
from sweep.spec import WorkloadName

VIRTUAL_SENTENCE = "virtual GPU: memory is PyTorch's own bookkeeping, time is not measured"
ESTIMATED_SENTENCE = "times are estimated, not measured"
IMPORTED_SENTENCE = "measured and published by others, not run here"
CPU_SENTENCE = "CPU device: allocated is resident memory, reserved is mapped address space (the limit's unit)"

# Fields that belong to the value of an axis: another model has another width, which is no second difference.
_BELONGS_TO = {"model": "model.", "engine": "engine.", "device": "device.", "gpu": "device.gpu."}
NOISE = 0.01
"""A difference in speed that is none."""


class AxisError(ValueError):
    """A choice of series that the user can correct; one sentence."""


def varying_axes(series: Sequence[Series]) -> tuple[str, ...]:
    """The axes in which these series differ; a detail of the spec only where no axis tells two apart."""
    found = [a for a in (series[0].axes if series else ()) if len({one.axes[a] for one in series}) > 1]
    alike: dict[tuple[object, ...], list[Series]] = {}
    for one in series:
        alike.setdefault(tuple(one.axes.values()), []).append(one)
    for twins in alike.values():
        for detail in twins[0].details:
            if detail not in found and len({one.details.get(detail) for one in twins}) > 1:
                found.append(detail)
    return tuple(found)


def chosen(series: Sequence[Series], where: Iterable[str]) -> list[Series]:
    """The series with these values, each `axis=value` or `axis=value,value`. Raises `AxisError`."""
    kept = list(series)
    for text in where:
        axis, equals, values = text.partition("=")
        known = {name for one in series for name in (*one.axes, *one.details)}
        if not equals or (series and axis not in known):
            raise AxisError(
                f"--where {text}: give AXIS=VALUE, AXIS one of {', '.join(series[0].axes if series else ())}"
            )
        wanted = {value.strip().lower() for value in values.split(",")}
        kept = [one for one in kept if wanted & _spellings(axis, one.value(axis))]
    return kept


def _spellings(axis: str, value: object) -> set[str]:
    return {text.lower() for text in ("null" if value is None else str(value), axis_cell(axis, value)) if text}


def groups(series: Sequence[Series], axis: str) -> list[list[Series]]:
    """Two or more series each that differ in `axis` alone, ordered by its value."""
    alike: dict[tuple[object, ...], dict[object, Series]] = {}
    for one in series:
        rest = tuple(value for name, value in one.axes.items() if name != axis)
        details = tuple(
            (name, value)
            for name, value in sorted(one.details.items())
            if name != axis and not name.startswith(_BELONGS_TO.get(axis, axis + "."))
        )
        alike.setdefault((rest, details), {}).setdefault(one.value(axis), one)
    return [[by[v] for v in ordered(by)] for by in alike.values() if len(by) > 1]


def pairs(series: Sequence[Series], axis: str) -> list[tuple[Series, Series]]:
    """Pairs of series that differ in `axis` alone."""
    return [pair for group in groups(series, axis) for pair in itertools.combinations(group, 2)]


def verdicts(panels: Sequence[Sequence[Series]], axis: str) -> list[str]:
    """Whether changing `axis` ever beats the first series' best seconds per sample; in counts where there are many."""
    said, paying, guessed = [], 0, False
    for first, *others in panels:
        if first.fixed_size:
            continue  # a longer sequence is another sample
        for other in others:
            bases = [(each.fastest, timing_of(each.fastest) if each.fastest else None) for each in (first, other)]
            (base, base_timing), (best, timing) = bases
            if base is None or best is None or base_timing is None or timing is None:
                continue
            gain = timing.samples_per_second / base_timing.samples_per_second - 1
            paying += gain >= NOISE
            how = "gets below the dotted line" if gain > 0 else "never gets below the dotted line"
            much = f", {abs(gain):.1%} {'more' if gain > 0 else 'fewer'} samples per second"
            if abs(gain) < NOISE:
                how, much = "changes nothing that could be told from noise", ""
            guessed |= timing.is_estimated or base_timing.is_estimated
            said.append(
                f"{axis_label(axis, other.value(axis))} {how}: at best {timing.seconds_per_sample:.4f} s a sample "
                f"(batch size {best.spec.batch_size}){much}; {axis_label(axis, first.value(axis))} "
                f"{base_timing.seconds_per_sample:.4f} s ({base.spec.batch_size})"
            )
    basis = "by estimated times, " if guessed else ""
    if len(said) < 3:
        return [basis + text for text in said]
    counted = f"in {paying} of {len(said)} comparisons a sample takes less time than at the first one's best (dotted)"
    return [basis + counted]


def ordered(values: Iterable[object]) -> list[object]:
    """Numbers by size, then the others as they came."""
    numbers = [v for v in values if isinstance(v, int | float)]
    return [*sorted(numbers), *(v for v in values if not isinstance(v, int | float))]


def headline(series: Sequence[Series]) -> str:
    """What these series have in common: model, engine, devices, sequence length."""
    first, varying = series[0], varying_axes(series)
    parts = [first.label(a for a in ("model", "engine") if a not in varying), _devices(first, varying)]
    parts.append(first.label(a for a in ("seq_len", *first.fixed_size) if a not in varying))
    return ", ".join(part for part in parts if part)


def _devices(one: Series, varying: Sequence[str]) -> str:
    if "device" in varying:
        return ""
    count = "" if "world_size" in varying else f"{one.spec.world_size} x "
    if one.is_cpu:
        limit = f" (limit {size_text(one.capacity_bytes)} each)" if one.capacity_bytes else ""
        return f"{count.removesuffix('x ')}CPU rank{'' if one.spec.world_size == 1 else 's'}{limit}"
    if "gpu" in varying:
        return f"{count}{'virtual ' if one.is_virtual else ''}GPU" if count else ""
    reported = next((rank.device_name for r in one.records.values() for rank in r.ranks), one.axes["gpu"])
    return f"{count}{'virtual ' if one.is_virtual else ''}{axis_label('gpu', reported) or 'GPU'}"


def settings(series: Sequence[Series]) -> str:
    """The rest of what these series have in common."""
    rest = ("precision", "gradient_checkpointing", "expandable_segments", "accumulation", "optimizer", "workload")
    varying = varying_axes(series)
    dull = {"expandable_segments"} if series[0].is_cpu else set()  # the CPU has no such allocator
    if series[0].spec.accumulation == 1:
        dull.add("accumulation")
    if series[0].spec.workload.name is WorkloadName.SYNTHETIC:
        dull.add("workload")
    return series[0].label(a for a in rest if a not in varying and a not in dull)


def estimates(series: Sequence[Series]) -> list[str]:
    """What the estimated times of these series are worth; empty where there are none."""
    found = [record.estimate for one in series for record in one.measured if record.timing_kind is TimingKind.ESTIMATED]
    known = [each for each in found if each is not None]
    if not known:
        return []
    models = ", ".join(dict.fromkeys(each.model for each in known))
    some = "some " if any(one.time_is_measured for one in series) else ""
    within = f"{max(each.uncertainty for each in known):.0%}"
    return [f"{some}{ESTIMATED_SENTENCE}: expect the truth within {within}; {models}"]


def caveats(series: Sequence[Series], timed: bool = True) -> list[str]:
    """What the figures of these series are, where they are not plain measurements on a GPU; `timed`: also the times."""
    said = []
    if any(one.is_virtual for one in series):
        said.append(VIRTUAL_SENTENCE)
    if timed:
        said += estimates(series)
    if any(one.is_cpu for one in series):
        said.append(CPU_SENTENCE)
    sources = dict.fromkeys(source for one in series for source in one.imported_from)
    if sources:
        others = any(not one.imported_from for one in series)
        said.append(f"{'partly ' if others else ''}{IMPORTED_SENTENCE}: {', '.join(sources)}")
    return said
