"""From records to answers: which batch size fits in which configuration, and what happened at the next one.

Pure functions over `CellRecord`s. An answer names only sizes that ran: a size that nobody tried is said to be
untried, never assumed to fit or to fail. Bytes and seconds inside, GiB in what is shown.
"""

import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sweep.record import CellRecord, Failure, RankRecord, Status
from sweep.spec import CellSpec, DeviceKind, to_json

GIB = 2**30
MIB = 2**20

VIRTUAL_SENTENCE = "virtual GPU: memory is PyTorch's own bookkeeping, time is not measured"
IMPORTED_SENTENCE = "measured and published by others, not run here"
CPU_SENTENCE = "CPU device: allocated is resident memory, reserved is mapped address space (the limit's unit)"

# What `CellSpec.axes` already shows, as paths into the JSON of a spec.
_SHOWN_BY_AXES = ("model.name", "engine.name", "engine.zero_stage", "device.kind", "device.gpu.key")
# Fields that belong to the value of an axis: another model has another width, which is no second difference.
_BELONGS_TO = {"model": "model.", "engine": "engine.", "device": "device.", "gpu": "device.gpu."}
SLOW = 1.25
"""Seconds per sample, relative to the best smaller size, from which a size is too slow to use."""
NOISE = 0.01
"""A difference in speed that is none."""
_DECIDING_SOFTWARE = ("torch", "transformers", "accelerate", "deepspeed", "driver", "processor", "cores")


