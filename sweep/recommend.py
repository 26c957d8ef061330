"""What to run: `sweep recommend results/NAME --effective-batch 128 [--headroom 5%] [--emit accelerate]`.

Ranks the configurations that reach the effective batch exactly (batch size x accumulation x world size) and leave the
headroom free. Speed ranks them where it was measured; elsewhere what is known does, and the answer says so. A number of
accumulated passes that was not run is derived from one that was, and marked as an estimate.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sweep import analysis
from sweep.analysis import GIB, AxisError, Series, timing_of
from sweep.emit import EmitError, Target, emit
from sweep.record import CellRecord, TimingKind
from sweep.spec import CellSpec, DeviceKind
from sweep.store import Store, StoreError, write_atomically

SHOWN = 10
MEASURED, ESTIMATED, UNKNOWN = "measured", "estimated", "not measured"
COMPUTED = "time estimated, never measured"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that reaches the effective batch, with the record that speaks for it."""

    spec: CellSpec
    """As it would run: with the accumulation that the effective batch needs."""
    label: str
    record: CellRecord
    reserved_bytes: int
    capacity_bytes: int
    seconds_per_iteration: float | None

    @property
    def measured(self) -> bool:
        return self.spec.accumulation == self.record.spec.accumulation

    @property
    def unit(self) -> str:
        """Of the speed: tokens can be counted where every sequence is full."""
        return "tokens/s" if self.spec.workload.full_length else "samples/s"

    @property
    def speed(self) -> float | None:
        done = self.spec.tokens_per_iteration if self.unit == "tokens/s" else self.spec.effective_batch_size
        return done / self.seconds_per_iteration if self.seconds_per_iteration else None

    @property
    def basis(self) -> str:
        if self.seconds_per_iteration is None:
            return UNKNOWN
        if self.record.timing_kind is TimingKind.ESTIMATED:
            return COMPUTED
        return MEASURED if self.measured else ESTIMATED

    @property
    def doubtful_memory(self) -> bool:
        """Whether passes are accumulated that were only run one at a time: gradients then stay between passes."""
        return self.spec.accumulation > 1 and self.record.spec.accumulation == 1

    @property
    def headroom(self) -> float:
        """Part of the device that stays free."""
        return 1 - self.reserved_bytes / self.capacity_bytes


class NothingFitsError(ValueError):
    """No configuration can be recommended; one sentence."""


def candidates(series: Sequence[Series], effective_batch: int, headroom: float) -> list[Candidate]:
    """Best first. Raises `NothingFitsError`."""
    varying = [axis for axis in analysis.varying_axes(series) if axis != "accumulation"]
    found: dict[tuple[object, ...], Candidate] = {}
    usable = full = 0
    for one in series:
        for record in one.measured:
            candidate = _candidate(one, record, varying, effective_batch)
            if one.size_of(record) in one.thrashing:
                continue
            usable += 1
            if candidate is None:
                continue
            if candidate.headroom < headroom:
                full += 1
                continue
            key = (*(value for name, value in one.axes.items() if name != "accumulation"), candidate.spec.batch_size)
            if key not in found or _trust(candidate) > _trust(found[key]):
                found[key] = candidate
    if not usable:
        raise NothingFitsError("no cell ran to its end, so that nothing can be recommended")
    if not found:
        if full:
            raise NothingFitsError(
                f"every cell that reaches an effective batch of {effective_batch} leaves less than {headroom:.0%} "
                "of the device free; --headroom takes less"
            )
        reached = sorted(
            {record.spec.batch_size * record.spec.data_parallel_size for one in series for record in one.measured}
        )
        raise NothingFitsError(
            f"no cell that ran reaches an effective batch of {effective_batch} exactly: it must be a multiple of "
            f"batch size x world size, one of {', '.join(map(str, reached[:12]))}"
        )
    return sorted(found.values(), key=_rank)


def _candidate(one: Series, record: CellRecord, varying: Sequence[str], effective_batch: int) -> Candidate | None:
    spec, rank = record.spec, record.largest_rank
    passes, rest = divmod(effective_batch, spec.batch_size * spec.data_parallel_size)
    if rest or passes < 1 or rank is None or rank.reserved_peak_bytes is None:
        return None
    timing = timing_of(record)
    return Candidate(
        spec=replace(spec, accumulation=passes),
        label=one.label(varying),
        record=record,
        reserved_bytes=rank.reserved_peak_bytes,
        capacity_bytes=rank.capacity_bytes,
        seconds_per_iteration=timing.seconds / spec.accumulation * passes if timing else None,
    )


def _trust(candidate: Candidate) -> tuple[bool, bool, int]:
    """Which of two records speaks better for one configuration: the one that ran as it would."""
    run = candidate.record.spec.accumulation
    return candidate.measured, not candidate.doubtful_memory, -abs(run - candidate.spec.accumulation)


def _rank(candidate: Candidate) -> tuple[object, ...]:
    """By speed; where that is unknown, without recomputation first, then the fewest passes, then the most headroom."""
    speed = candidate.speed
    spec = candidate.spec
    return (
        speed is None,
        -(speed or 0),
        spec.gradient_checkpointing,
        spec.accumulation,
        -candidate.headroom,
    )


