"""One cell in its own process tree: spec in, record out. The parent survives whatever the cell does."""

import json
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone

from sweep import environment
from sweep.estimate.cell import estimate_of
from sweep.explanation import REQUEST_NAME, Request
from sweep.launch.classify import Clues, Verdict, classify
from sweep.launch.clean_slate import baseline_bytes, busy_reason
from sweep.launch.commands import command
from sweep.launch.commands import environment as process_environment
from sweep.launch.host_memory import oom_kills
from sweep.launch.pace import Pace
from sweep.launch.process import Child, start_process, watch
from sweep.launch.progress import ended_path, read_ended, read_progress
from sweep.launch.stacks import ask
from sweep.launch.stall import StallDetector
from sweep.launch.turns import turn
from sweep.launch.warm import spawn_warm
from sweep.record import CellRecord, Failure, RankRecord, Status
from sweep.spec import CellSpec, DeviceKind, SizeAxis, cell_id, from_json, unsupported_reason
from sweep.store import CellDirectory, Store, StoreError, write_json

_pace = Pace()


def run_cell(
    spec: CellSpec,
    store: Store,
    overrides: Sequence[str],
    *,
    force: bool = False,
    explain: Request | None = None,
    searched: SizeAxis = SizeAxis.BATCH_SIZE,
) -> CellRecord:
    """The stored record of this cell, or a new one: measured now and saved. `force` measures again.

    With `explain` a cell that is measured now leaves what its memory consisted of, as `explain<rank>.json`.

    Interrupted, it ends the cell, saves what is known as `interrupted` and lets the KeyboardInterrupt pass. Where the
    cell's folder cannot be used, the record says so and is stored in another place; OSError where there is none.
    """
    identifier = cell_id(spec, environment.identity(spec.device))
    directory = store.cell(identifier)
    started_at, start = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), time.monotonic()

    def record_of(status: Status, reason: str | None, failure: Failure | None = None) -> CellRecord:
        return CellRecord(
            cell_id=identifier,
            series_id=spec.series_id,
            status=status,
            reason=reason,
            spec=spec,
            environment=environment.describe(spec.device) | _baselines(spec),
            command=shlex.join(["python", "-m", "sweep.run", *overrides]),
            ranks=tuple(rank.without_trace() for rank in _read_ranks(spec, directory)[0]),
            failure=failure,
            started_at=started_at,
            duration_seconds=time.monotonic() - start,
            searched=searched,
            estimate=estimate_of(spec, directory.path) if status is Status.OK else None,
        )

    def unusable(error: Exception) -> Verdict:
        place = directory.path if isinstance(error, OSError) and error.filename is None else None
        sentence = " ".join(f"the cell's folder cannot be used: {error}{f' ({place})' if place else ''}".split())
        return Status.FAILED, sentence, Failure(kind=type(error).__name__, message=sentence)

    try:
        known = None if force else store.find(identifier)
        if known is not None and known.status.final:
            _pace.learn(store.path, known)
            return known
        _pace.recall(store)
        directory.begin(spec)
        if explain is not None:
            write_json(directory.path / REQUEST_NAME, explain)
        gpus = _real_gpus(spec)
        with turn(gpus, who=str(store.path.resolve())):
            started_at, start = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), time.monotonic()
            verdict = _measure(spec, directory, identifier, gpus, _pace.timeout_seconds(store.path, spec))
    except KeyboardInterrupt:
        store.save(record_of(Status.INTERRUPTED, "ended by the user"))
        raise
    except StoreError as error:  # the record that is there makes no sense, and is not overwritten
        record = record_of(*unusable(error))
        store.save_lost(record)
        return record
    except OSError as error:
        verdict = unusable(error)
    record = record_of(*verdict)
    _pace.learn(store.path, record)
    store.save(record)
    return record


def _real_gpus(spec: CellSpec) -> list[environment.Gpu]:
    """The devices that this cell needs for itself; none where it runs on no real one, or not at all."""
    needed = spec.device.kind is DeviceKind.CUDA and unsupported_reason(spec) is None
    return environment.visible_gpus()[: spec.world_size] if needed else []


def _measure(
    spec: CellSpec, directory: CellDirectory, identifier: str, gpus: list[environment.Gpu], timeout_seconds: float
) -> Verdict:
    unsupported = unsupported_reason(spec)
    if unsupported is not None:
        return Status.UNSUPPORTED, unsupported, None
    busy = busy_reason(gpus) if gpus else None
    if busy is not None:
        return Status.BUSY_DEVICE, busy, None
    variables = process_environment(spec, identifier)
    kills, stacks = oom_kills(), dict[int, str]()
    ended = watch(
        _start(spec, directory, variables),
        timeout_seconds=timeout_seconds,
        failed_rank=lambda: _any_rank_failed(spec, directory),
        stalled_seconds=StallDetector(directory.path).stalled_seconds,
        before_ending=lambda: stacks.update(ask(directory.path)),
        mark={name: variables[name] for name in ("SWEEP_CELL", "SWEEP_PARENT_PID")},
    )
    ranks, unreadable = _read_ranks(spec, directory)
    clues = Clues(
        progress=read_progress(directory.path),
        exit_codes=read_ended(directory.path),
        oom_kills=oom_kills() - kills,
        unreadable=unreadable,
        stacks=stacks,
    )
    verdict = classify(spec, ranks, ended, directory.stderr_path, clues)
    left = [*directory.path.glob("progress*.json"), *directory.path.glob("stack*.txt")]
    for path in (ended_path(directory.path), directory.path / REQUEST_NAME, *left):
        with suppress(OSError):
            path.unlink()
    return verdict


def _baselines(spec: CellSpec) -> dict[str, object]:
    """What was in use of each real device when the sweep began: other than near zero, it is somebody else's share."""
    if spec.device.kind is not DeviceKind.CUDA:
        return {}
    return {"baseline_used_bytes": baseline_bytes(environment.visible_gpus()[: spec.world_size])}


def _start(spec: CellSpec, directory: CellDirectory, variables: dict[str, str]) -> Child:
    if spec.device.kind is DeviceKind.VIRTUAL:
        child = spawn_warm(directory, variables)
        if child is not None:
            return child
    return start_process(
        command(spec, directory.path.resolve()), variables, directory.stdout_path, directory.stderr_path
    )


def _read_ranks(spec: CellSpec, directory: CellDirectory) -> tuple[list[RankRecord], dict[int, str]]:
    """The ranks that have reported, in order; and those whose record makes no sense, with the reason."""
    read = {rank: _read_rank(directory, rank) for rank in range(spec.world_size)}
    ranks = [content for content in read.values() if isinstance(content, RankRecord)]
    return ranks, {rank: content for rank, content in read.items() if isinstance(content, str)}


def _read_rank(directory: CellDirectory, rank: int) -> RankRecord | str | None:
    """None where there is nothing; a text says why what is there cannot be read."""
    try:
        return from_json(RankRecord, json.loads(directory.rank_path(rank).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())


def _any_rank_failed(spec: CellSpec, directory: CellDirectory) -> bool:
    """Whether a rank reports a failure, or is gone and has reported nothing."""
    ranks, unreadable = _read_ranks(spec, directory)
    reported = {rank.rank for rank in ranks}
    return (
        bool(unreadable)
        or any(rank.failure is not None for rank in ranks)
        or any(not rank.alive and rank.rank not in reported for rank in read_progress(directory.path))
    )
