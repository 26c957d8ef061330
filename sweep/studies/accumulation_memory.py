"""Precision x accumulation where weights and gradients are all that counts: what a second micro-batch adds, and why."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sweep import analysis
from sweep.analysis import MIB, Series
from sweep.record import CellRecord
from sweep.spec import CellSpec
from sweep.studies.answer import Answer

HEAD = ("precision, accumulation", "device", "NVML", "torch reserved", "torch allocated", "bytes per parameter")
NEAR = 0.05
"""A figure within this part of what explains it is explained."""
MIXED = {"bf16": 2, "fp16": 2}
"""Bytes of an element in the copies that autocast makes of fp32 weights."""

Cells = Mapping[tuple[str, int], "Figures"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Peaks in bytes; of all devices together, or of one."""

    nvml: int | None
    reserved: int | None
    allocated: int | None

    def __sub__(self, other: "Figures") -> "Figures":
        return Figures(
            nvml=_less(self.nvml, other.nvml),
            reserved=_less(self.reserved, other.reserved),
            allocated=_less(self.allocated, other.allocated),
        )


def answers(records: Sequence[CellRecord]) -> list[Answer]:
    """One per model and device: a line per device and one for all, the differences, and their explanation."""
    by_title: dict[str, list[Series]] = {}
    for one in analysis.series_of(records):
        by_title.setdefault(analysis.headline([one]), []).append(one)
    return [answer for title, series in by_title.items() if (answer := _answer(title, series))]


def _answer(title: str, series: Sequence[Series]) -> Answer | None:
    measured = {
        (one.spec.precision.value, one.spec.accumulation): one.measured[0]
        for one in sorted(series, key=lambda one: (one.spec.precision.value != "fp32", one.spec.accumulation))
        if one.measured
    }
    failed = [f"{one.label(('precision', 'accumulation'))}: {analysis.outcome(r)}." for one in series
              for r in one.records.values() if r not in one.measured]  # fmt: skip
    if not measured:
        return Answer(title=title, sentences=tuple(failed)) if failed else None
    parameters = _parameters(measured.values())
    cells = {key: overall(record) for key, record in measured.items()}
    rows = [line for key, record in measured.items() for line in _lines(key, record, parameters)]
    rows += list(_differences(cells, parameters))
    spec = next(iter(measured.values())).spec
    return Answer(
        title=title,
        head=(*HEAD[:2], *(f"{name} (MiB)" for name in HEAD[2:5]), HEAD[5]),
        rows=tuple(rows),
        sentences=(*_explanations(cells, spec, parameters), *failed),
    )


def _parameters(records: Iterable[CellRecord]) -> int:
    """As counted in training, or as published; there is a figure wherever something was measured."""
    counted = (rank.parameters for record in records for rank in record.ranks)
    published = (record.spec.model.parameters for record in records)
    return next(number for number in (*counted, *published) if number)


def overall(record: CellRecord) -> Figures:
    """All devices together, as the study counted; each at its own peak."""
    devices = _devices(record)
    return Figures(
        nvml=_sum(figures.nvml for figures in devices),
        reserved=_sum(figures.reserved for figures in devices),
        allocated=_sum(figures.allocated for figures in devices),
    )


def _devices(record: CellRecord) -> list[Figures]:
    return [
        Figures(nvml=rank.nvml_used_peak_bytes, reserved=rank.reserved_peak_bytes, allocated=rank.allocated_peak_bytes)
        for rank in record.ranks
    ]


