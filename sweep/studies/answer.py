"""An answer: a table, where the study had one, and sentences. Shown on screen and in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    title: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    sentences: tuple[str, ...] = ()


def show(console: Console, answers: Sequence[Answer]) -> None:
    for answer in answers:
        console.print(f"[bold]{escape(answer.title)}[/bold]")
        if answer.rows:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
            for number, name in enumerate(answer.head):
                table.add_column(name, justify="left" if number == 0 else "right")
            for row in answer.rows:
                table.add_row(*map(escape, row))
            console.print(table)
        for sentence in answer.sentences:
            console.print(f"- {escape(sentence)}")
        console.print()


def markdown(answer: Answer) -> str:
    """The table and the sentences, without the title."""
    parts = [table(answer.head, answer.rows)] if answer.rows else []
    if answer.sentences:
        parts.append("\n".join(f"- {sentence}" for sentence in answer.sentences))
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
