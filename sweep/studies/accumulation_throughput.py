"""Accumulation against real batches of the same effective size: memory, seconds, and what is learnt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sweep import analysis
from sweep.analysis import size_text, timing_of
from sweep.plots.style import BLUE, VERMILLION, Look, framed
from sweep.record import CellRecord, Status
from sweep.spec import DeviceKind
from sweep.studies.answer import Answer

AGREE = 1e-3
"""Relative difference of two losses that is rounding: the sums are the same, in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One effective batch size both ways; None where that cell was not run."""

    precision: str
    effective: int
    real: CellRecord | None
    accumulated: CellRecord | None


def pairs_of(records: Sequence[CellRecord]) -> list[Pair]:
    """By precision and effective batch size; batch size 1 without accumulation is both."""
    found: dict[tuple[str, int], dict[bool, CellRecord]] = {}
    for record in records:
        spec = record.spec
        if 1 in (spec.batch_size, spec.accumulation):
            both = found.setdefault((spec.precision.value, spec.batch_size * spec.accumulation), {})
            for accumulated in {spec.accumulation > 1, spec.batch_size == 1}:
                both[accumulated] = record
    return [
        Pair(precision=precision, effective=effective, real=both.get(False), accumulated=both.get(True))
        for (precision, effective), both in sorted(found.items(), key=lambda item: (item[0][0] != "fp32", item[0]))
    ]


def answers(records: Sequence[CellRecord]) -> list[Answer]:
    by_title: dict[str, list[CellRecord]] = {}
    for one in analysis.series_of(records):
        by_title.setdefault(analysis.headline([one]), []).extend(one.records.values())
    return [_answer(title, pairs_of(same)) for title, same in by_title.items()]


def _answer(title: str, pairs: Sequence[Pair]) -> Answer:
    cells = [record for pair in pairs for record in (pair.real, pair.accumulated) if record]
    timed = any(timing_of(record) for record in cells)
    with_losses = any(losses_of(record) for record in cells)
    what = memory_name(cells[0])
    head = ["precision", "effective batch", f"{what}: real batch", f"{what}: accumulated"]
    head += ["seconds: real batch", "seconds: accumulated"] if timed else []
    head += ["largest difference of losses"] if with_losses else []
    rows = []
    for pair in pairs:
        if all(r is None or r.status is Status.UNSUPPORTED for r in (pair.real, pair.accumulated)):
            continue  # a sentence says why
        row = [pair.precision, str(pair.effective), _memory(pair.real), _memory(pair.accumulated)]
        row += [_seconds(pair.real), _seconds(pair.accumulated)] if timed else []
        row += [_number(loss_difference(pair))] if with_losses else []
        rows.append(tuple(row))
    precisions = dict.fromkeys(pair.precision for pair in pairs)
    sentences = [s for p in precisions for s in _sentences(p, [pair for pair in pairs if pair.precision == p])]
    if not timed:
        sentences.append("Seconds per effective batch: not answered here, without times.")
    return Answer(title=title, head=tuple(head), rows=tuple(rows), sentences=tuple(sentences))


def memory_name(record: CellRecord) -> str:
    return "resident" if record.spec.device.kind is DeviceKind.CPU else "reserved"


def memory_bytes(record: CellRecord | None) -> int | None:
    """What PyTorch reserved of a GPU; on the CPU device, where that says little, resident memory."""
    rank = record.largest_rank if record and record.status in (Status.OK, Status.THRASHING) else None
    if record is None or rank is None:
        return None
    return rank.allocated_peak_bytes if record.spec.device.kind is DeviceKind.CPU else rank.reserved_peak_bytes


def _memory(record: CellRecord | None) -> str:
    if record is None:
        return "not run"
    size = memory_bytes(record)
    if size is None:
        return record.status.value
    return f"{size_text(size)}{' (thrashing)' if record.status is Status.THRASHING else ''}"


def _seconds(record: CellRecord | None) -> str:
    timing = timing_of(record) if record else None
    return f"{timing.seconds:.3g}{timing.mark}" if timing else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def losses_of(record: CellRecord | None) -> tuple[float, ...]:
    return next((rank.loss_by_iteration for rank in record.ranks if rank.loss_by_iteration), ()) if record else ()


def loss_difference(pair: Pair) -> float | None:
    """The largest relative difference of two curves, of any iteration; None where one of them is missing."""
    real, accumulated = losses_of(pair.real), losses_of(pair.accumulated)
    if not real or not accumulated or pair.real is pair.accumulated:
        return None
    return max(abs(a / b - 1) for a, b in zip(accumulated, real, strict=True))


def _sentences(precision: str, pairs: Sequence[Pair]) -> Iterator[str]:
    cells = [record for pair in pairs for record in (pair.real, pair.accumulated) if record]
    if reasons := {r.reason for r in cells if r.reason and r.status is Status.UNSUPPORTED}:
        yield f"{precision}: {'; '.join(sorted(reasons))}."
    largest = pairs[-1]
    base = memory_bytes(pairs[0].real)
    accumulated = memory_bytes(largest.accumulated)
    if base is not None and accumulated is not None and largest.effective > 1:
        text = (
            f"{precision}: accumulating {largest.effective} samples takes {_signed(accumulated - base)} than batch "
            "size 1 without accumulation"
        )
        real = memory_bytes(largest.real)
        if real is not None:
            text += f", a real batch of {largest.effective} {_signed(real - base)}"
        elif largest.real is not None:
            text += f"; a real batch of {largest.effective}: {analysis.outcome(largest.real)}"
        yield f"{text}."
    if ratios := {p.effective: ratio for p in pairs if p.effective > 1 and (ratio := _ratio(p))}:
        each = ", ".join(f"{ratio:.2f} times (of {effective})" for effective, ratio in ratios.items())
        yield f"{precision}: accumulated, an effective batch takes{_how(pairs)} {each} as long as in one real batch."
    if differences := [d for pair in pairs if (d := loss_difference(pair)) is not None]:
        agree = "agree" if max(differences) <= AGREE else "do not agree"
        yield (
            f"{precision}: the loss curves of accumulated and real batches {agree}: they differ by "
            f"{max(differences):.1e} at most, of {len(losses_of(largest.real))} iterations and {len(differences)} "
            "effective batch sizes."
        )


def _signed(size: int) -> str:
    return f"{size_text(abs(size))} {'more' if size >= 0 else 'less'}"


def _how(pairs: Sequence[Pair]) -> str:
    timings = [timing_of(record) for pair in pairs for record in (pair.real, pair.accumulated) if record]
    return ", estimated and not measured," if any(timing.is_estimated for timing in timings if timing) else ""


def _ratio(pair: Pair) -> float | None:
    real, accumulated = (timing_of(r) if r else None for r in (pair.real, pair.accumulated))
    return accumulated.seconds / real.seconds if real and accumulated else None


def figure(records: Sequence[CellRecord]) -> Figure | None:
    """Loss against iteration, a panel per precision and effective batch size; None where no loss was recorded."""
    pairs = [pair for pair in pairs_of(records) if loss_difference(pair) is not None]
    if not pairs:
        return None
    found = Figure(figsize=(8, 1.6 + 1.7 * len(pairs)))
    real = Look(colour=BLUE, marker="o", label="real batch", weight=1.8)
    accumulated = Look(colour=VERMILLION, marker="s", label="batch size 1, accumulated", dashes="--")
    panels: list[Axes] = list(found.subplots(len(pairs), 1, sharex=True, squeeze=False).flat)
    for axes, pair in zip(panels, pairs, strict=True):
        for record, look in ((pair.real, real), (pair.accumulated, accumulated)):
            losses = losses_of(record)
            axes.plot(range(1, 1 + len(losses)), losses, linestyle=look.dashes, **look.style)
        difference = loss_difference(pair) or 0.0
        axes.set_title(f"{pair.precision}, effective batch {pair.effective}: differ by {difference:.1e} at most")
        axes.set_ylabel("loss")
    panels[-1].set_xlabel("iteration (optimizer step)")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    series = analysis.series_of([record for pair in pairs for record in (pair.real, pair.accumulated) if record])
    second = "loss of the same samples, in one batch and accumulated"
    return framed(found, series, second, [real.key, accumulated.key], analysis.caveats(series))
