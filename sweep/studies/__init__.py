"""What three published studies asked, answered in sentences from a sweep's records, by computation.

The experiments of the same names (`conf/experiment/`) make the records; `python -m sweep.studies` writes the pages
under docs/ from them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from sweep.plots.style import CREATOR, STYLE
from sweep.record import CellRecord
from sweep.studies import accumulation_memory, accumulation_throughput, checkpointing
from sweep.studies.answer import Answer, show

__all__ = ["QUESTIONS", "Answer", "answers", "draw", "show"]

QUESTIONS: Mapping[str, Callable[[Sequence[CellRecord]], list[Answer]]] = {
    "checkpointing": checkpointing.answers,
    "accumulation-memory": accumulation_memory.answers,
    "accumulation-throughput": accumulation_throughput.answers,
}


def answers(questions: str, records: Sequence[CellRecord]) -> list[Answer]:
    """One per model and kind of device. Raises `KeyError` for questions that nobody asked."""
    return QUESTIONS[questions](records)


def draw(questions: str, records: Sequence[CellRecord], out: Path) -> list[Path]:
    """Draw what these questions need besides the charts of every sweep; the paths written."""
    if questions != "accumulation-throughput":
        return []
    with mpl.rc_context(STYLE):
        if (figure := accumulation_throughput.figure(records)) is None:
            return []
        out.mkdir(parents=True, exist_ok=True)
        figure.savefig(path := out / "losses.png", metadata={"Software": CREATOR})
    return [path]
