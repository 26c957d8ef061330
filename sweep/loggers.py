"""Optional loggers: a run per series, with batch sizes as steps. Each library is imported only when it is asked for."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sweep.record import CellRecord, Status
from sweep.spec import CellSpec, to_json


class LoggerError(Exception):
    """A logger that cannot be used; one sentence."""


def runs(records: Sequence[CellRecord]) -> Iterator[tuple[str, CellSpec, list[tuple[int, dict[str, float]]]]]:
    """Per series: a name, its first cell, and per batch size what was measured."""
    by_series: dict[str, list[CellRecord]] = {}
    for record in records:
        by_series.setdefault(record.series_id, []).append(record)
    for series_id, cells in by_series.items():
        spec = cells[0].spec
        name = f"{spec.model.name}-{spec.engine.label}-{spec.precision.value}-{series_id[:8]}"
        yield name, spec, [(record.spec.batch_size, scalars(record)) for record in cells]


def scalars(record: CellRecord) -> dict[str, float]:
    """The figures of a cell that are known; an out-of-memory is the figure `oom`."""
    rank = record.largest_rank
    known = {
        "memory/reserved_peak_bytes": rank.reserved_peak_bytes if rank else None,
        "memory/allocated_peak_bytes": rank.allocated_peak_bytes if rank else None,
        "memory/active_peak_bytes": rank.active_peak_bytes if rank else None,
        "time/seconds_per_iteration": record.seconds_per_iteration,
        "time/tokens_per_second": record.tokens_per_second,
        "oom": float(record.status is Status.OOM),
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def tensorboard(sweep: str, records: Sequence[CellRecord], out: Path, online: bool) -> None:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise LoggerError(f"TensorBoard is not installed ({error}): pip install tensorboard") from error
    for name, _, steps in runs(records):
        writer = EventFileWriter(str(out / sweep / name))
        for step, values in steps:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            writer.add_event(Event(step=step, summary=summary, wall_time=time.time()))
        writer.close()


def wandb(sweep: str, records: Sequence[CellRecord], out: Path, online: bool) -> None:
    try:
        import wandb as library
    except ImportError as error:
        raise LoggerError(f"Weights & Biases is not installed ({error}): pip install wandb") from error
    out.mkdir(parents=True, exist_ok=True)
    for name, spec, steps in runs(records):
        run = library.init(
            project=sweep, name=name, config=to_json(spec), dir=str(out), mode="online" if online else "offline"
        )
        for step, values in steps:
            run.log(values, step=step)
        run.finish()


LOGGERS: dict[str, Callable[[str, Sequence[CellRecord], Path, bool], None]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
}
