"""A device's memory while one cell runs, as NVML saw it, with the cell's phases shaded."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sweep import analysis
from sweep.analysis import GIB, Series
from sweep.plots.panels import capacity
from sweep.plots.style import VALUE_COLOURS, VALUE_MARKERS, Look, framed
from sweep.record import CellRecord, NvmlTrace, Phase

Traces = Mapping[int, NvmlTrace]
"""By rank."""
ReadTraces = Callable[[CellRecord], Traces]

# Light grounds for dark lines; neighbours in time differ in brightness as well, so that print keeps them apart.
GROUNDS: Mapping[Phase, str] = {
    Phase.LOAD: "#e8e8e8",
    Phase.PREPARE: "#cfcfcf",
    Phase.FORWARD: "#d6ecf8",
    Phase.BACKWARD: "#f9e3b8",
    Phase.OPTIMIZER: "#c4e6d9",
}
VIRTUAL_CLOCK = "virtual GPU: the clock is the host's and kernels do nothing, so that this is not the time of training"


def traced(one: Series, read: ReadTraces, batch_size: int | None = None) -> tuple[CellRecord, Traces] | None:
    """The cell to show, with its traces: of this batch size, else the largest usable one, else any that has some."""
    records = one.records.values() if batch_size is None else [r for b, r in one.records.items() if b == batch_size]
    for record in sorted(records, key=lambda record: (record is not one.best, -one.size_of(record))):
        if found := read(record):
            return record, found
    return None


def trace_figure(one: Series, record: CellRecord, traces: Traces) -> Figure:
    """Used memory of each rank's device over time; the phases are those of the lowest rank."""
    figure = Figure(figsize=(8, 5.4))
    axes = figure.subplots()
    first, end = traces[min(traces)], max(trace.seconds[-1] for trace in traces.values())
    starts = [start.seconds for start in first.phases]
    for phase, (left, right) in zip(first.phases, pairwise([*starts, end]), strict=True):
        axes.axvspan(left, right, color=GROUNDS[phase.phase], linewidth=0, zorder=0, gid=f"phase {phase.phase.value}")
    keys: list[Any] = []
    for i, (rank, trace) in enumerate(sorted(traces.items())):
        look = Look(
            colour=VALUE_COLOURS[i % len(VALUE_COLOURS)],
            marker=VALUE_MARKERS[i % len(VALUE_MARKERS)],
            label=f"rank {rank}, baseline {analysis.size_text(trace.used_bytes[0])}",
            dashes="-" if i < len(VALUE_COLOURS) else "--",
            weight=0.8,
        )
        style = look.style | {"marker": "", "linestyle": look.dashes}
        gib = [used / GIB for used in trace.used_bytes]
        (line,) = axes.plot(trace.seconds, gib, gid=f"nvml{rank} {one.series_id}", **style)
        line.set_label(look.label)
        keys.append(line)
    capacity(axes, [one])
    highest = max(used for trace in traces.values() for used in trace.used_bytes)
    axes.set_ylim(0, 1.12 * max(one.capacity_bytes or 0, highest) / GIB)
    axes.set_xlim(0, end or 1)
    clock = "of the host's clock, not of training" if one.is_virtual else "since the baseline was read"
    axes.set_xlabel(f"seconds {clock}")
    axes.set_ylabel("used of the device, sampled by NVML (GiB)")
    present = {phase.phase for phase in first.phases}
    keys += [Patch(color=colour, label=phase.value) for phase, colour in GROUNDS.items() if phase in present]
    size = one.size_of(record)
    notes = [
        f"{one.size_name} {size}: {analysis.outcome(record)}",
        "forward, backward and optimizer repeat per iteration",
    ]
    notes += [VIRTUAL_CLOCK] if one.is_virtual else []
    return framed(figure, [one], analysis.settings([one]), keys, [*notes, *analysis.caveats([one])])