def reasons(ranked: Sequence[Candidate]) -> list[str]:
    """Why the winner wins, what it costs, and how far that is known."""
    winner = ranked[0]
    name = describe(winner)
    said = []
    speed = winner.speed
    digits = 0 if winner.unit == "tokens/s" else 2
    if speed is None:
        said.append(
            f"{name} comes first by what is known: times were not measured, so that no recomputation, then fewer "
            "accumulated passes, then more free memory decide; measure on a GPU before relying on it"
        )
    else:
        said.append(f"{name} wins with {speed:,.{digits}f} {winner.unit} ({winner.basis})")
        if (estimate := winner.record.estimate) and winner.basis == COMPUTED:
            said.append(
                f"warning: no time was measured; these are estimates, right within about {estimate.uncertainty:.0%} "
                "each, and surer in their order; measure the first few on a GPU before relying on them"
            )
        if len(ranked) > 1 and (second := ranked[1].speed):
            more = (winner.reserved_bytes - ranked[1].reserved_bytes) / GIB
            cost = f"{abs(more):.2f} GiB {'more' if more > 0 else 'less'} reserved"
            lead = f"{speed / second - 1:.1%} faster than" if speed / second >= 1 + analysis.NOISE else "as fast as"
            said.append(f"it is {lead} the next, {describe(ranked[1])}, with {cost}")
    free = (winner.capacity_bytes - winner.reserved_bytes) / GIB
    said.append(f"it reserves {winner.reserved_bytes / GIB:.2f} GiB and leaves {free:.2f} GiB ({winner.headroom:.0%})")
    if not winner.measured:
        said.append(
            f"it ran with accumulation {winner.record.spec.accumulation}"
            + ("" if speed is None else ", and its time is counted up per pass")
            + ("; gradients that stay between passes may take more memory" if winner.doubtful_memory else "")
        )
    return said


def describe(candidate: Candidate) -> str:
    parts = [candidate.label, f"batch size {candidate.spec.batch_size}", f"accumulation {candidate.spec.accumulation}"]
    return ", ".join(filter(None, parts))


def command(candidate: Candidate) -> str:
    """Measures this configuration again, or for the first time."""
    spec, words = candidate.spec, []
    for word in shlex.split(candidate.record.command):
        name = word.partition("=")[0]
        if name not in ("accumulation", "batch_size"):
            words.append(word)
    return shlex.join([*words, f"accumulation={spec.accumulation}", f"batch_size={spec.batch_size}"])


def show(console: Console, ranked: Sequence[Candidate]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (
        "",
        "configuration",
        "batch\nsize",
        "accum.",
        "GiB",
        "free",
        "s/iter-\nation",
        ranked[0].unit.replace("/", "\n/"),
        "figures",
    ):
        table.add_column(title, justify="left" if title in ("configuration", "figures") else "right")
    for number, one in enumerate(ranked[:SHOWN], start=1):
        seconds, speed = one.seconds_per_iteration, one.speed
        table.add_row(
            str(number),
            escape(one.label or one.spec.model.name),
            str(one.spec.batch_size),
            str(one.spec.accumulation),
            f"{one.reserved_bytes / GIB:.2f}",
            f"{one.headroom:.0%}",
            "" if seconds is None else f"{seconds:#.3g}".rstrip("."),
            "" if speed is None else f"{speed:,.{0 if one.unit == 'tokens/s' else 2}f}",
            one.basis + (", memory without accumulation" if one.doubtful_memory else ""),
        )
    console.print(table)
    if len(ranked) > SHOWN:
        console.print(f"and {len(ranked) - SHOWN} more")
    for sentence in reasons(ranked):
        console.print(escape(sentence[0].upper() + sentence[1:] + "."), highlight=False)
    if not ranked[0].record.imported_from:
        doing = "Measure it again" if ranked[0].measured else "Measure it"
        console.print(escape(f"{doing}: {command(ranked[0])}"), highlight=False, soft_wrap=True)


def _part(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a part of the device, such as 5% or 0.05")
    return value


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number of 1 or more")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep recommend", description="Rank what reaches an effective batch.")
    parser.add_argument("results", type=Path, help="a folder of results")
    parser.add_argument("--effective-batch", type=_count, required=True, help="sequences per optimizer step, in all")
    parser.add_argument("--headroom", type=_part, default=0.05, help="part of the device to leave free; default: 5%%")
    parser.add_argument("--where", action="append", default=[], metavar="AXIS=VALUE", help="only these series")
    parser.add_argument("--emit", action="append", default=[], choices=[t.value for t in Target], help="write a file")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for it; default: this one")
    options = parser.parse_args(arguments)
    console = Console(width=max(100, Console().width))
    try:
        series = analysis.chosen(analysis.series_of(Store(options.results.resolve()).records()), options.where)
        if not series:
            raise NothingFitsError(f"{options.results} holds no cell{' with these values' if options.where else ''}")
        ranked = candidates(series, options.effective_batch, options.headroom)
        console.print(f"[bold]{escape(analysis.headline(series))}[/bold]", highlight=False)
        for sentence in _caveats(ranked, series):
            console.print(escape(sentence), highlight=False)
        show(console, ranked)
        options.out.mkdir(parents=True, exist_ok=True)
        for target in map(Target, options.emit):
            path = options.out / target.file_name
            write_atomically(path, emit(ranked[0].spec, target))
            console.print(f"{path} holds it", highlight=False)
    except (StoreError, NothingFitsError, AxisError, EmitError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def _caveats(ranked: Sequence[Candidate], series: Sequence[Series]) -> Iterable[str]:
    yield from analysis.caveats(series)
    if ranked[0].spec.device.kind is DeviceKind.CPU:
        yield "the ranking is this CPU's: another device ranks anew"


if __name__ == "__main__":
    sys.exit(main())
