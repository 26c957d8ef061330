"""Which cell is meant, and its explanation: the stored one, or a new one from running that one cell again, watched."""

import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from sweep import environment
from sweep.config import CONF, LARGEST_GPU_BYTES, job_from
from sweep.explanation import Explanation, ExplanationFailure, Request
from sweep.launch import run_cell
from sweep.record import CellRecord, Status
from sweep.spec import CellSpec, DeviceKind, cell_id, from_json
from sweep.store import RESULTS, CellDirectory, Store
from sweep.usage import fail_on_mistakes, values_of

CELL_ID = re.compile(r"[0-9a-f]{4,16}")
KEPT = ("explain[0-9]*.json", "snapshot[0-9]*.pickle")
RAN = (Status.OK, Status.THRASHING)


class ExplainError(Exception):
    """There is nothing to explain; one sentence that says why."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A cell and where its files are."""

    spec: CellSpec
    store: Store
    identifier: str

    @property
    def directory(self) -> CellDirectory:
        return self.store.cell(self.identifier)

    @property
    def scratch(self) -> Store:
        """For cells that are run only to explain this one: they are no part of the sweep, and are kept beside it."""
        return Store(self.store.path / ".explain")


@dataclass(frozen=True, kw_only=True)
class Explained:
    subject: Subject
    record: CellRecord
    explanation: Explanation
    """Of the rank that held most."""
    snapshots: tuple[Path, ...] = ()


def subjects(arguments: Sequence[str]) -> list[Subject]:
    """From identifiers, paths and overrides: every cell that is meant. Raises `ExplainError`, `SpecError`."""
    named = [_stored(argument) for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    return named + (_composed(overrides) if overrides else [])


def _stored(argument: str) -> Subject:
    path = Path(argument)
    if path.is_file():
        path = path.parent
    if not path.is_dir():
        found = list(RESULTS.glob(f"*/cells/{argument}*")) if CELL_ID.fullmatch(argument) else []
        if not found:
            raise ExplainError(f"{argument} is no cell of {RESULTS}/, no folder of one, and no override such as a=b")
        if len({each.name for each in found}) > 1:
            raise ExplainError(f"{argument} are {len(found)} cells; give more of the identifier")
        path = found[0]
    directory = CellDirectory(path.resolve())
    if not directory.spec_path.exists():
        raise ExplainError(f"{argument} is no cell's folder: it has no spec.json")
    store = Store(directory.path.parent.parent)
    try:
        spec = directory.read_spec()
    except ValueError as error:
        raise ExplainError(f"{directory.spec_path} cannot be read ({' '.join(str(error).split())})") from error
    return Subject(spec=spec, store=store, identifier=directory.path.name)


def _composed(overrides: Sequence[str]) -> list[Subject]:
    """The cells of a command line as that of `sweep.run`, on the virtual device unless it says otherwise."""
    fail_on_mistakes(overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if not any(override.get_key_element() == "device" for override in parsed):
            parsed = OverridesParser.create().parse_overrides([*overrides, "device=virtual"])
        keys = [(override.input_line or "").partition("=")[0] for override in parsed]
        choices = [[f"{key}={value}" for value in values_of(each)] for key, each in zip(keys, parsed, strict=True)]
        found = []
        for choice in itertools.product(*choices):
            job = job_from(compose("config", overrides=list(choice)))
            identifier = cell_id(job.spec, environment.identity(job.spec.device))
            found.append(Subject(spec=job.spec, store=Store(RESULTS / job.sweep), identifier=identifier))
    return found


def explained(subject: Subject, *, again: bool = False, snapshot: bool = False) -> Explained:
    """Raises `ExplainError` where the cell cannot run, `DeviceError` where its device is not here."""
    if subject.spec.device.kind is DeviceKind.CPU:
        raise ExplainError("device=cpu has no allocator whose history could be explained; choose device=virtual")
    directory = subject.directory
    wanted = not list(directory.path.glob("explain[0-9]*.json"))
    if wanted or again or (snapshot and not list(directory.path.glob("snapshot[0-9]*.pickle"))):
        _run(subject, Request(snapshot=snapshot))
    record = directory.read_record()
    assert record is not None
    ranks = [_read(path) for path in sorted(directory.path.glob("explain[0-9]*.json"))]
    snapshots = tuple(sorted(directory.path.glob("snapshot[0-9]*.pickle"))) if snapshot else ()
    largest = max(ranks, key=lambda one: one.allocated_bytes)
    return Explained(subject=subject, record=record, explanation=largest, snapshots=snapshots)


def _run(subject: Subject, request: Request) -> None:
    """Run the cell once more, elsewhere, so that its own record stays; only what explains is brought here."""
    environment.require_device(subject.spec.device.kind, subject.spec.world_size)
    directory = subject.directory
    known = directory.read_record()
    subject.store.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".explaining-", dir=subject.store.path) as folder:
        store = Store(Path(folder))
        spec = subject.spec
        record = known if known and known.status is Status.OOM else run_cell(spec, store, [], explain=request)
        own = record
        if record.status is Status.OOM and spec.device.gpu is not None:
            # What would it have needed? The same on a device with room enough.
            roomy = replace(spec.device.gpu, total_memory_bytes=LARGEST_GPU_BYTES, other_processes_bytes=0)
            spec = replace(spec, device=replace(spec.device, gpu=roomy))
            record = run_cell(spec, store, [], explain=request)
        if record.status not in RAN:
            raise ExplainError(
                f"the cell did not run: {record.status.value}{f', {record.reason}' * bool(record.reason)}"
            )
        came_from = store.cell(record.cell_id).path
        if not list(came_from.glob("explain[0-9]*.json")):
            raise ExplainError("the cell ran, and no rank wrote an explanation; --again tries once more")
        if known is None:
            origin = store.cell(own.cell_id).path
            shutil.copytree(origin, directory.path, ignore=shutil.ignore_patterns(*KEPT), dirs_exist_ok=True)
        for pattern in KEPT:
            for path in came_from.glob(pattern):
                shutil.move(path, directory.path / path.name)


def _read(path: Path) -> Explanation:
    content = json.loads(path.read_text(encoding="utf-8"))
    if "message" in content:
        raise ExplainError(f"the cell could not be explained: {from_json(ExplanationFailure, content).message}")
    return from_json(Explanation, content)
