"""One cell in its own process tree: spec in, record out. The parent survives whatever the cell does."""

import shlex
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from sweep import environment
from sweep.launch.classify import classify
from sweep.launch.commands import command
from sweep.launch.commands import environment as process_environment
from sweep.launch.process import Child, start_process, watch
from sweep.launch.warm import spawn_warm
from sweep.record import CellRecord, Failure, Status
from sweep.spec import CellSpec, DeviceKind, cell_id, unsupported_reason
from sweep.store import CellDirectory, Store


def run_cell(spec: CellSpec, store: Store, overrides: Sequence[str], *, force: bool = False) -> CellRecord:
    """The stored record of this cell, or a new one: measured now and saved. `force` measures again.

    Interrupted, it ends the cell, saves what is known as `interrupted` and lets the KeyboardInterrupt pass.
    """
    identifier = cell_id(spec, environment.identity(spec.device))
    directory = store.cell(identifier)
    known = None if force else directory.read_record()
    if known is not None and known.status.final:
        return known
    started_at, start = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), time.monotonic()
    directory.begin(spec)

    def save(status: Status, reason: str | None, failure: Failure | None = None) -> CellRecord:
        record = CellRecord(
            cell_id=identifier,
            series_id=spec.series_id,
            status=status,
            reason=reason,
            spec=spec,
            environment=environment.describe(spec.device),
            command=shlex.join(["python", "-m", "sweep.run", *overrides]),
            ranks=tuple(directory.read_ranks()),
            failure=failure,
            started_at=started_at,
            duration_seconds=time.monotonic() - start,
        )
        store.save(record)
        return record

    unsupported = unsupported_reason(spec)
    if unsupported is not None:
        return save(Status.UNSUPPORTED, unsupported)
    try:
        child = _start(spec, directory, process_environment(spec, identifier))
        ended = watch(child, timeout_seconds=spec.timeout_seconds, failed_rank=lambda: _any_rank_failed(directory))
    except KeyboardInterrupt:
        save(Status.INTERRUPTED, "ended by the user")
        raise
    return save(*classify(spec, directory.read_ranks(), ended, directory.stderr_path))


def _start(spec: CellSpec, directory: CellDirectory, variables: dict[str, str]) -> Child:
    if spec.device.kind is DeviceKind.VIRTUAL:
        child = spawn_warm(directory, variables)
        if child is not None:
            return child
    return start_process(
        command(spec, directory.path.resolve()), variables, directory.stdout_path, directory.stderr_path
    )


def _any_rank_failed(directory: CellDirectory) -> bool:
    return any(rank.failure is not None for rank in directory.read_ranks())
