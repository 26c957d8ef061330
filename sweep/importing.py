"""Other people's measurements as records: `sweep import TABLE.csv [...] [--sweep NAME] [--map FIELD=COLUMN]`.

A table has one row per cell, or one per cell and rank; rows of the same configuration and batch size make one record.
The usual names of columns are known, any other is named with `--map`, and `--set` gives what no column says. Records
are marked with their source. A column that no field takes is kept as a fact of the record's environment.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from sweep import models, virtual
from sweep.record import CellRecord, RankRecord, ReportedMemory, Status
from sweep.spec import CellSpec, DeviceKind, SpecError, cell_id, from_json
from sweep.store import RESULTS, Store, StoreError

MIB = 2**20

# Every field that can be imported, and the names under which tables have it, the field's own first.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "model": ("model", "model_name"),
    "parameters": ("parameters",),
    "engine": ("engine",),
    "zero_stage": ("zero_stage",),
    "world_size": ("world_size", "num_gpus", "gpus"),
    "gpu": ("gpu", "gpu_name", "device_name"),
    "capacity": ("capacity", "capacity_bytes", "capacity_mib", "capacity_gib"),
    "precision": ("precision", "dtype"),
    "optimizer": ("optimizer",),
    "seq_len": ("seq_len", "sequence_length"),
    "gradient_checkpointing": ("gradient_checkpointing", "checkpointing"),
    "expandable_segments": ("expandable_segments",),
    "accumulation": ("accumulation", "gradient_accumulation_steps"),
    "batch_size": ("batch_size", "per_device_train_batch_size"),
    "rank": ("rank",),
    "status": ("status",),
    "reserved": ("reserved", "peak_reserved_mib", "torch_reserved_mib", "reserved_peak_bytes", "peak_reserved_gib"),
    "active": ("active", "peak_active_mib", "active_peak_bytes", "peak_active_gib"),
    "allocated": ("allocated", "peak_allocated_mib", "allocated_peak_bytes", "peak_allocated_gib"),
    "nvml_used": ("nvml_used", "nvml_used_mib", "nvml_used_peak_bytes"),
    "seconds_per_iteration": ("seconds_per_iteration",),
    "source": ("source",),
}
UNITS = {"_gib": 2**30, "_mib": MIB, "_bytes": 1}
SPEC_FIELDS = (
    "world_size", "batch_size", "seq_len", "gradient_checkpointing", "expandable_segments", "precision",
    "accumulation", "optimizer",
)  # fmt: skip
UNWRAPPED = ("", "none", "dp", "multi_gpu", "distributeddataparallel")
"""Of `engine`: one device alone, or DDP under another name. What is no engine of the sweep is refused, not renamed."""
REQUIRED = ("model", "gpu", "seq_len", "batch_size", "reserved")


class ImportingError(Exception):
    """A table that cannot be taken; one sentence that says what to do."""


class Table:
    """One CSV file: which column holds which field, and what is the same for every row."""

    def __init__(self, path: Path, mapped: Mapping[str, str], constants: Mapping[str, str]) -> None:
        self.path = path
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            self.rows = list(reader)
            names = list(reader.fieldnames or ())
        self._constants = constants
        for column in mapped.values():
            if column not in names:
                raise ImportingError(f"{path.name} has no column {column}; it has {', '.join(names)}")
        self.columns = {
            field: found
            for field, usual in COLUMNS.items()
            if (found := mapped.get(field) or next((name for name in usual if name in names), None))
        }
        self.extra = [name for name in names if name not in self.columns.values()]
        for field in REQUIRED:
            if field not in self.columns and field not in constants:
                raise ImportingError(
                    f"{path.name} has no column for {field}: name it with --map {field}=COLUMN"
                    + ("" if field == "reserved" else f", or give the value with --set {field}=VALUE")
                )

    def text(self, row: Mapping[str, str], field: str) -> str | None:
        """The cell's text; None where it is empty or the table does not say."""
        if field in self._constants:
            return self._constants[field]
        return ((row.get(self.columns[field]) or "").strip() or None) if field in self.columns else None

    def number(self, row: Mapping[str, str], field: str) -> float | None:
        text = self.text(row, field)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ImportingError(f"{self.path.name} has {field}={text}, which is no number of 0 or more")
        return value

    def whole(self, row: Mapping[str, str], field: str) -> int | None:
        value = self.number(row, field)
        if value is not None and value != int(value):
            raise ImportingError(f"{self.path.name} has {field}={value}, which is no whole number")
        return None if value is None else int(value)

    def size(self, row: Mapping[str, str], field: str) -> int | None:
        """Bytes. The column's name says the unit; one without is in MiB, as nvidia-smi prints it."""
        value = self.number(row, field)
        column = self.columns.get(field, field)
        unit = next((size for end, size in UNITS.items() if column.endswith(end)), MIB)
        return None if value is None else round(value * unit)


