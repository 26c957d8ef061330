"""Charts of a sweep, drawn from its records alone: `sweep plots [results/NAME ...] [--kind ...] [--where AXIS=VALUE]`.

Left alone it draws a handful: the map of all series, one comparison per axis of the grid for memory and for time, and,
where there are few series, each of them. PNG for reading, SVG for the web, both into plots/<sweep>/. Nothing here
needs torch, and figures are made without pyplot: no global state, no window, nothing to close.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sweep import analysis
from sweep.analysis import varying_axes
from sweep.plots.kinds import comparison, series_figure
from sweep.plots.maps import MapAxes, heat_map, limits_map, widest_axes
from sweep.plots.overviews import devices_figure, pareto_figure, samples_figure
from sweep.plots.style import CREATOR, MOST_PANELS, STYLE, VALUE_COLOURS, Group
from sweep.plots.traces import ReadTraces, Traces, trace_figure, traced
from sweep.record import CellRecord
from sweep.store import Store, StoreError

__all__ = ["STYLE", "VALUE_COLOURS", "Kind", "comparison", "draw", "figures", "main", "series_figure"]

FEW_SERIES = 4


class Kind(str, Enum):
    HEATMAP = "heatmap"
    """Status and memory of every series at every batch size."""
    SERIES = "series"
    """One series: memory and time against batch size."""
    MEMORY = "memory"
    """What one axis changes in memory."""
    TIME = "time"
    """What one axis changes in seconds per iteration."""
    SAMPLES = "samples"
    """Minutes for a fixed number of samples."""
    PARETO = "pareto"
    """Throughput against memory."""
    DEVICES = "devices"
    """What each device of a series reserved."""
    NVML = "nvml"
    """The device's memory while a cell runs, its phases shaded."""


def draw(
    store: Store,
    out: Path,
    kinds: Sequence[Kind] = (),
    where: Sequence[str] = (),
    *,
    map_axes: MapAxes | None = None,
    batch_size: int | None = None,
) -> list[Path]:
    """Draw the charts of a sweep into `out`; the paths written. Charts of an earlier drawing are removed.

    `map_axes` are the rows and columns of the map, `batch_size` is the one that the NVML chart shows.
    """
    written: list[Path] = []
    series = analysis.chosen(analysis.series_of(store.records()), where)

    def read(record: CellRecord) -> Traces:
        return store.cell(record.cell_id).read_traces()

    with mpl.rc_context(STYLE):
        for name, figure in figures(series, kinds, map_axes=map_axes, read=read, batch_size=batch_size):
            out.mkdir(parents=True, exist_ok=True)
            figure.savefig(png := out / f"{name}.png", metadata={"Software": CREATOR})
            figure.set_layout_engine("none")  # keep the layout: finding it takes longer than drawing
            figure.savefig(svg := out / f"{name}.svg", metadata={"Creator": CREATOR, "Date": None})
            written += [png, svg]
    for svg in out.glob("*.svg"):
        if svg not in written and f">{CREATOR}<" in svg.read_text(encoding="utf-8"):
            svg.unlink()
            svg.with_suffix(".png").unlink(missing_ok=True)
    return written


