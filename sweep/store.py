"""The layout of `results/`, and the only place that knows it.

    results/<sweep>/cells/<cell_id>/spec.json      what was asked for; written before the cell starts
                                    rank<k>.json   what rank k measured, its memory over time included
                                    stderr.log, stdout.log
                                    record.json    the outcome; its presence means that the cell is done
    results/<sweep>/lost/<cell_id>.json            the outcome of a cell whose own folder cannot be written
    results/<sweep>/cells.csv                      one row per record, for people and pandas
    results/<sweep>/.index.jsonl                   every record in one file, where there are many: a cache

Every file appears whole or not at all (written beside its place, then renamed), so a sweep killed at any moment
resumes: a cell without a record runs again from the start. Only one sweep writes a folder at a time.
"""

import csv
import fcntl
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sweep.record import CellRecord, NvmlTrace, RankRecord
from sweep.spec import CellSpec, from_json, to_json

RESULTS = Path("results")
PLOTS = Path("plots")


class StoreError(Exception):
    """The results folder cannot be used; one sentence that says what to do."""


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


PLAIN_LIST = re.compile(r'\[\n\s*(?:[-\d.eE+]+|"[^"\\\n]*")(?:,\n\s*(?:[-\d.eE+]+|"[^"\\\n]*"))*\n\s*\]')
"""A list of numbers or short texts over several lines; never within a text, where JSON escapes every new line."""


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(to_json(value), indent=1)
    write_atomically(path, PLAIN_LIST.sub(lambda found: re.sub(r"\n\s*", "", found.group()), text) + "\n")


