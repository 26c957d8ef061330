"""The same cells from each side: published, virtual with the software of that time and with today's, measured here."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweep import importing
from sweep.analysis import MIB, timing_of
from sweep.record import CellRecord, Status
from sweep.spec import DeviceKind
from sweep.store import Store

PUBLISHED = Path(__file__).with_name("published")
THEN = Path(__file__).resolve().parents[2] / "results" / "virtual-gpu" / "published-simulated.csv"

Key = tuple[str, bool, bool, int, str, int]
"""Model, checkpointing, expandable segments, batch size, precision, accumulation."""
RAN = (Status.OK.value, Status.THRASHING.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one cell: peaks in MiB from the smallest to the largest device, seconds per iteration."""

    status: str
    active: tuple[float, float] | None = None
    reserved: tuple[float, float] | None = None
    nvml: tuple[float, float] | None = None
    seconds: float | None = None
    estimated: bool = False
    """Whether the seconds are."""

    @property
    def ran(self) -> bool:
        return self.status in RAN


COLUMNS = {
    "published": "published",
    "then": "virtual, software of that time",
    "today": "virtual, today's software",
    "here": "measured here",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The same cells from each side; a side that was not run is empty."""

    published: list[CellRecord]
    then: Mapping[Key, Figures]
    today: list[CellRecord]
    here: list[CellRecord]
    weights_kept: list[CellRecord]
    """With today's software, told to keep gathered weights for the backward pass as DeepSpeed did at that time."""

    @property
    def sides(self) -> dict[str, Mapping[Key, Figures]]:
        found = {
            "published": figures_of(self.published),
            "then": self.then,
            "today": figures_of(self.today),
            "here": figures_of(self.here),
        }
        return {name: figures for name, figures in found.items() if figures}


def sources(name: str, results: Path, taken_from: list[CellRecord]) -> Sources:
    records = [r for folder in sorted(results.glob(f"{name}-*/")) for r in Store(folder).records()]
    by_kind = {kind: [r for r in records if r.spec.device.kind is kind] for kind in DeviceKind}
    models = {record.spec.model.name for record in taken_from}
    then = {key: figures for key, figures in virtual_then().items() if key[0] in models}
    return Sources(
        published=taken_from,
        then=then,
        today=by_kind[DeviceKind.VIRTUAL],
        here=by_kind[DeviceKind.CUDA] + by_kind[DeviceKind.CPU],
        weights_kept=[r for folder in results.glob(f"weights-kept-{name}-*/") for r in Store(folder).records()],
    )


def published(name: str) -> list[CellRecord]:
    """The records of one study's published tables."""
    return [record for path in sorted(PUBLISHED.glob(f"{name}_*.csv")) for record in importing.read(path)]


def figures_of(records: Sequence[CellRecord]) -> dict[Key, Figures]:
    found = {}
    for record in records:
        spec, ranks = record.spec, record.ranks if record.status.value in RAN else ()
        key = (
            *(spec.model.name, spec.gradient_checkpointing, spec.expandable_segments),
            *(spec.batch_size, spec.precision.value, spec.accumulation),
        )
        timing = timing_of(record)
        found[key] = Figures(
            status=record.status.value,
            active=_span([rank.active_peak_bytes for rank in ranks]),
            reserved=_span([rank.reserved_peak_bytes for rank in ranks]),
            nvml=_span([rank.nvml_used_peak_bytes for rank in ranks]),
            seconds=timing.seconds if timing else None,
            estimated=timing is not None and timing.is_estimated,
        )
    return found


def _span(sizes: Sequence[int | None]) -> tuple[float, float] | None:
    known = [size / MIB for size in sizes if size is not None]
    return (min(known), max(known)) if known else None


def virtual_then() -> dict[Key, Figures]:
    """Empty where the comparison with the old software was not run."""
    if not THEN.is_file():
        return {}
    with THEN.open(newline="", encoding="utf-8") as lines:
        return {_key(row): _then(row) for row in csv.DictReader(lines)}


def _key(row: Mapping[str, str]) -> Key:
    switches = (row["gradient_checkpointing"] == "true", row["expandable_segments"] == "true")
    return (row["model"], *switches, int(row["batch_size"]), row["precision"], int(row["accumulation"]))


def _then(row: Mapping[str, str]) -> Figures:
    if row["virtual_status"] != "ok":
        return Figures(status=row["virtual_status"])
    active, reserved = (float(row[f"virtual_{name}_peak_mib"]) for name in ("active", "reserved"))
    return Figures(status="ok", active=(active, active), reserved=(reserved, reserved))


def error(value: float, low: float, high: float) -> float:
    """Relative distance to the nearest of a range; 0 within it."""
    nearest = min(max(value, low), high)
    return value / nearest - 1