class AxisError(ValueError):
    """A choice of series that the user can correct; one sentence."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """The cells that differ in batch size alone, measured on one kind of device."""

    series_id: str
    axes: Mapping[str, object]
    """As `CellSpec.axes`; `gpu` is the name that the device reported where the spec names none."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Every other field of the spec, by its dotted path."""
    records: Mapping[int, CellRecord]
    """By batch size, ascending, all from the newest environment."""
    superseded: int = 0
    """Older records, from another environment, that are left out."""

    @property
    def spec(self) -> CellSpec:
        return next(iter(self.records.values())).spec

    @cached_property
    def slowdowns(self) -> Mapping[int, float]:
        """Sizes whose seconds per sample left the line of the smaller sizes, and by which factor.

        A sample costs no more in a larger batch, so that the best smaller size is the line. In the published 8B study
        every size stays within 2% of it but the last, which takes 53% longer.
        """
        best, found = math.inf, {}
        for size, record in self.records.items():
            if record.status is Status.OK and record.seconds_per_iteration is not None:
                per_sample = record.seconds_per_iteration / size
                if per_sample > SLOW * best:
                    found[size] = per_sample / best
                best = min(best, per_sample)
        return found

    @cached_property
    def thrashing(self) -> frozenset[int]:
        """Sizes that ran, but not usefully: with allocator retries, or far off the line of the smaller ones."""
        retried = (size for size, record in self.records.items() if record.status is Status.THRASHING)
        return frozenset((*retried, *self.slowdowns))

    @cached_property
    def largest(self) -> int | None:
        """The largest usable batch size per device: it ran, and it did not thrash."""
        good = (size for size, record in self.records.items() if record.status is Status.OK)
        return max((size for size in good if size not in self.slowdowns), default=None)

    @property
    def largest_running(self) -> int | None:
        """The largest batch size that ran at all."""
        return max((record.spec.batch_size for record in self.measured), default=None)

    @property
    def best(self) -> CellRecord | None:
        return None if self.largest is None else self.records[self.largest]

    @property
    def ended_by(self) -> CellRecord | None:
        """The smallest batch size above the largest usable one, whatever became of it."""
        return next((r for size, r in self.records.items() if size > (self.largest or 0)), None)

    @property
    def first_oom(self) -> int | None:
        """The smallest size above the largest usable one that ran out of memory."""
        above = (b for b, r in self.records.items() if b > (self.largest or 0) and r.status is Status.OOM)
        return next(above, None)

    @property
    def last_telling(self) -> int:
        """The largest size to show: what a search tried beyond the first one that does not fit adds nothing."""
        end = self.ended_by
        return self.first_oom or (end.spec.batch_size if end else self.largest or 0)

    @property
    def bounded(self) -> bool:
        """Whether the very next size was tried and is known not to be usable."""
        end = self.ended_by
        return (
            end is not None
            and (end.status is Status.OOM or end.spec.batch_size in self.thrashing)
            and end.spec.batch_size == (self.largest or 0) + 1
        )

    @property
    def surprises(self) -> tuple[CellRecord, ...]:
        """Sizes that did not run well although a larger one did."""
        return tuple(r for size, r in self.records.items() if size < (self.largest or 0) and r.status is not Status.OK)

    @cached_property
    def measured(self) -> tuple[CellRecord, ...]:
        """The records whose memory is a result: those that ran to the end."""
        return tuple(
            r for r in self.records.values() if r.status in (Status.OK, Status.THRASHING) and r.largest_rank is not None
        )

    @property
    def time_is_measured(self) -> bool:
        return any(record.time_is_measured for record in self.measured)

    @property
    def is_virtual(self) -> bool:
        return self.spec.device.kind is DeviceKind.VIRTUAL

    @property
    def is_cpu(self) -> bool:
        return self.spec.device.kind is DeviceKind.CPU

    @property
    def imported_from(self) -> tuple[str, ...]:
        """Who published these figures; empty where they were measured here."""
        return tuple(dict.fromkeys(r.imported_from for r in self.records.values() if r.imported_from))

    @cached_property
    def used(self) -> str:
        """The counter beside reserved: `allocated`, or `active` where others published only that one."""
        ranks = [rank for record in self.measured for rank in record.ranks]
        only_active = any(rank.active_peak_bytes for rank in ranks) and all(
            rank.allocated_peak_bytes is None for rank in ranks
        )
        return "active" if only_active else "allocated"

    @cached_property
    def fastest(self) -> CellRecord | None:
        """The record with the fewest seconds per sample."""
        timed = [record for record in self.measured if record.samples_per_second]
        return max(timed, key=lambda record: record.samples_per_second or 0, default=None)

    @cached_property
    def capacity_bytes(self) -> int | None:
        """Of one device, as the ranks saw it; else as it was asked for."""
        ranks = (_headline(record) for record in self.records.values())
        seen = next((rank.capacity_bytes for rank in ranks if rank), None)
        device = self.spec.device
        return seen or device.memory_limit_bytes or (device.gpu.total_memory_bytes if device.gpu else None)

    def value(self, axis: str) -> object:
        return self.axes[axis] if axis in self.axes else self.details.get(axis)

    def label(self, axes: Iterable[str]) -> str:
        """The values of these axes in words, such as `no checkpointing, bf16, accumulation 4`."""
        return ", ".join(text for axis in axes if (text := axis_label(axis, self.value(axis))))


def _headline(record: CellRecord) -> RankRecord | None:
    return record.largest_rank or next(iter(record.ranks), None)


def series_of(records: Iterable[CellRecord]) -> list[Series]:
    """Group records into series, in the order of their first appearance.

    The same specification run on two kinds of GPU gives two series: their figures do not belong on one line.
    """
    by_spec: dict[str, list[CellRecord]] = {}
    for record in records:
        by_spec.setdefault(record.series_id, []).append(record)
    return [one for same_spec in by_spec.values() for one in _by_device(same_spec)]


