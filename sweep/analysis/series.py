"""Series: the cells that differ in batch size alone, on one kind of device, and which of them are usable."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sweep.analysis.timing import timing_of
from sweep.analysis.words import axis_label
from sweep.record import CellRecord, RankRecord, Status
from sweep.spec import CellSpec, DeviceKind, SizeAxis, to_json

# What `CellSpec.axes` already shows, as paths into the JSON of a spec.
_SHOWN_BY_AXES = ("model.name", "engine.name", "engine.zero_stage", "device.kind", "device.gpu.key")
SLOW = 1.25
"""Seconds per sample, relative to the best smaller size, from which a size is too slow to use."""
_DECIDING_SOFTWARE = ("torch", "transformers", "accelerate", "deepspeed", "driver", "processor", "cores")


@dataclass(frozen=True, kw_only=True)
class Series:
    """The cells that differ in batch size alone, measured on one kind of device."""

    series_id: str
    axes: Mapping[str, object]
    """As `CellSpec.axes`; `gpu` is the name that the device reported where the spec names none."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Every other field of the spec, by its dotted path."""
    records: Mapping[int, CellRecord]
    """By size, ascending, all from the newest environment."""
    size_axis: SizeAxis = SizeAxis.BATCH_SIZE
    """What the sizes are: sequences per device and pass, or tokens per sequence."""
    superseded: int = 0
    """Older records, from another environment, that are left out."""

    @property
    def spec(self) -> CellSpec:
        return next(iter(self.records.values())).spec

    def size_of(self, record: CellRecord) -> int:
        return int(getattr(record.spec, self.size_axis.value))

    @property
    def size_name(self) -> str:
        return {SizeAxis.BATCH_SIZE: "batch size", SizeAxis.SEQ_LEN: "sequence length"}[self.size_axis]

    @property
    def size_label(self) -> str:
        """Of an axis of sizes in a chart."""
        return "batch size per device" if self.size_axis is SizeAxis.BATCH_SIZE else "sequence length (tokens)"

    @property
    def fixed_size(self) -> tuple[str, ...]:
        """The axis that a series over batch sizes has not."""
        return () if self.size_axis is SizeAxis.BATCH_SIZE else ("batch_size",)

    @property
    def step(self) -> int:
        """By how much sizes differ at the least: sequence lengths are searched in steps."""
        return 1 if self.size_axis is SizeAxis.BATCH_SIZE else math.gcd(*self.records)

    @cached_property
    def slowdowns(self) -> Mapping[int, float]:
        """Sizes whose seconds per sample left the line of the smaller sizes, and by which factor.

        A sample costs no more in a larger batch, so that the best smaller size is the line. In the published 8B study
        every size stays within 2% of it but the last, which takes 53% longer.
        """
        best, found = math.inf, {}
        if self.size_axis is SizeAxis.SEQ_LEN:
            return {}  # attention makes a token of a longer sequence dearer: that is what one pays for its length
        for size, record in self.records.items():
            timing = timing_of(record)  # an estimate knows nothing of what makes a size slow
            if record.status is Status.OK and timing and not timing.is_estimated:
                per_sample = timing.seconds / size
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
        return max(map(self.size_of, self.measured), default=None)

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
        return self.first_oom or (self.size_of(end) if end else self.largest or 0)

    @property
    def bounded(self) -> bool:
        """Whether the very next size was tried and is known not to be usable."""
        end = self.ended_by
        return (
            end is not None
            and (end.status is Status.OOM or self.size_of(end) in self.thrashing)
            and self.size_of(end) == (self.largest or 0) + self.step
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
    def time_is_estimated(self) -> bool:
        """Whether some of its times are estimates."""
        return any((timing := timing_of(record)) and timing.is_estimated for record in self.measured)

    @property
    def is_timed(self) -> bool:
        """Whether some time is known, measured or estimated."""
        return self.time_is_measured or self.time_is_estimated

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
        """The record with the fewest seconds per sample, or per token where the sequence length is searched."""
        timed = [
            (timing.samples_per_second * (self.size_of(record) if self.fixed_size else 1), record)
            for record in self.measured
            if (timing := timing_of(record))
        ]
        return max(timed, key=lambda found: found[0], default=(0.0, None))[1]

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
    return [one for axis, cells in _along_one_axis(by_spec.values()) for one in _by_device(cells, axis)]


def _along_one_axis(by_spec: Collection[list[CellRecord]]) -> Iterable[tuple[SizeAxis, list[CellRecord]]]:
    """What grows in each series, as it was searched. A cell may be part of two: of a batch size, and of a length."""
    lengths: dict[str, list[CellRecord]] = {}
    kin = dict.fromkeys(
        record.spec.series_along(SizeAxis.SEQ_LEN)
        for cells in by_spec
        for record in cells
        if record.searched is SizeAxis.SEQ_LEN
    )
    for cells in by_spec:
        if kin:
            for record in cells:
                if (along := record.spec.series_along(SizeAxis.SEQ_LEN)) in kin:
                    lengths.setdefault(along, []).append(record)
        if not all(record.searched is SizeAxis.SEQ_LEN for record in cells):
            yield SizeAxis.BATCH_SIZE, cells
    yield from ((SizeAxis.SEQ_LEN, cells) for cells in lengths.values())


def _by_device(records: Sequence[CellRecord], axis: SizeAxis) -> list[Series]:
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
        newest = {int(getattr(r.spec, axis.value)): r for r in current}
        spec = cells[-1].spec
        axes = dict(spec.axes)
        if spec.device.kind is DeviceKind.CUDA:
            axes["gpu"] = device
        details = _details(spec)
        if axis is SizeAxis.SEQ_LEN:
            axes["seq_len"] = None
            details["batch_size"] = spec.batch_size
        found.append(
            Series(
                series_id=cells[-1].series_id if axis is SizeAxis.BATCH_SIZE else spec.series_along(axis),
                axes=axes,
                details=details,
                size_axis=axis,
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