class CellDirectory:
    """The files of one cell."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def spec_path(self) -> Path:
        return self.path / "spec.json"

    @property
    def stdout_path(self) -> Path:
        return self.path / "stdout.log"

    @property
    def stderr_path(self) -> Path:
        return self.path / "stderr.log"

    @property
    def record_path(self) -> Path:
        return self.path / "record.json"

    @property
    def history_path(self) -> Path:
        """Earlier records of a cell that was measured again, numbered from 1."""
        return self.path / "history"

    def rank_path(self, rank: int) -> Path:
        return self.path / f"rank{rank}.json"

    def begin(self, spec: CellSpec) -> None:
        """Start afresh: what an unfinished run left here is removed, a finished one's record goes to `history/`."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.record_path.exists():
            self.history_path.mkdir(exist_ok=True)
            number = len(list(self.history_path.iterdir())) + 1
            self.record_path.replace(self.history_path / f"{number:03}.json")
        for path in self.path.iterdir():
            if path != self.history_path:
                path.unlink()
        write_json(self.spec_path, spec)

    def read_spec(self) -> CellSpec:
        return from_json(CellSpec, json.loads(self.spec_path.read_text(encoding="utf-8")))

    def read_ranks(self) -> list[RankRecord]:
        """The ranks that have reported, in order."""
        paths = self.path.glob("rank*.json")
        ranks = [from_json(RankRecord, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        return sorted(ranks, key=lambda rank: rank.rank)

    def read_traces(self) -> dict[int, NvmlTrace]:
        """Device memory over time by rank, of the ranks that kept it; empty where their files are gone."""
        ranks = {rank.rank: rank.nvml for rank in self.read_ranks()}
        return {rank: nvml.trace for rank, nvml in ranks.items() if nvml is not None and nvml.trace is not None}

    def read_record(self) -> CellRecord | None:
        return read_record(self.record_path)


def read_record(path: Path) -> CellRecord | None:
    """None where there is no such file. Raises `StoreError` where it makes no sense."""
    try:
        return from_json(CellRecord, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{path} cannot be read ({reason}); delete it to measure the cell again") from error


Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and size in bytes: another record has another stamp."""
INDEXED_FROM = 200
"""Records from which one file is worth keeping beside them."""
STALE = 0.1
"""Part of the records that may be missing in the index before it is written again."""


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, tuple[Stamp, CellRecord]] = {}

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def table_path(self) -> Path:
        return self.path / "cells.csv"

    @property
    def index_path(self) -> Path:
        return self.path / ".index.jsonl"

    def cell(self, cell_id: str) -> CellDirectory:
        return CellDirectory(self.path / "cells" / cell_id)

    def lost_path(self, cell_id: str) -> Path:
        return self.path / "lost" / f"{cell_id}.json"

    def find(self, cell_id: str) -> CellRecord | None:
        """The record of a cell, wherever it could be stored; what is in `lost/` is the newer one."""
        return read_record(self.lost_path(cell_id)) or self.cell(cell_id).read_record()

    def records(self) -> list[CellRecord]:
        """Every finished cell: by series in the order of their first run, then by batch size."""
        found = [record for _, record in self._read().values()]
        first: dict[str, str] = {}
        for record in found:
            first[record.series_id] = min(record.started_at, first.get(record.series_id, record.started_at))
        return sorted(found, key=lambda r: (first[r.series_id], r.series_id, r.spec.batch_size, r.started_at))

    def _read(self) -> dict[str, tuple[Stamp, CellRecord]]:
        """Every record with its stamp. Only what changed since it was last seen is read from its own file."""
        stamps = self._stamps()
        if not self._known and len(stamps) >= INDEXED_FROM:
            self._known = self._read_index(stamps)
            missing = sum(self._known.get(name, (None,))[0] != stamp for name, stamp in stamps.items())
            stale = missing > STALE * len(stamps)
        else:
            stale = False
        known = {}
        for name, stamp in stamps.items():
            seen = self._known.get(name)
            if seen is not None and seen[0] == stamp:
                known[name] = seen
            elif (record := self.find(name)) is not None:
                known[name] = (stamp, record)
        self._known = known
        if stale:
            self._write_index()
        return known

    def _stamps(self) -> dict[str, Stamp]:
        stamps = {}
        with suppress(FileNotFoundError), os.scandir(self.path / "cells") as entries:
            for entry in entries:
                with suppress(FileNotFoundError, NotADirectoryError):
                    found = os.stat(os.path.join(entry.path, "record.json"))  # noqa: PTH116, PTH118  (thousands of them)
                    stamps[entry.name] = (found.st_mtime_ns, found.st_size)
        for path in self.path.glob("lost/*.json"):
            found = path.stat()
            stamps[path.stem] = (found.st_mtime_ns, found.st_size)
        return dict(sorted(stamps.items()))

    def _read_index(self, stamps: Mapping[str, Stamp]) -> dict[str, tuple[Stamp, CellRecord]]:
        """What the index knows of these records; nothing where it is missing or damaged, for it is only a cache."""
        found: dict[str, tuple[Stamp, CellRecord]] = {}
        with suppress(OSError, ValueError, TypeError, KeyError), self.index_path.open(encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                name, stamp = entry["cell"], (entry["modified_ns"], entry["size"])
                if stamps.get(name) == stamp:
                    found[name] = (stamp, from_json(CellRecord, entry["record"]))
        return found

    def _write_index(self) -> None:
        entries = (
            {"cell": name, "modified_ns": stamp[0], "size": stamp[1], "record": to_json(record)}
            for name, (stamp, record) in self._known.items()
        )
        with suppress(OSError):  # a folder that may only be read is read without one
            write_atomically(self.index_path, "".join(json.dumps(entry) + "\n" for entry in entries))

    def save(self, record: CellRecord) -> None:
        """In the cell's folder, else in `lost/`. Raises OSError where neither can be written."""
        try:
            write_json(self.cell(record.cell_id).record_path, record)
        except OSError:
            self.save_lost(record)
        else:
            self.lost_path(record.cell_id).unlink(missing_ok=True)

    def save_lost(self, record: CellRecord) -> None:
        """Beside the cell's folder, which stays as it is."""
        path = self.lost_path(record.cell_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)

    def write_table(self) -> None:
        """Rebuild `cells.csv` from the records."""
        rows = [row(record) for record in self.records()]
        if not rows:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.table_path, text.getvalue())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for writing; the lock goes with the process, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"another sweep is writing to {self.path}; wait for it or choose another sweep=NAME"
                ) from None
            yield


def row(record: CellRecord) -> dict[str, object]:
    """One line of `cells.csv`. Memory is the headline rank's, and its spread over the ranks."""
    spec, largest = record.spec, record.largest_rank
    reserved = [rank.reserved_peak_bytes for rank in record.ranks if rank.reserved_peak_bytes is not None]
    failure = record.failure
    return {
        "cell_id": record.cell_id,
        "series_id": record.series_id,
        "status": record.status.value,
        **spec.axes,
        "batch_size": spec.batch_size,
        "effective_batch_size": spec.effective_batch_size,
        "allocated_peak_bytes": largest.allocated_peak_bytes if largest else None,
        "active_peak_bytes": largest.active_peak_bytes if largest else None,
        "reserved_peak_bytes": largest.reserved_peak_bytes if largest else None,
        "reserved_peak_smallest_rank_bytes": min(reserved, default=None),
        "nvml_used_peak_bytes": largest.nvml_used_peak_bytes if largest else None,
        "capacity_bytes": largest.capacity_bytes if largest else None,
        "alloc_retries": largest.alloc_retries if largest else None,
        "timing": record.timing_kind.value,
        "seconds_per_iteration": record.seconds_per_iteration,
        "seconds_per_micro_batch": record.seconds_per_iteration / spec.accumulation
        if record.seconds_per_iteration
        else None,
        "tokens_per_second": record.tokens_per_second,
        "samples_per_second": record.samples_per_second,
        "estimated_seconds_per_iteration": record.estimate.seconds_per_iteration if record.estimate else None,
        "estimate_uncertainty": record.estimate.uncertainty if record.estimate else None,
        "estimate_model": record.estimate.model if record.estimate else None,
        "loss": largest.loss if largest else None,
        "failure_phase": failure.phase.value if failure and failure.phase else None,
        "failure_requested_bytes": failure.requested_bytes if failure else None,
        "reason": record.reason,
        "imported_from": record.imported_from,
        "duration_seconds": record.duration_seconds,
    }