def _by_device(records: Sequence[CellRecord]) -> list[Series]:
    records = sorted(records, key=lambda r: r.started_at)
    named = {r.cell_id: rank.device_name for r in records if (rank := _headline(r)) is not None}
    named |= {r.cell_id: str(r.environment["gpu"]) for r in records if r.imported_from and "gpu" in r.environment}
    # A cell that died before its ranks could report belongs to the device that was there last.
    default = next((named[r.cell_id] for r in reversed(records) if r.cell_id in named), None)
    by_device: dict[str | None, list[CellRecord]] = {}
    for record in records:
        by_device.setdefault(named.get(record.cell_id, default), []).append(record)
    found = []
    for device, cells in by_device.items():
        # One line in a chart is one environment: after an upgrade the old figures must not fill its gaps.
        current = [r for r in cells if _software(r) == _software(cells[-1])]
        newest = {r.spec.batch_size: r for r in current}
        spec = cells[-1].spec
        axes = dict(spec.axes)
        if spec.device.kind is DeviceKind.CUDA:
            axes["gpu"] = device
        found.append(
            Series(
                series_id=cells[-1].series_id,
                axes=axes,
                details=_details(spec),
                records={size: newest[size] for size in sorted(newest)},
                superseded=len(cells) - len(newest),
            )
        )
    return found


def _software(record: CellRecord) -> tuple[object, ...]:
    return tuple(record.environment.get(name) for name in _DECIDING_SOFTWARE)


def _details(spec: CellSpec) -> dict[str, object]:
    def leaves(value: object, path: str) -> Iterable[tuple[str, object]]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from leaves(item, f"{path}.{key}" if path else str(key))
        elif path not in spec.axes and path not in (*_SHOWN_BY_AXES, "device.gpu", "batch_size"):
            yield path, json.dumps(value) if isinstance(value, list) else value

    return dict(leaves(to_json(spec), ""))


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
    return [[by[v] for v in _ordered(by)] for by in alike.values() if len(by) > 1]


def pairs(series: Sequence[Series], axis: str) -> list[tuple[Series, Series]]:
    """Pairs of series that differ in `axis` alone."""
    return [pair for group in groups(series, axis) for pair in itertools.combinations(group, 2)]


def verdicts(panels: Sequence[Sequence[Series]], axis: str) -> list[str]:
    """Whether changing `axis` ever beats the first series' best seconds per sample; in counts where there are many."""
    said, paying = [], 0
    for first, *others in panels:
        base = first.fastest
        rate = base.samples_per_second if base else None
        for other in others:
            best = other.fastest
            other_rate = best.samples_per_second if best else None
            if base is None or best is None or rate is None or other_rate is None:
                continue
            names = axis_label(axis, first.value(axis)), axis_label(axis, other.value(axis))
            gain = other_rate / rate - 1
            paying += gain >= NOISE
            how = "never gets below the dotted line" if gain <= 0 else "gets below the dotted line"
            how = "changes nothing that could be told from noise" if abs(gain) < NOISE else how
            said.append(
                f"{names[1]} {how}: at best {1 / other_rate:.4f} s a sample (batch size {best.spec.batch_size}), "
                f"{abs(gain):.1%} {'more' if gain > 0 else 'less'} speed than {names[0]}, {1 / rate:.4f} s "
                f"({base.spec.batch_size})"
            )
    if len(said) < 3:
        return said
    return [f"in {paying} of {len(said)} comparisons a sample takes less time than at the first one's best (dotted)"]


def _ordered(values: Iterable[object]) -> list[object]:
    numbers = [v for v in values if isinstance(v, int | float)]
    return [*sorted(numbers), *(v for v in values if not isinstance(v, int | float))]


def axis_name(axis: str) -> str:
    return "GPU" if axis == "gpu" else axis.rsplit(".", 1)[-1].replace("_", " ")


def axis_label(axis: str, value: object) -> str:
    """One value of one axis in words; empty where there is nothing to say."""
    match axis:
        case "gradient_checkpointing":
            return "checkpointing" if value else "no checkpointing"
        case "expandable_segments":
            return "expandable segments" if value else "no expandable segments"
        case "seq_len":
            return f"sequence length {value}"
        case "optimizer":
            return {"adamw": "AdamW", "sgd": "SGD"}.get(str(value), str(value))
        case "engine":
            return "DDP" if value == "ddp" else str(value)
        case "gpu":
            return "" if value is None else str(value).removeprefix("NVIDIA ")
        case "device" | "model" | "precision":
            return str(value)
    if axis.endswith("_bytes") and isinstance(value, int):
        return f"{axis_name(axis).removesuffix(' bytes')} {size_text(value)}"
    return f"{axis_name(axis)} {'none' if value is None else value}"