def read(
    path: Path, mapped: Mapping[str, str] | None = None, constants: Mapping[str, str] | None = None
) -> list[CellRecord]:
    """The records of one table. Raises `ImportingError`, or `SpecError` for a value that no cell can have."""
    table = Table(path, mapped or {}, constants or {})
    cells: dict[tuple[str, str, int], list[Mapping[str, str]]] = {}
    specs: dict[tuple[str, str, int], CellSpec] = {}
    for row in table.rows:
        spec = _spec(table, row)
        key = (spec.series_id, _device(table, row)[0], spec.batch_size)
        specs[key] = spec
        cells.setdefault(key, []).append(row)
    if not cells:
        raise ImportingError(f"{path.name} has no rows")
    now = datetime.now(timezone.utc)
    return [
        _record(table, specs[key], rows, (now + timedelta(milliseconds=i)).isoformat(timespec="milliseconds"))
        for i, (key, rows) in enumerate(cells.items())
    ]


def _spec(table: Table, row: Mapping[str, str]) -> CellSpec:
    stage, engine = table.whole(row, "zero_stage"), (table.text(row, "engine") or "").lower()
    if engine in UNWRAPPED:
        engine = "deepspeed" if not engine and stage is not None else "ddp"
    content: dict[str, Any] = {
        "model": _model(table, row),
        "engine": {"name": engine, "zero_stage": stage if engine == "deepspeed" else None},
        "device": {"kind": DeviceKind.CUDA.value},
        "world_size": 1,
    }
    for field in SPEC_FIELDS:
        text = table.text(row, field)
        if text is None:
            continue
        if field in ("gradient_checkpointing", "expandable_segments"):
            content[field] = _truth(field, text)
        else:
            content[field] = text if field in ("precision", "optimizer") else table.whole(row, field)
    return from_json(CellSpec, content)


