"""Where the columns of a page differ, and why; as far as it is known, and saying so where it is not."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from sweep import analysis
from sweep.analysis import GIB, MIB
from sweep.record import CellRecord
from sweep.studies.checkpointing import CHECKPOINTING, memory_line
from sweep.studies.published import COLUMNS, Figures, Key, Sources, error, figures_of

MASKS_OF_PYTHIA = 24 * 2048 * 2048 + 24 * 2 * 2048 * 32 * 4
"""Bytes of buffers in transformers 4.40's GPTNeoX that today's lacks: a causal mask of bool and cached rotary
embeddings (32 dimensions, fp32) in each of 24 layers, for 2048 positions."""


def checkpointing(found: Sources) -> Iterator[str]:
    sides = found.sides
    published = sides["published"]
    if then := sides.get("then"):
        yield f"With the software of that time: {_limits(published, then)}; {_errors(published, then)}."
        yield (
            "Two figures of the machines are inferred and not published: that 1700 MiB of the RTX 3090 were held by "
            "others (a desktop), where PyTorch never got more than 21918 MiB; and that 500 MiB of each A100 were held "
            "outside of PyTorch (NCCL's buffers for eight GPUs), without which one size more runs than in the study."
        )
    if today := sides.get("today"):
        yield f"With today's software: {_limits(published, today)}; {_errors(published, today)}."
        yield from _lines(found.published, found.today)
        yield from _weights_kept(published, found.weights_kept)
    yield from _times(published, sides.get("today", {}))
    yield (
        "A size at which the allocator retries in every iteration does not count as usable where its time was not "
        f"measured. How strict that is, the published seconds show: {'; '.join(_last_batches(found.published))}."
    )


def _times(published: Mapping[Key, Figures], today: Mapping[Key, Figures]) -> Iterator[str]:
    both = [(figures.seconds, today[key].seconds) for key, figures in published.items() if key in today]
    errors = [ours / theirs - 1 for theirs, ours in both if ours and theirs]
    if not errors:
        yield "The virtual GPU measures no time: whether checkpointing pays is answered by the published seconds alone."
    elif all(figures.estimated for figures in today.values() if figures.seconds):
        yield (
            f"The virtual GPU measures no time. Its seconds are estimates, off by {statistics.median(errors):+.0%} of "
            f"the published ones in the middle and by {min(errors):+.0%} to {max(errors):+.0%} at most: they know "
            "nothing of a device that waits for its allocator. No answer in time is better than they are."
        )


def _last_batches(published: Sequence[CellRecord]) -> Iterator[str]:
    """What a sample costs at the largest batch that runs, against the best smaller one, by model."""
    for model in dict.fromkeys(record.spec.model.name for record in published):
        changes = []
        for one in analysis.series_of(record for record in published if record.spec.model.name == model):
            timed = [(t.seconds_per_sample, r) for r in one.measured if (t := analysis.timing_of(r))]
            if len(timed) > 1:
                changes.append(timed[-1][0] / min(seconds for seconds, _ in timed[:-1]) - 1)
        world = next(record.spec.world_size for record in published if record.spec.model.name == model)
        devices = f"{world} GPU{'s' if world > 1 else ''}"
        yield f"{model} on {devices} takes {min(changes):+.0%} to {max(changes):+.0%} per sample at the last sizes"


def accumulation_memory(found: Sources) -> Iterator[str]:
    sides = found.sides
    published = sides["published"]
    for side, name in (("then", "the software of that time"), ("today", "today's software")):
        if figures := sides.get(side):
            yield f"With {name}: {_errors(published, figures)}."
    yield from _growth(sides)
    if "then" in sides and "today" in sides:
        apart = [
            a - b for key in published if (a := _reserved(sides["then"], key)) and (b := _reserved(sides["today"], key))
        ]
        if apart:
            yield (
                f"Today's transformers take {min(apart):.0f} to {max(apart):.0f} MiB less than those of that time in "
                "every cell: a GPTNeoX of then held a causal mask and cached rotary embeddings in each of its layers, "
                f"{MASKS_OF_PYTHIA / MIB:.0f} MiB in all, which are made when needed now."
            )
    yield (
        "NVML shows the whole device, and differs more: what a CUDA context takes of an A40 is not known (500 MiB are "
        "assumed), and the published figure probably counts what the driver keeps for itself as well."
    )
    yield (
        'The report that asked the question has the title "Gradient accumulation incurs 10GiB VRAM cost when '
        'mixed-precision is enabled"; its table for Llama-2-7B is not at hand, so that only this difference can '
        "be set beside the virtual one."
    )


def _growth(sides: Mapping[str, Mapping[Key, Figures]]) -> Iterator[str]:
    """What the second micro-batch adds to reserved memory, on each side."""
    for precision in sorted({key[4] for key in sides["published"]}):
        said = []
        for side, figures in sides.items():
            sizes = {key[5]: _reserved(figures, key) for key in sides["published"] if key[4] == precision}
            one, two = sizes.get(1), sizes.get(2)
            if one and two:
                said.append(f"{two - one:+.0f} ({COLUMNS[side]})")
        yield f"{precision}, reserved, accumulation 2 less 1, in MiB: {', '.join(said)}."


def _limits(published: Mapping[Key, Figures], side: Mapping[Key, Figures]) -> str:
    same, other = 0, []
    for series in dict.fromkeys(key[:3] for key in published):
        ours, theirs = (_largest(figures, series) for figures in (side, published))
        if ours == theirs:
            same += 1
        elif ours is not None:
            model, checkpointed, expandable = series
            words = ", ".join(
                [f"{'' if checkpointed else 'no '}checkpointing", f"{'' if expandable else 'no '}expandable segments"]
            )
            other.append(f"{model}, {words}: {ours} instead of {theirs}")
    text = f"the largest batch that runs is that of the study in {same} of {same + len(other)} series"
    return text + (f" ({'; '.join(other)})" if other else "")


def _largest(figures: Mapping[Key, Figures], series: tuple[str, bool, bool]) -> int | None:
    return max((key[3] for key, figure in figures.items() if key[:3] == series and figure.ran), default=None)


def _errors(published: Mapping[Key, Figures], side: Mapping[Key, Figures]) -> str:
    parts = []
    for what in ("active", "reserved", "nvml"):
        errors = [
            abs(error(ours[1], *theirs))
            for key, figure in published.items()
            if key in side and (ours := getattr(side[key], what)) and (theirs := getattr(figure, what))
        ]
        if errors:
            name, mean = "NVML" if what == "nvml" else what, statistics.fmean(errors)
            parts.append(f"the {name} peak is within {max(errors):.1%} of the published one ({mean:.1%} on average)")
    return "; ".join(parts) or "no figure is on both sides"


def _lines(published: Sequence[CellRecord], today: Sequence[CellRecord]) -> Iterator[str]:
    """What does not depend on the batch and what a sample adds, per model, then and now."""
    for model in dict.fromkeys(record.spec.model.name for record in published):
        said, apart = [], []
        for records in (published, today):
            series = [
                one
                for one in analysis.series_of(r for r in records if r.spec.model.name == model)
                if one.value("expandable_segments") and one.measured
            ]
            lines = {bool(one.value(CHECKPOINTING)): line for one in series if (line := memory_line(one))}
            if set(lines) != {False, True}:
                break
            said.append(
                [
                    f"{fixed / GIB:.1f} + {slope / GIB:.2f} GiB per sample"
                    for fixed, slope in (lines[False], lines[True])
                ]
            )
            apart.append((lines[False][0] - lines[True][0]) / GIB)
        else:
            yield (
                f"{model}, memory in use against the batch, without and with checkpointing: {said[0][0]} and "
                f"{said[0][1]} as published, {said[1][0]} and {said[1][1]} with today's software. What checkpointing "
                f"takes away that does not depend on the batch was {apart[0]:.1f} GiB and is {apart[1]:.1f} GiB."
            )


def _weights_kept(published: Mapping[Key, Figures], records: Sequence[CellRecord]) -> Iterator[str]:
    """Why the large model needed so much more without checkpointing: gathered weights, kept for the backward pass."""
    again = figures_of(records)
    both = [(key, figures, published[key]) for key, figures in again.items() if figures.active and key in published]
    told = [
        f"{theirs.active[1]:.0f} and {ours.active[1]:.0f} MiB at batch size {key[3]}"
        for key, ours, theirs in both
        if ours.active and theirs.active
    ]
    if told:
        yield (
            "What changed is DeepSpeed: the weights that ZeRO-3 gathers for a layer stayed with what the backward pass "
            "needs, in a model built outside `zero.Init`, until checkpointing dropped them; today's engine frees them "
            "in both cases. `engine.zero_init=false engine.memory_efficient_linear=false` brings that back with "
            f"today's software: active peaks, published and virtual, are {'; '.join(told)}, and "
            f"{_limits(published, again)}."
        )


def _reserved(side: Mapping[Key, Figures], key: Key) -> float | None:
    figures = side.get(key)
    return figures.reserved[1] if figures and figures.reserved else None