def axis_cell(axis: str, value: object) -> str:
    """One value of one axis as a table's cell, under the axis's own name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if axis in ("engine", "gpu", "optimizer"):
        return axis_label(axis, value)
    if axis.endswith("_bytes") and isinstance(value, int):
        return size_text(value)
    return "none" if value is None else str(value)


def headline(series: Sequence[Series]) -> str:
    """What these series have in common: model, engine, devices, sequence length."""
    first, varying = series[0], varying_axes(series)
    parts = [first.label(a for a in ("model", "engine") if a not in varying), _devices(first, varying)]
    parts.append(first.label(a for a in ("seq_len",) if a not in varying))
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
    rest = ("precision", "gradient_checkpointing", "expandable_segments", "accumulation", "optimizer")
    varying = varying_axes(series)
    dull = {"expandable_segments"} if series[0].is_cpu else set()  # the CPU has no such allocator
    if series[0].spec.accumulation == 1:
        dull.add("accumulation")
    return series[0].label(a for a in rest if a not in varying and a not in dull)


def caveats(series: Sequence[Series]) -> list[str]:
    """What the figures of these series are, where they are not plain measurements on a GPU."""
    said = []
    if any(one.is_virtual for one in series):
        said.append(VIRTUAL_SENTENCE)
    if any(one.is_cpu for one in series):
        said.append(CPU_SENTENCE)
    sources = dict.fromkeys(source for one in series for source in one.imported_from)
    if sources:
        others = any(not one.imported_from for one in series)
        said.append(f"{'partly ' if others else ''}{IMPORTED_SENTENCE}: {', '.join(sources)}")
    return said


def size_text(size: int) -> str:
    """Bytes as people read them: `1.96 GiB`, `20 MiB`."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.{max(0, 2 - int(math.log10(max(1, size / GIB))))}f} GiB"
    return f"{size / MIB:.0f} MiB" if size >= MIB else f"{size} bytes"


def failure_of(record: CellRecord) -> Failure | None:
    return record.failure or next((rank.failure for rank in record.ranks if rank.failure), None)


def fragmented(failure: Failure) -> bool:
    """Whether an allocation failed although as much was free or cached, in pieces too small for it."""
    asked, free = failure.requested_bytes, failure.free_bytes
    allocated, reserved = failure.allocated_bytes, failure.reserved_bytes
    if asked is None or free is None or allocated is None or reserved is None:
        return False
    return free + reserved - allocated >= asked


def outcome(record: CellRecord, width: int = 100) -> str:
    """What became of a cell, in a few words: `OOM in backward, asked for 1.96 GiB`."""
    failure = failure_of(record)
    match record.status:
        case Status.OK:
            return "ok"
        case Status.OOM:
            text = "OOM"
            if failure and failure.phase:
                text += f" in {failure.phase.value}"
            if failure and fragmented(failure):
                text += " (fragmented)"
            if failure and failure.requested_bytes is not None:
                text += f", asked for {size_text(failure.requested_bytes)}"
            return text
        case Status.THRASHING:
            retries = max((rank.alloc_retries or 0 for rank in record.ranks), default=0)
            why = f"{retries} allocator retries" if retries else record.reason
        case _:
            why = record.reason or (f"{failure.kind}: {failure.message}" if failure else None)
    words = {Status.HOST_OOM: "host out of memory", Status.BUSY_DEVICE: "device busy"}
    text = words.get(record.status, record.status.value)
    joint = ", " if record.status is Status.THRASHING else ": "
    return textwrap.shorten(text + joint + why if why else text, width, placeholder=" ...")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table of series. Memory is the headline rank's, at the largest usable batch size."""

    series: Series
    configuration: Mapping[str, str]
    """The axes that vary, as shown."""
    largest: str
    """`8`, `at least 8`, `none`, `unknown` or `unsupported`, per device."""
    running: int | None = None
    """The largest batch size that ran at all, usable or not."""
    overall: int | None = None
    """Largest batch size times world size."""
    effective: int | None = None
    """Accumulation counted as well."""
    allocated_gib: float | None = None
    active_gib: float | None = None
    """Only where allocated is not known."""
    reserved_gib: float | None = None
    capacity_share: float | None = None
    """Reserved, as a part of the device's capacity."""
    nvml_gib: float | None = None
    timing: str = ""
    """Seconds per iteration, or `not measured`; empty where nothing fits."""
    seconds_per_iteration: float | None = None
    tokens_per_second: float | None = None
    next_size: str
    """What happened at the next size: `5: OOM in backward, asked for 1.96 GiB`."""
    notes: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """One line: `largest that fits: 4 per device, 32 overall; 5: OOM in backward`."""
        overall = ""
        if self.overall is not None and self.series.spec.world_size > 1:
            overall = f" per device, {self.overall} overall"
        return f"largest that fits: {self.largest}{overall}; {self.next_size}"


