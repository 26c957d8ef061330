"""What the charts show: lines, labels, limits and marks, not pixels."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from test_analysis import (
    CHECKPOINTING,
    CPU,
    CUDA,
    GIB,
    MIB,
    VIRTUAL,
    cell,
    grid,
    only,
    out_of_memory,
    spec,
    study,
    walk,
)

from sweep import analysis, plots
from sweep.analysis import VIRTUAL_SENTENCE, groups, series_of
from sweep.plots.traces import trace_figure
from sweep.record import CellRecord, NvmlMemory, NvmlTrace, Phase, PhaseStart, Status
from sweep.spec import GpuSpec
from sweep.store import Store, write_json


@pytest.fixture(autouse=True)
def style() -> Any:
    with mpl.rc_context(plots.STYLE):
        yield


def store_of(path: Path, records: Sequence[CellRecord]) -> Store:
    store = Store(path)
    for index, record in enumerate(records):
        saved = replace(record, cell_id=f"{index:016x}")
        store.cell(saved.cell_id).path.mkdir(parents=True)
        write_json(store.cell(saved.cell_id).record_path, saved)
    return store


def lines(axes: Axes, name: str) -> list[Line2D]:
    return [line for line in axes.get_lines() if str(line.get_gid()).split(" ")[0] == name]


def points(line: Line2D) -> dict[float, float]:
    return dict(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))  # type: ignore[arg-type]


def rendered(figure: Figure) -> Any:
    canvas: Any = FigureCanvasAgg(figure)  # matplotlib leaves its methods untyped
    canvas.draw()
    return canvas.get_renderer()


def words(figure: Figure) -> str:
    """Everything there is to read, legend included."""
    rendered(figure)
    found = [text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_visible()]
    return "\n".join(found)


def test_a_series_shows_memory_time_capacity_and_where_it_ends() -> None:
    one = series_of(study())[1]
    figure = plots.series_figure(one)
    left, right = figure.axes
    (reserved,), (allocated,) = lines(left, "reserved"), lines(left, "allocated")
    assert points(reserved) == {size: peak * MIB / GIB for size, (_, peak, _) in CHECKPOINTING.items()}
    assert points(allocated) == {size: peak * MIB / GIB for size, (peak, _, _) in CHECKPOINTING.items()}
    assert points(lines(right, "seconds")[0]) == {size: seconds for size, (_, _, seconds) in CHECKPOINTING.items()}
    assert points(lines(left, "oom")[0]) == {13: 81_050 / 1024}
    assert lines(left, "capacity")[0].get_ydata() == [81_050 / 1024] * 2
    (region,) = [patch for patch in left.patches if patch.get_gid() == "oom region"]
    assert region.get_window_extent().x0 == pytest.approx(left.transData.transform((13, 0))[0])
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    shown = words(figure)
    for text in (
        "llama3-8b, ZeRO-3, 8 x A100-SXM4-80GB, sequence length 2048",
        "bf16, checkpointing, no expandable segments, AdamW",
        "capacity 79.2 GiB",
        "OOM in backward",
        "memory per device, peak (GiB)",
        "seconds per iteration (s)",
        "batch size per device",
        "overall batch size (x 8 devices)",
        "largest that fits: 12 per device, 96 overall; 13: OOM in backward, asked for 1.96 GiB",
        "smallest to largest of 8 ranks",
    ):
        assert text in shown


def test_batch_sizes_are_whole_and_overall_ones_stand_above_them() -> None:
    axes = plots.series_figure(series_of(study())[1]).axes[0]
    (top,) = axes.child_axes
    assert list(axes.get_xticks()) == list(range(1, 14))
    assert [label.get_text() for label in top.get_xticklabels()] == [str(8 * size) for size in range(1, 14)]


def test_the_band_spans_the_ranks() -> None:
    axes = plots.series_figure(series_of(study())[1]).axes[0]
    band = axes.collections[0].get_paths()[0].vertices
    at_one = [float(y) for x, y in cast("Any", band) if x == 1]
    assert (min(at_one), max(at_one)) == ((37594 - 7 * 400) / 1024, 37594 / 1024)


def test_the_virtual_device_has_no_second_axis_and_says_why() -> None:
    figure = plots.series_figure(series_of(study(VIRTUAL))[1])
    assert len(figure.axes) == 1
    assert VIRTUAL_SENTENCE in words(figure)
    assert "8 x virtual A100" in words(figure)
    assert "ranks" not in words(figure)


def test_thrashing_is_an_open_marker_with_a_key() -> None:
    figure = plots.series_figure(series_of(study())[2])
    left, right = figure.axes
    open_points = [*lines(left, "thrashing"), *lines(right, "thrashing")]
    assert [list(points(line)) for line in open_points] == [[14], [14], [14]]
    assert {line.get_markerfacecolor() for line in open_points} == {"white"}
    assert "thrashing: runs, too slow to use" in words(figure)
    assert "out of memory" not in words(figure)


def test_nothing_fits() -> None:
    figure = plots.series_figure(only([out_of_memory(spec(device=VIRTUAL), Phase.LOAD)]))
    assert list(figure.axes[0].get_xticks()) == [1]
    assert "nothing fits\nOOM in load, asked for 1.96 GiB\nat batch size 1" in words(figure)
    assert points(lines(figure.axes[0], "oom")[0]) == {1: 81_050 / 1024}


def test_a_size_that_failed_breaks_the_line() -> None:
    records = [*walk({1: (10, 20, 1.0), 2: (10, 30, 1.0), 4: (20, 40, 2.0)}, oom=5), out_of_memory(spec(batch_size=3))]
    axes = plots.series_figure(only(records)).axes[0]
    reserved = points(lines(axes, "reserved")[0])
    assert reserved[3] != reserved[3]
    assert list(points(lines(axes, "oom")[0])) == [3, 5]


def test_a_crash_is_no_oom() -> None:
    records = [*walk({1: (10, 20, 1.0)}), cell(spec(batch_size=2), Status.HOST_OOM, reason="the host ran out")]
    figure = plots.series_figure(only(records))
    assert "host oom" in words(figure)
    assert not any(patch.get_gid() == "oom region" for patch in figure.axes[0].patches)


def test_the_cpu_names_its_own_kinds_of_memory() -> None:
    figure = plots.series_figure(only(walk({1: (300, 500, 0.2)}, oom=2, device=CPU, world_size=2)))
    shown = words(figure)
    assert {"resident", "mapped address space (limit counted)", "limit 2.00 GiB"} <= set(shown.split("\n"))
    assert "expandable" not in shown


def test_one_device_needs_no_overall_axis() -> None:
    figure = plots.series_figure(only(walk({1: (300, 500, 0.2)}, world_size=1)))
    assert figure.axes[0].child_axes == []
    assert "overall" not in words(figure)


def test_many_sizes_get_few_ticks() -> None:
    sizes = dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1016), (10, 20, 1.0))
    axes = plots.series_figure(only(walk(sizes, oom=1017))).axes[0]
    assert list(axes.get_xticks()) == [1, *range(100, 1001, 100)]


def test_a_comparison_has_one_panel_a_pair_with_shared_scales() -> None:
    figure = plots.comparison(
        groups(series_of(grid()), "gradient_checkpointing"), "gradient_checkpointing", timed=False
    )
    panels = [axes for axes in figure.axes if axes.axison]
    assert len(panels) == 8
    assert len({axes.get_title(loc="left") for axes in panels}) == 8
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in panels}) == 1
    for axes in panels:
        assert [line.get_linestyle() for line in lines(axes, "reserved")] == ["-", "-"]
        assert [line.get_linestyle() for line in lines(axes, "allocated")] == ["--", "--"]
        assert len({line.get_color() for line in lines(axes, "reserved")}) == 2
        assert len(lines(axes, "oom")) == 2
    shown = words(figure)
    assert VIRTUAL_SENTENCE in shown
    assert "without and with checkpointing" in shown
    assert "second line: overall (x 8 devices)" in shown
    assert "1\n8" in shown


def test_crosses_at_one_size_do_not_hide_each_other() -> None:
    figure = plots.comparison(groups(series_of(grid()), "accumulation")[:1], "accumulation", timed=False)
    (first,), (second,) = (points(line).items() for line in lines(figure.axes[0], "oom"))
    assert first[0] == second[0]
    assert first[1] < second[1] < figure.axes[0].get_ylim()[1]
    assert "accumulation 1 vs accumulation 4" in words(figure)


def test_times_are_compared_where_they_were_measured() -> None:
    figure = plots.comparison(groups(series_of(study()), "expandable_segments"), "expandable_segments", timed=True)
    assert [len(points(line)) for line in lines(figure.axes[0], "seconds")] == [12, 14]
    assert "seconds per iteration (s)" in words(figure)


def test_a_dotted_line_carries_the_first_series_best_to_every_size() -> None:
    (panel,) = panels = groups(series_of(study()), "gradient_checkpointing")
    figure = plots.comparison(panels, "gradient_checkpointing", timed=True)
    (reference,) = lines(figure.axes[0], "reference")
    assert reference.get_linestyle() == ":"
    ((_, _), (size, seconds)) = points(reference).items()
    assert seconds / size == pytest.approx(1.452 / 2)
    (_, checkpointed) = lines(figure.axes[0], "seconds")
    assert all(seconds > size * 1.452 / 2 for size, seconds in points(checkpointed).items())
    assert "checkpointing never gets below the dotted line: at best" in words(figure)
    memory = plots.comparison(panels, "gradient_checkpointing", timed=False)
    assert lines(memory.axes[0], "reference")[0].get_ydata()[0] == 72638 / 1024  # type: ignore[index]
    worlds = series_of([*walk({1: (10, 20, 1.0)}, world_size=1), *walk({1: (10, 20, 1.0)}, world_size=8)])
    assert not lines(plots.comparison(groups(worlds, "world_size"), "world_size", timed=True).axes[0], "reference")
    assert panel[0].used == "allocated"


def test_the_map_says_what_became_of_every_cell() -> None:
    (figure,) = (figure for name, figure in plots.figures(series_of(study()), [plots.Kind.HEATMAP]))
    gids = [str(patch.get_gid()).split(" ")[:3] for patch in figure.axes[0].patches]
    assert [int(size) for _, status, size in gids if status == "oom"] == [3, 13]
    shown = words(figure).split("\n")
    assert {"OOM", "70.9", "(76.7)", "no checkpointing, expandable segments"} <= set(shown)
    assert len(gids) == 3 + 13 + 14


def test_a_map_over_two_axes_shows_what_fits_where() -> None:
    records = [
        record
        for length, most in ((1024, 4), (2048, 2), (4096, 0))
        for checkpointing in (False, True)
        for record in walk(
            {size: (10_000, 20_000 * size, 1.0) for size in range(1, most + 1)},
            oom=None if (length, checkpointing) == (1024, True) else most + 1,
            seq_len=length,
            gradient_checkpointing=checkpointing,
        )
    ]
    series = series_of(records)
    drawn = dict(plots.figures(series, [plots.Kind.HEATMAP]))
    assert list(drawn) == ["map", "map-gradient_checkpointing-seq_len"], "the axes with most values"
    axes = drawn["map-gradient_checkpointing-seq_len"].axes[0]
    assert [text.get_text() for text in axes.texts] == ["4", "4+", "2", "2", "none", "none"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1024", "2048", "4096"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("sequence length", "gradient checkpointing")
    chosen = dict(plots.figures(series, [plots.Kind.HEATMAP], map_axes=("seq_len", "batch_size")))
    without, with_checkpointing = chosen["map-seq_len-batch_size"].axes[:2]
    assert without.get_title(loc="left") == "no checkpointing"
    assert [text.get_text() for text in with_checkpointing.texts].count("OOM") == 2
    assert [text.get_text() for text in without.texts].count("OOM") == 3
    with pytest.raises(analysis.AxisError, match="--axes colour: choose from seq_len, gradient_"):
        dict(plots.figures(series, [plots.Kind.HEATMAP], map_axes=("colour", "seq_len")))


def test_device_memory_over_time_with_the_phases_shaded(tmp_path: Path) -> None:
    (record,) = walk({1: (10_000, 20_000, 1.0)}, device=VIRTUAL)
    store = store_of(tmp_path / "results", [record])
    trace = NvmlTrace(
        seconds=(0.0, 1.0, 2.0, 4.0),
        used_bytes=(GIB, 3 * GIB, 6 * GIB, 5 * GIB),
        phases=(
            PhaseStart(phase=Phase.LOAD, seconds=0.5),
            PhaseStart(phase=Phase.FORWARD, seconds=1.5),
            PhaseStart(phase=Phase.BACKWARD, seconds=2.5),
            PhaseStart(phase=Phase.FORWARD, seconds=3.0),
        ),
    )
    nvml = NvmlMemory(baseline_bytes=GIB, peak_bytes=6 * GIB, samples=4, period_seconds=0.02, trace=trace)
    assert plots.draw(store, tmp_path / "plots", [plots.Kind.NVML]) == [], "nothing was kept"
    write_json(store.cell("0" * 16).rank_path(0), replace(record.ranks[0], nvml=nvml))
    written = plots.draw(store, tmp_path / "plots", [plots.Kind.NVML])
    assert [path.name for path in written] == ["nvml-llama3-8b_zero-3.png", "nvml-llama3-8b_zero-3.svg"]
    one = series_of(store.records())[0]
    figure = trace_figure(one, record, {0: trace})
    axes = figure.axes[0]
    assert points(lines(axes, "nvml0")[0]) == {0: 1, 1: 3, 2: 6, 4: 5}
    spans = [(patch.get_gid(), patch.get_x(), patch.get_width()) for patch in axes.patches]  # type: ignore[attr-defined]
    assert spans == [
        ("phase load", 0.5, 1.0),
        ("phase forward", 1.5, 1.0),
        ("phase backward", 2.5, 0.5),
        ("phase forward", 3.0, 1.0),
    ]
    shown = words(figure)
    assert "the clock is the host's and kernels do nothing" in shown
    assert "rank 0, baseline 1.00 GiB" in shown
    assert {"load", "forward", "backward"} <= set(shown.split("\n"))
    assert "optimizer" not in shown.split("\n")


def test_time_for_a_fixed_number_of_samples_and_the_front() -> None:
    drawn = dict(plots.figures(series_of(study()), [plots.Kind.SAMPLES, plots.Kind.PARETO, plots.Kind.DEVICES]))
    assert [name for name in drawn if not name.startswith("devices")] == ["samples", "pareto"]
    first = lines(drawn["samples"].axes[0], "minutes")[0]
    assert points(first)[2] == pytest.approx(10_000 * 1.452 / 16 / 60)
    (front,) = lines(drawn["pareto"].axes[0], "front")
    rates = list(points(front).values())
    assert rates == sorted(rates)
    assert max(points(front)) == 72638 / 1024, "nothing is faster than two without checkpointing"
    devices = drawn["devices-no-checkpointing_expandable-segments"].axes[0]
    assert [points(lines(devices, f"rank{k}")[0])[1] for k in (0, 7)] == [55030 / 1024, (55030 - 2800) / 1024]


def test_a_sweep_of_sixteen_series_draws_a_handful() -> None:
    names = [name for name, _ in plots.figures(series_of(grid()))]
    axes = ("precision", "gradient_checkpointing", "expandable_segments", "accumulation")
    assert names == ["map", *(f"compare-{axis}-memory" for axis in axes)]


def test_charts_and_series_are_chosen() -> None:
    series = series_of(grid(CUDA))
    assert len(analysis.chosen(series, ["precision=bf16"])) == 8
    assert len(analysis.chosen(series, ["precision=BF16,fp32", "gradient_checkpointing=yes", "accumulation=4"])) == 4
    assert len(list(plots.figures(series, [plots.Kind.SERIES]))) == 16
    with pytest.raises(analysis.AxisError, match="--where colour=red: give AXIS=VALUE, AXIS one of model, engine"):
        analysis.chosen(series, ["colour=red"])


def test_devices_of_different_size_get_a_line_each() -> None:
    other = replace(VIRTUAL, gpu=GpuSpec(key="a100-40gb"))
    small = [
        replace(r, ranks=tuple(replace(rank, capacity_bytes=40 * GIB) for rank in r.ranks))
        for r in walk({1: (300, 500, 0.2)}, oom=2, device=other)
    ]
    series = series_of([*walk({1: (300, 500, 0.2)}, oom=2, device=VIRTUAL), *small])
    axes = plots.comparison(groups(series, "gpu"), "gpu", timed=False).axes[0]
    assert [line.get_ydata()[0] for line in lines(axes, "capacity")] == [81_050 / 1024, 40]  # type: ignore[index]
    assert [line.get_color() for line in lines(axes, "capacity")] == list(plots.VALUE_COLOURS[:2])


GPUS = {"a10": 22, "l4": 22, "rtx3090": 24, "v100-32gb": 32, "a100-40gb": 40, "l40s": 44, "a100-80gb": 79, "h200": 140}


def eight_gpus() -> list[CellRecord]:
    """Each with one point and an out-of-memory at the same size."""
    records = []
    for key, gib in GPUS.items():
        for record in walk({1: (10_000, 20_000, 1.0)}, oom=2, device=replace(VIRTUAL, gpu=GpuSpec(key=key))):
            ranks = tuple(replace(rank, capacity_bytes=gib * GIB) for rank in record.ranks)
            records.append(replace(record, ranks=ranks))
    return records


def test_the_capacities_of_eight_gpus_are_read_apart() -> None:
    (figure,) = [plots.comparison(groups(series_of(eight_gpus()), "gpu"), "gpu", timed=False)]
    renderer = rendered(figure)
    labels = [text for text in figure.axes[0].texts if text.get_text().endswith("GiB")]
    assert [text.get_text() for text in labels] == ["22.0 to 32.0 GiB", "40.0 to 44.0 GiB", "79.0 GiB", "140 GiB"]
    for one, other in itertools.combinations(labels, 2):
        assert not one.get_window_extent(renderer).overlaps(other.get_window_extent(renderer))
    looks = {(line.get_color(), line.get_marker()) for line in lines(figure.axes[0], "reserved")}
    assert len(looks) == 8
    crosses = [y for line in lines(figure.axes[0], "oom") for y in points(line).values()]
    assert max(crosses) < figure.axes[0].get_ylim()[1]


def test_a_point_without_neighbours_says_which_counter_it_is() -> None:
    records = [*walk({1: (30_000, 60_000, 1.0)}), *walk({1: (20_000, 50_000, 1.2)}, gradient_checkpointing=True)]
    (group,) = groups(series_of(records), "gradient_checkpointing")
    axes = plots.comparison([group], "gradient_checkpointing", timed=False).axes[0]
    assert {line.get_fillstyle() for line in lines(axes, "reserved")} == {"full"}
    assert {line.get_fillstyle() for line in lines(axes, "allocated")} == {"bottom"}
    figure = plots.comparison([group], "gradient_checkpointing", timed=False)
    (legend,) = figure.legends
    keys = {str(key.get_label()): key for key in legend.legend_handles if isinstance(key, Line2D)}
    assert [keys[name].get_fillstyle() for name in ("reserved", "allocated")] == ["full", "bottom"]
    assert "largest batch size that fits, per device: at least 1 (no checkpointing), at least 1 (checkpointing)" in (
        words(figure)
    )