def figures(
    series: Group,
    kinds: Sequence[Kind] = (),
    *,
    map_axes: MapAxes | None = None,
    read: ReadTraces = lambda record: {},
    batch_size: int | None = None,
) -> Iterator[tuple[str, Figure]]:
    """Charts with the names of their files: of these kinds, or a handful of all of them. Raises `AxisError`."""
    # A crash or a refusal alone gives nothing to see; it belongs in the report.
    series = [one for one in series if one.measured or one.first_oom]
    timed = [one for one in series if one.fastest]
    varying = varying_axes(series)
    if series and (Kind.HEATMAP in kinds or (not kinds and len(series) > 1)):
        yield "map", heat_map(series)
        if chosen := map_axes or widest_axes(series):
            yield "map-" + "-".join(map(_file_name, chosen)), limits_map(series, *chosen)
    if Kind.SERIES in kinds or (not kinds and len(series) <= FEW_SERIES):
        for name, one in zip(_names(series, varying), series, strict=True):
            yield name, series_figure(one)
    for axis in varying:
        for kind in (Kind.MEMORY, Kind.TIME):
            if not kinds or kind in kinds:
                yield from _comparisons(series, axis, timed=kind is Kind.TIME, every_page=bool(kinds))
    if timed and (Kind.SAMPLES in kinds or (not kinds and len(timed) > 1)):
        yield "samples", samples_figure(timed)
    if timed and (Kind.PARETO in kinds or (not kinds and len(timed) > 1)):
        yield "pareto", pareto_figure(timed)
    if Kind.DEVICES in kinds:
        several = [one for one in series if any(len(record.ranks) > 1 for record in one.measured)]
        for name, one in zip(_names(several, varying), several, strict=True):
            yield f"devices-{name}", devices_figure(one)
    if Kind.NVML in kinds:
        for name, one in zip(_names(series, varying), series, strict=True):
            if found := traced(one, read, batch_size):
                yield f"nvml-{name}", trace_figure(one, *found)


def _names(series: Group, varying: Sequence[str]) -> list[str]:
    names = [_file_name(one.label(varying) or one.label(("model", "engine"))) for one in series]
    return [
        name if names.count(name) == 1 else f"{name}_{one.series_id}" for name, one in zip(names, series, strict=True)
    ]


def _comparisons(series: Group, axis: str, *, timed: bool, every_page: bool) -> Iterator[tuple[str, Figure]]:
    panels = analysis.groups(series, axis)
    if timed:
        panels = [group for group in panels if sum(one.is_timed for one in group) > 1]
    pages = [panels[i : i + MOST_PANELS] for i in range(0, len(panels), MOST_PANELS)]
    for number, page in enumerate(pages if every_page else pages[:1], start=1):
        name = f"compare-{_file_name(axis)}-{'time' if timed else 'memory'}"
        yield name if len(pages) == 1 else f"{name}-{number}", comparison(page, axis, timed=timed)


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9_.-]+", "-", text.lower().replace(", ", "_"))[:120]


def _pair(text: str) -> MapAxes:
    rows, comma, columns = (part.strip() for part in text.partition(","))
    if not (rows and comma and columns) or rows == columns:
        raise argparse.ArgumentTypeError(f"{text}: give two different axes, such as model,seq_len")
    return rows, columns


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep plots", description="Draw the charts of a sweep.")
    parser.add_argument("results", nargs="*", type=Path, help="folders of results; default: all of them")
    parser.add_argument("--out", type=Path, default=Path("plots"), help="where plots/<sweep>/ goes")
    parser.add_argument(
        "--kind", action="append", default=[], choices=[k.value for k in Kind], help="only these; default: a handful"
    )
    parser.add_argument(
        "--where", action="append", default=[], metavar="AXIS=VALUE", help="only these series: precision=bf16"
    )
    parser.add_argument(
        "--axes", type=_pair, metavar="ROWS,COLUMNS", help="of the map: model,seq_len; default: those with most values"
    )
    parser.add_argument("--batch-size", type=int, help="of the nvml chart; default: the largest that fits")
    options = parser.parse_args(arguments)
    kinds = [Kind(name) for name in options.kind]
    found, problems = 0, []
    for path in options.results or sorted(Path("results").glob("*")):
        store = Store(path.resolve())
        try:
            if written := draw(
                store,
                out := options.out / store.name,
                kinds,
                options.where,
                map_axes=options.axes,
                batch_size=options.batch_size,
            ):
                found += 1
                print(f"{out}: {len(written) // 2} charts, each as PNG and SVG")
            elif options.results:
                narrowed = " of that kind or with these values" if kinds or options.where else ""
                problems.append(f"{path} holds no measured cell{narrowed}; `make sweep` makes some")
        except (StoreError, analysis.AxisError, OSError) as error:
            problems.append(str(error))
    if not found and not problems:
        problems.append("there is nothing to draw under results/; `make sweep` makes some")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0