def _sum(values: Iterator[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _less(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def _lines(key: tuple[str, int], record: CellRecord, parameters: int) -> Iterator[tuple[str, ...]]:
    devices = _devices(record)
    name = f"{key[0]}, {key[1]}"
    for number, figures in enumerate(devices):
        if len(devices) > 1:
            yield (name, str(number), *map(_mib, (figures.nvml, figures.reserved, figures.allocated)), "")
    yield _line(name, "all" if len(devices) > 1 else "0", overall(record), parameters)


def _line(name: str, device: str, figures: Figures, parameters: int, sign: str = "") -> tuple[str, ...]:
    base = figures.reserved if figures.allocated is None else figures.allocated
    per = "" if base is None else f"{base / parameters:{sign}.2f}"
    return (name, device, *(_mib(f, sign) for f in (figures.nvml, figures.reserved, figures.allocated)), per)


def _mib(value: int | None, sign: str = "") -> str:
    return "" if value is None else f"{value / MIB:{sign}.0f}"


def _differences(cells: Cells, parameters: int) -> Iterator[tuple[str, ...]]:
    precisions = list(dict.fromkeys(precision for precision, _ in cells))
    for precision in precisions:
        for accumulation in sorted(a for p, a in cells if p == precision and a > 1):
            if (precision, 1) in cells:
                difference = cells[precision, accumulation] - cells[precision, 1]
                yield _line(f"{precision}: {accumulation} less 1", "all", difference, parameters, "+")
    for accumulation in sorted({a for _, a in cells}):
        for precision in precisions[1:]:
            if (precision, accumulation) in cells and (precisions[0], accumulation) in cells:
                difference = cells[precision, accumulation] - cells[precisions[0], accumulation]
                name = f"{precision} less {precisions[0]}, {accumulation}"
                yield _line(name, "all", difference, parameters, "+")


def _explanations(cells: Cells, spec: CellSpec, parameters: int) -> Iterator[str]:
    embedding = _embedding_parameters(spec)
    counter = "allocated" if all(f.allocated is not None for f in cells.values()) else "reserved"
    for (precision, accumulation), figures in cells.items():
        first = cells.get((precision, 1))
        if accumulation == 1 or first is None:
            continue
        grown = getattr(figures - first, counter)
        if grown is None:
            continue
        text = (
            f"{precision}: accumulation {accumulation} takes {grown / MIB:+.0f} MiB {counter}, "
            f"{grown / parameters:+.2f} bytes per parameter"
        )
        if precision in MIXED:
            copies = MIXED[precision] * (parameters - embedding)
            cause = (
                "From the second micro-batch on the gradients stay, 4 bytes a parameter beside the fp32 weights, while "
                f"autocast makes its {precision} copies of the weights and keeps them for the backward pass: without "
                f"the embedding, which is looked up and not multiplied, {copies / MIB:.0f} MiB"
            )
            yield f"{text}. {cause}; {_match(grown, copies)}."
        elif embedding:
            spread = spec.world_size > 1 and not spec.model.config.get("tie_word_embeddings")
            largest = 4 * embedding * (2 if spread else 1)
            which = "of the embedding, and on the other device of the output layer," if spread else "of the embedding,"
            cause = (
                "The gradients stay, and a new one is whole before it is added to the old one; the largest is that "
                f"{which} {largest / MIB:.0f} MiB"
            )
            yield f"{text}. {cause}; {_match(grown, largest)}."
        else:
            yield f"{text}."
    ones = {precision: f for (precision, accumulation), f in cells.items() if accumulation == 1}
    if len(ones) > 1 and "fp32" in ones and counter == "allocated":
        for precision in (p for p in ones if p in MIXED):
            apart = ones[precision].allocated - ones["fp32"].allocated  # type: ignore[operator]
            same = "the same" if abs(apart) < NEAR * (ones["fp32"].allocated or 1) else f"{apart / MIB:+.0f} MiB"
            yield (
                f"Without accumulation {precision} peaks at {same} as fp32: the copies go one by one before the last "
                "gradients come, so that both peak at fp32 weights and gradients, 8 bytes a parameter "
                f"({8 * parameters / MIB:.0f} MiB; measured {(ones[precision].allocated or 0) / MIB:.0f})."
            )


def _match(measured: int, explained: int) -> str:
    if explained and abs(measured / explained - 1) <= NEAR:
        return f"this is all of it ({measured / explained:.1%})"
    return f"measured is {measured / explained:.0%} of that" if explained else "nothing of it is explained"


def _embedding_parameters(spec: CellSpec) -> int:
    config = spec.model.config
    return int(config.get("vocab_size", 0)) * int(config.get("hidden_size", 0))
