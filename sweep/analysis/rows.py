"""The table of series: one line each, with the largest batch size that fits and what happened at the next one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweep.analysis.comparisons import varying_axes
from sweep.analysis.series import Series
from sweep.analysis.timing import timing_of
from sweep.analysis.words import GIB, axis_cell, axis_label, axis_name, failure_of, outcome, size_text
from sweep.record import Status


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
    """Seconds per iteration, an estimate with its mark, or `not measured`; empty where nothing fits."""
    seconds_per_iteration: float | None = None
    tokens_per_second: float | None = None
    time_mark: str = ""
    """Behind these two figures: empty, or ` est.`."""
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
    notes = [f"{one.size_of(r)}: {outcome(r)}, although {one.largest} runs" for r in one.surprises]
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
    rank, timing = best.largest_rank, timing_of(best)
    reserved = rank.reserved_peak_bytes if rank else None
    allocated = rank.allocated_peak_bytes if rank else None
    active = rank.active_peak_bytes if rank else None
    nvml = rank.nvml_used_peak_bytes if rank else None
    return Row(
        series=one,
        configuration=configuration,
        largest=f"{one.largest}" if one.bounded else f"at least {one.largest}",
        running=one.largest_running,
        overall=None if one.fixed_size else best.spec.batch_size * best.spec.data_parallel_size,
        effective=None if one.fixed_size else best.spec.effective_batch_size,
        allocated_gib=allocated / GIB if allocated is not None else None,
        active_gib=active / GIB if allocated is None and active is not None else None,
        reserved_gib=reserved / GIB if reserved is not None else None,
        capacity_share=reserved / rank.capacity_bytes if rank and reserved is not None else None,
        nvml_gib=nvml / GIB if nvml is not None else None,
        timing="not measured" if timing is None else f"{timing.seconds:#.3g}".rstrip(".") + timing.mark,
        seconds_per_iteration=timing.seconds if timing else None,
        tokens_per_second=timing.tokens_per_second if timing else None,
        time_mark=timing.mark if timing else "",
        next_size=_next_size(one),
        notes=tuple(notes),
    )


def limits(group: Sequence[Series], axis: str) -> str:
    """The answers of series that differ in `axis` alone: `largest batch size that fits: 2 (no checkpointing), ...`."""
    said, few = [], len(group) < 5
    for row in table(group):
        value = row.series.value(axis)
        slower = row.running if row.running != row.series.largest else None
        also = f"; {slower} runs, too slow to use" if slower else ""
        said.append(f"{row.largest} ({(axis_label(axis, value) if few else '') or axis_cell(axis, value)}{also})")
    by = "" if few else f", by {axis_name(axis)}"
    return f"largest {group[0].size_name} that fits, per device{by}: {', '.join(said)}"


def _next_size(one: Series) -> str:
    end = one.ended_by
    if end is None:
        return "nothing larger was tried"
    size = one.size_of(end)
    slow = one.slowdowns.get(size)
    text = f"{size}: {outcome(end)}" if slow is None else f"{size}: runs, but a sample takes {slow - 1:.0%} longer"
    failure = failure_of(end)
    if (
        size == one.step
        and end.status is Status.OOM
        and failure
        and failure.requested_bytes
        and failure.free_bytes is not None
    ):
        text += f", {size_text(max(0, failure.requested_bytes - failure.free_bytes))} more than was free"
    if one.first_oom not in (None, size):
        text += f"; {one.first_oom}: {outcome(one.records[one.first_oom])}"
    first, last = (one.largest or 0) + one.step, size - one.step
    if first <= last:
        text += f" ({first if first == last else f'{first} to {last}'} not tried)"
    return text