def _truth(field: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise SpecError(field, text, "give true or false")
    return text.lower() in ("true", "yes", "1")


def _model(table: Table, row: Mapping[str, str]) -> dict[str, Any]:
    name = table.text(row, "model") or ""
    if name in models.names():
        return models.model(name)
    parameters = table.whole(row, "parameters")
    if parameters is None:
        raise ImportingError(
            f"model={name} is none of conf/model/: say how large it is with --set parameters=NUMBER, "
            "or --set model=NAME to name one of them"
        )
    return {"name": name, "model_type": "unknown", "parameters": parameters, "config": {}}


def _device(table: Table, row: Mapping[str, str]) -> tuple[str, int | None]:
    """The GPU's name as it reports itself, and its memory in bytes: known GPUs by their key, `a40-48gb` as `a40`."""
    given = table.text(row, "gpu") or ""
    known = virtual.gpus()
    profile = known.get(given) or known.get(given.rpartition("-")[0])
    capacity = table.size(row, "capacity") or (profile.total_memory_bytes if profile else None)
    return (profile.name if profile else given), capacity


def _record(table: Table, spec: CellSpec, rows: Sequence[Mapping[str, str]], started_at: str) -> CellRecord:
    first = rows[0]
    source = table.text(first, "source") or table.path.name
    gpu, capacity = _device(table, first)
    if capacity is None:
        raise ImportingError(f"gpu={gpu} is not known: say what it holds with --set capacity=MIB, or --map")
    named = {table.text(row, "status") or _implied(table, row) for row in rows}
    try:
        (status,) = map(Status, named)
    except ValueError:
        raise ImportingError(
            f"{table.path.name} says status={' and '.join(sorted(named))} for batch_size={spec.batch_size} of one "
            f"series; a cell has one of {', '.join(each.value for each in Status)}"
        ) from None
    ranks = tuple(_ranks(table, rows, gpu, capacity)) if status in (Status.OK, Status.THRASHING) else ()
    facts = {name: row_value for name in table.extra if (row_value := first.get(name))}
    return CellRecord(
        cell_id=cell_id(spec, {"imported_from": source, "gpu": gpu}),
        series_id=spec.series_id,
        status=status,
        spec=spec,
        environment={"imported_from": source, "gpu": gpu, **facts},
        command=f"sweep import {table.path.name}",
        ranks=ranks,
        started_at=started_at,
        duration_seconds=0.0,
        imported_from=source,
    )


def _implied(table: Table, row: Mapping[str, str]) -> str:
    return "oom" if table.text(row, "reserved") is None else "ok"


def _ranks(table: Table, rows: Sequence[Mapping[str, str]], gpu: str, capacity: int) -> Iterator[RankRecord]:
    seen: set[int] = set()
    for row in rows:
        rank = table.whole(row, "rank") or 0
        if rank in seen:
            raise ImportingError(
                f"{table.path.name} has two rows for rank {rank} of one configuration and batch size; "
                f"they differ in none of the fields {', '.join(SPEC_FIELDS)}"
            )
        seen.add(rank)
        seconds = table.number(row, "seconds_per_iteration")
        sizes = {f"{name}_bytes": table.size(row, name) for name in ("allocated", "active", "reserved", "nvml_used")}
        yield RankRecord(
            rank=rank,
            device_name=gpu,
            capacity_bytes=capacity,
            seconds_per_iteration=(seconds,) if seconds else None,
            reported=ReportedMemory(**sizes),
        )


def _assignments(given: Sequence[str], option: str) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for field, equals, value in pairs:
        if field not in COLUMNS or not equals or not value:
            raise ImportingError(f"{option} {field}{equals}{value}: give FIELD=..., FIELD one of {', '.join(COLUMNS)}")
    return {field: value for field, _, value in pairs}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sweep import", description="Take other people's measurements into results/ as records of their own kind."
    )
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE.csv")
    parser.add_argument("--sweep", help="the folder under results/; default: the table's name")
    parser.add_argument("--map", action="append", default=[], metavar="FIELD=COLUMN", help="which column a field is in")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="what no column says")
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        mapped, constants = _assignments(options.map, "--map"), _assignments(options.set, "--set")
        taken = {path: read(path, mapped, constants) for path in options.tables}
        for path, records in taken.items():
            name = options.sweep or path.stem
            if Path(name).name != name or name.startswith("."):
                raise ImportingError(f"--sweep {name}: give a plain folder name, without slashes")
            save(Store(options.results / name), records)
            series = len({record.series_id for record in records})
            print(f"{options.results / name}: {len(records)} cells in {series} series from {path.name}")
    except OSError as problem:
        print(f"{problem.filename}: {problem.strerror}", file=sys.stderr)
        return 1
    except (ImportingError, SpecError, StoreError, UnicodeDecodeError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def save(store: Store, records: Sequence[CellRecord]) -> None:
    """Write the records; the same table imported again replaces its own."""
    with store.lock():
        for record in records:
            directory = store.cell(record.cell_id)
            directory.begin(record.spec)
            store.save(record)
        store.write_table()
