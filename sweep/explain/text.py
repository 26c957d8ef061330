"""What `sweep explain` prints."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sweep.analysis import GIB, VIRTUAL_SENTENCE, size_text
from sweep.explain import differences
from sweep.explain.cells import Explained
from sweep.explain.findings import Finding
from sweep.explain.savings import Verified
from sweep.explanation import Category, Explanation, Place
from sweep.record import Status
from sweep.screen import title
from sweep.spec import DeviceKind

BAR = 24
PLACES = 12


def show(console: Console, explained: Explained) -> None:
    """The moment of the peak, the categories, the largest places."""
    one = explained.explanation
    console.print(f"[bold]{escape(title(one.spec))}[/bold]", highlight=False)
    device = f"{one.spec.world_size} x {one.device_name}"
    if one.spec.device.kind is DeviceKind.VIRTUAL:
        device += f"; {VIRTUAL_SENTENCE}"
    console.print(escape(device), highlight=False)
    where = f", in {one.module}" if one.module else ""
    console.print(
        f"The peak is {size_text(one.allocated_bytes)} of allocated memory, in {differences.moment(one)}"
        f"{escape(where)}.",
        highlight=False,
    )
    for sentence in caveats(explained):
        console.print(escape(sentence), highlight=False)
    console.print(_categories(one))
    console.print(_places(one.places))


def caveats(explained: Explained) -> list[str]:
    one, found = explained.explanation, []
    if explained.record.status is Status.OOM:
        found.append(
            "This cell runs out of memory; what follows is what it would hold on the same device with room enough."
        )
    elif one.allocated_bytes != one.cell_allocated_peak_bytes:
        found.append(
            f"The explained iteration's peak differs from the measured one, {size_text(one.cell_allocated_peak_bytes)}."
        )
    if one.spec.compile:
        found.append("A compiled model runs eagerly while it is watched, without its fused operators.")
    if one.cell_highest_bytes > one.cell_allocated_peak_bytes:
        found.append(
            f"The cell held more before training, in {one.cell_highest_phase.value}: "
            f"{size_text(one.cell_highest_bytes)}; explained is the training iteration."
        )
    return found


def _categories(one: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("category", "GiB", "of the peak", ""):
        table.add_column(name, justify="right" if name in ("GiB", "of the peak") else "left")
    for category in Category:
        size = one.categories.get(category, 0)
        if size and category.allocated:
            share = size / one.allocated_bytes
            table.add_row(category.value, _gib(size), f"{share:.1%}", "█" * round(share * BAR))
    table.add_section()
    table.add_row("allocated", _gib(one.allocated_bytes), "100.0%", "")
    for category in (Category.SLACK, Category.CONTEXT):
        if size := one.categories.get(category, 0):
            table.add_row(category.value, _gib(size), "", "")
    return table


def _places(places: Sequence[Place]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GiB", justify="right")
    table.add_column("blocks", justify="right")
    for name in ("what", "where, made by", "shape of one"):
        table.add_column(name, overflow="fold")
    for place in places[:PLACES]:
        where = ", ".join(part for part in (place.module, place.made_by) if part)
        if place.source:
            where += f"\n{place.source}"
        shape = "" if place.shape is None else f"{list(place.shape)} {place.dtype}"
        what = place.category.value + (" (released, still held)" if place.released_bytes else "")
        table.add_row(_gib(place.bytes), str(place.count), what, escape(where), escape(shape))
    rest = places[PLACES:]
    if rest:
        size = sum(place.bytes for place in rest)
        table.add_row(_gib(size), str(sum(place.count for place in rest)), "", f"{len(rest)} smaller places", "")
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if abs(size) >= 0.005 * GIB else f"{size / GIB:.4f}"


def show_finding(console: Console, number: int, finding: Finding, verified: Verified | None) -> None:
    console.print(f"{number}. {escape(finding.sentence)}.", highlight=False)
    advice = finding.advice[0].upper() + finding.advice[1:]
    console.print(f"   {escape(advice)}. {_saving(finding)}".rstrip(), highlight=False)
    if finding.changes:
        console.print(f"   {escape(' '.join(overrides(finding)))}", highlight=False, style="bold")
    if verified is not None:
        console.print(f"   {escape(outcome(finding, verified))}", highlight=False)


def _saving(finding: Finding) -> str:
    return f"That is up to {size_text(finding.saves_bytes)}." if finding.saves_bytes else ""


def overrides(finding: Finding) -> list[str]:
    values = (finding.changes or {}).items()
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values]


def outcome(finding: Finding, verified: Verified) -> str:
    """What running the changed cell gave."""
    what = f"{finding.counter.value} peak"
    if verified.after_bytes is None:
        reason = f" ({verified.reason})" if verified.reason else ""
        return f"Run on the virtual GPU, this cell ends as {verified.after.value}{reason}."
    if verified.before_bytes is None:
        return f"Run on the virtual GPU: it fits, with a {what} of {size_text(verified.after_bytes)}."
    change = verified.after_bytes - verified.before_bytes
    verdict = f"{size_text(-change)} less" if change < 0 else f"{size_text(change)} more: it does not pay here"
    if change == 0:
        verdict = "no change: another moment is as high"
    if verified.after is Status.THRASHING:
        verdict += ", but it thrashes"
    return (
        f"Run on the virtual GPU: {what} {size_text(verified.before_bytes)} -> {size_text(verified.after_bytes)}, "
        f"{verdict}."
    )


def show_difference(console: Console, before: Explanation, after: Explanation) -> None:
    console.print("[bold]compared[/bold]")
    console.print(escape("; ".join(differences.differing_fields(before, after))) or "the same cell", highlight=False)
    console.print(escape(differences.sentence(before, after)), highlight=False)
    for note in differences.notes(before, after):
        console.print(escape(note), highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("category", "before", "after", "difference"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for category, size in differences.by_category(before, after).items():
        old, new = before.categories.get(category, 0), after.categories.get(category, 0)
        table.add_row(category.value, _gib(old), _gib(new), f"{size / GIB:+.2f}")
    table.add_section()
    total = after.allocated_bytes - before.allocated_bytes
    table.add_row("allocated", _gib(before.allocated_bytes), _gib(after.allocated_bytes), f"{total / GIB:+.2f}")
    console.print(table)
    for place in differences.by_place(before, after)[:5]:
        if abs(place.bytes) > 0.01 * max(before.allocated_bytes, after.allocated_bytes):
            where = f" of {place.module}" if place.module else ""
            console.print(
                f"  {differences.signed(place.bytes)}  {place.category.value}{escape(where)}", highlight=False
            )
