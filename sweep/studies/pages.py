"""The pages under docs/: published, virtual with the software of that time, virtual with today's, and measured here.

Every figure is computed from records; the text around it says what differs between the columns and why.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

from sweep import analysis, plots
from sweep.plots.style import CREATOR, STYLE
from sweep.record import CellRecord, Failure
from sweep.store import Store, write_atomically, write_json
from sweep.studies import QUESTIONS, answers, draw, reasons
from sweep.studies.answer import markdown, table
from sweep.studies.published import COLUMNS, Figures, Sources, error, published, sources

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed")
DPI = 110


def checkpointing(results: Path, docs: Path) -> str:
    name = "checkpointing"
    found = sources(name, results, published(name))
    parts = [
        "# What gradient checkpointing and expandable segments gain",
        "After Giles Thomas's study (github.com/gpjt/fine-tune-2024-04): Qwen1.5-0.5B on one RTX 3090 and Llama-3-8B "
        "on eight A100-80GB, ZeRO-3, fp16, AdamW, sequence length 2048, each size until out of memory. Again with:",
        f"    make sweep EXPERIMENT={name}",
        _versions(found),
        "## The largest batch size that runs, per device",
        _largest(found),
        "## Where they differ, and why",
        "\n".join(f"- {line}" for line in reasons.checkpointing(found)),
    ]
    for model in dict.fromkeys(key[0] for key in found.sides["published"]):
        parts += [f"## {model}", *_answers(name, found, model), *_charts(docs / name, found, model)]
        parts += [
            "### Cell by cell",
            "Peaks in MiB of one device, a range is over the devices; in brackets the relative distance to the "
            "published range.",
            _cells(found, model, ("active", "reserved", "seconds")),
        ]
    return "\n\n".join(parts) + "\n"


def accumulation_memory(results: Path, docs: Path) -> str:
    name = "accumulation-memory"
    found = sources(name, results, published(name))
    parts = [
        "# Why accumulation costs memory, and most of all in mixed precision",
        "After huggingface/accelerate#2035: Pythia-1.4B on one A40, and Llama-2-7B spread over two by one process; "
        "SGD, sequence length 8, checkpointing. Again with:",
        f"    make sweep EXPERIMENT={name}",
        _versions(found),
        "## Cell by cell",
        "Peaks in MiB; in brackets the relative error against the published figure.",
        *(
            _cells(found, model, ("reserved", "nvml"))
            for model in dict.fromkeys(k[0] for k in found.sides["published"])
        ),
        "## Where they differ, and why",
        "\n".join(f"- {line}" for line in reasons.accumulation_memory(found)),
        *_answers(name, found, None),
        *_explained(results / f"{name}-explained.txt"),
    ]
    return "\n\n".join(parts) + "\n"


def accumulation_throughput(results: Path, docs: Path) -> str:
    name = "accumulation-throughput"
    found = sources(name, results, [])
    parts = [
        "# Accumulation against real batches",
        "BLOOM-560M as a classifier of sequences: batch size 1 with accumulation 1, 4, 8, 16 against real batches of "
        "the same effective size, in fp32 and fp16. Again with:",
        f"    make sweep EXPERIMENT={name}\n    make sweep EXPERIMENT={name} DEVICE=cpu MODEL=tiny",
        _versions(found),
        "No published table of these figures is at hand, so that nothing is set beside them here.",
        *_note(results / f"{name}-note.txt"),
        *_answers(name, found, None),
    ]
    for record in found.here[:1]:
        written = draw(name, [r for r in found.here if r.spec.device == record.spec.device], docs / name)
        parts += [
            f"![The loss of accumulated and real batches, iteration by iteration]({name}/{path.name})"
            for path in written
        ]
    return "\n\n".join(parts) + "\n"


PAGES = {
    "checkpointing": checkpointing,
    "accumulation-memory": accumulation_memory,
    "accumulation-throughput": accumulation_throughput,
}


def take(results: Path, records: Path) -> None:
    """Replace the records of every experiment's sweep that has new ones; failures are none."""
    patterns = [f"{before}{name}" for name in QUESTIONS for before in ("", "weights-kept-")]
    for folder in sorted(path for pattern in patterns for path in results.glob(f"{pattern}-*/")):
        if found := [record for record in Store(folder).records() if record.status.final]:
            shutil.rmtree(records / folder.name, ignore_errors=True)
            for record in found:
                cell = Store(records / folder.name).cell(record.cell_id)
                cell.path.mkdir(parents=True)
                write_json(cell.record_path, _without_log(record))


def _without_log(record: CellRecord) -> CellRecord:
    """A traceback's paths are those of one machine."""
    ranks = tuple(replace(rank, failure=_quiet(rank.failure)) for rank in record.ranks)
    return replace(record, ranks=ranks, failure=_quiet(record.failure))


def _quiet(failure: Failure | None) -> Failure | None:
    return failure and replace(failure, stderr_tail=None)


def write(results: Path, docs: Path, names: Sequence[str] = tuple(PAGES)) -> Iterator[Path]:
    """Write these pages and their charts; gives each page's path once it is there."""
    for name in names:
        docs.mkdir(parents=True, exist_ok=True)
        write_atomically(path := docs / f"{name}.md", PAGES[name](results, docs))
        yield path