def table(series: Sequence[Series]) -> list[Row]:
    varying = varying_axes(series)
    return [row_of(one, varying) for one in series]


def row_of(one: Series, varying: Sequence[str]) -> Row:
    configuration = {axis: axis_cell(axis, one.value(axis)) for axis in varying}
    notes = [f"{r.spec.batch_size}: {outcome(r)}, although {one.largest} runs" for r in one.surprises]
    if one.superseded:
        notes.append(f"older records from another environment, left out: {one.superseded}")
    best = one.best
    if best is None:
        end = one.ended_by
        blank = {Status.UNSUPPORTED: "unsupported", Status.OOM: "none", Status.THRASHING: "none"}
        return Row(
            series=one,
            configuration=configuration,
            largest=blank.get(end.status, "unknown") if end else "unknown",
            running=one.largest_running,
            next_size=_next_size(one),
            notes=tuple(notes),
        )
    rank, seconds = best.largest_rank, best.seconds_per_iteration
    reserved = rank.reserved_peak_bytes if rank else None
    allocated = rank.allocated_peak_bytes if rank else None
    active = rank.active_peak_bytes if rank else None
    nvml = rank.nvml_used_peak_bytes if rank else None
    return Row(
        series=one,
        configuration=configuration,
        largest=f"{one.largest}" if one.bounded else f"at least {one.largest}",
        running=one.largest_running,
        overall=best.spec.batch_size * best.spec.world_size,
        effective=best.spec.effective_batch_size,
        allocated_gib=allocated / GIB if allocated is not None else None,
        active_gib=active / GIB if allocated is None and active is not None else None,
        reserved_gib=reserved / GIB if reserved is not None else None,
        capacity_share=reserved / rank.capacity_bytes if rank and reserved is not None else None,
        nvml_gib=nvml / GIB if nvml is not None else None,
        timing="not measured" if seconds is None else f"{seconds:#.3g}".rstrip("."),
        seconds_per_iteration=seconds,
        tokens_per_second=best.tokens_per_second,
        next_size=_next_size(one),
        notes=tuple(notes),
    )


def _next_size(one: Series) -> str:
    end = one.ended_by
    if end is None:
        return "nothing larger was tried"
    size = end.spec.batch_size
    slow = one.slowdowns.get(size)
    text = f"{size}: {outcome(end)}" if slow is None else f"{size}: runs, but a sample takes {slow - 1:.0%} longer"
    failure = failure_of(end)
    if (
        size == 1
        and end.status is Status.OOM
        and failure
        and failure.requested_bytes
        and failure.free_bytes is not None
    ):
        text += f", {size_text(max(0, failure.requested_bytes - failure.free_bytes))} more than was free"
    if one.first_oom not in (None, size):
        text += f"; {one.first_oom}: {outcome(one.records[one.first_oom])}"
    first, last = (one.largest or 0) + 1, size - 1
    if first <= last:
        text += f" ({first if first == last else f'{first} to {last}'} not tried)"
    return text