def _note(path: Path) -> Iterator[str]:
    """What whoever took these records has to say of them."""
    if path.is_file():
        yield path.read_text(encoding="utf-8").strip()


def _explained(path: Path) -> Iterator[str]:
    """What `sweep explain` said of the cell that takes most; nothing where it was not asked."""
    if path.is_file():
        yield "### What is there at the moment of the peak"
        yield "The beginning of what `sweep explain` shows of it; nothing of the sentences above went into this."
        yield (
            "    sweep explain experiment=accumulation-memory model=pythia-1.4b engine=single world_size=1 gpu=a40 "
            "batch_size=1 precision=bf16 accumulation=2"
        )
        yield f"```\n{path.read_text(encoding='utf-8').strip()}\n```"


def _versions(found: Sources) -> str:
    lines = []
    for name, records in (("today", found.today), ("here", found.here)):
        seen = {
            tuple(f"{library} {version}" for library in LIBRARIES if (version := r.environment.get(library)))
            for r in records
        }
        if seen:
            lines.append(f"{COLUMNS[name].capitalize()}: {'; or '.join(', '.join(each) for each in sorted(seen))}.")
    if found.then:
        lines.insert(
            0, "Virtual, software of that time: see [the comparison](../results/virtual-gpu/published-simulated.md)."
        )
    return " ".join(lines)


def _largest(found: Sources) -> str:
    sides = found.sides
    series = sorted({key[:3] for key in (*sides["published"], *sides.get("today", ()))})
    rows = []
    for model, checkpointed, expandable in series:
        row = [model, _yes(checkpointed), _yes(expandable)]
        for figures in sides.values():
            tried = {key[3]: figure for key, figure in figures.items() if key[:3] == (model, checkpointed, expandable)}
            ran = max((size for size, figure in tried.items() if figure.ran), default=None)
            ended = any(size > (ran or 0) for size in tried)
            row.append("" if ran is None else f"{ran}" if ended else f"{ran}, the last tried")
        rows.append(row)
    return table(("model", "checkpointing", "expandable segments", *(COLUMNS[side] for side in sides)), rows)


def _cells(found: Sources, model: str, what: Sequence[str]) -> str:
    sides = found.sides
    keys = dict.fromkeys(k for side in sides.values() for k in sorted(side) if k[0] == model)
    varying = [i for i in range(1, 6) if len({key[i] for key in keys}) > 1]
    names = ("", "checkpointing", "expandable segments", "batch size", "precision", "accumulation")
    columns = [
        (side, each)
        for each in what
        for side in sides
        if any(_value(f, each) for k, f in sides[side].items() if k[0] == model)
    ]
    rows = []
    for key in sorted(keys):
        base = sides["published"].get(key)
        row = [_yes(key[i]) if isinstance(key[i], bool) else str(key[i]) for i in varying]
        row += [_shown(sides[side].get(key), base if side != "published" else None, each) for side, each in columns]
        rows.append(row)
    shown = {"nvml": "NVML"}
    head = [*(names[i] for i in varying), *(f"{shown.get(each, each)}: {COLUMNS[side]}" for side, each in columns)]
    return table(head, rows)


def _value(figures: Figures, what: str) -> tuple[float, float] | None:
    value = getattr(figures, what)
    return (value, value) if isinstance(value, float) else value


def _shown(figures: Figures | None, base: Figures | None, what: str) -> str:
    if figures is None:
        return ""
    span = _value(figures, what)
    if span is None:
        return "" if figures.ran else {"oom": "OOM"}.get(figures.status, figures.status)
    form = ".4g" if what == "seconds" else ".0f"
    low, high = (format(each, form) for each in span)
    text = low if low == high else f"{low}-{high}"
    if what == "seconds" and figures.estimated:
        text += " est."
    if base and (against := _value(base, what)):
        text += f" ({error(span[1], *against):+.1%})"
    return text


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _answers(name: str, found: Sources, model: str | None) -> Iterator[str]:
    for side, records in (("published", found.published), ("today", found.today), ("here", found.here)):
        chosen = [r for r in records if model in (None, r.spec.model.name)]
        if side == "published" and name == "accumulation-memory":
            continue  # two of its three counters are not published: the table has the third
        for answer in answers(name, chosen) if chosen else ():
            yield f"### {'Answers, ' if model else ''}{COLUMNS[side]}{'' if model else f': {answer.title}'}"
            yield markdown(answer)


def _charts(folder: Path, found: Sources, model: str) -> Iterator[str]:
    kinds = (plots.Kind.SERIES, plots.Kind.MEMORY, plots.Kind.TIME)
    for side, records in (("published", found.published), ("today", found.today), ("here", found.here)):
        series = analysis.series_of(r for r in records if r.spec.model.name == model)
        if not series:
            continue
        yield f"### Charts, {COLUMNS[side]}"
        with mpl.rc_context(STYLE):
            for name, figure in plots.figures(series, kinds):
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(path := folder / f"{model}-{side}-{name}.png", dpi=DPI, metadata={"Software": CREATOR})
                yield f"![{model}, {COLUMNS[side]}: {name}]({folder.name}/{path.name})"
