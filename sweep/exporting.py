"""A sweep for other tools: `sweep export results/NAME --to csv|parquet|jsonl|tensorboard|wandb [--out PATH]`.

The tables have one row per cell, with the columns of `cells.csv`. The loggers get one run per series, its batch sizes
as steps; they are extras that are installed on their own, and Weights & Biases stays offline unless told otherwise.
"""

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sweep import loggers
from sweep.loggers import LoggerError
from sweep.record import CellRecord
from sweep.store import Store, StoreError, row, write_atomically


def to_csv(records: Sequence[CellRecord], out: Path) -> None:
    rows = [row(record) for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(out, text.getvalue())


def to_jsonl(records: Sequence[CellRecord], out: Path) -> None:
    write_atomically(out, "".join(json.dumps(row(record)) + "\n" for record in records))


def to_parquet(records: Sequence[CellRecord], out: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    partial = out.with_name(f".{out.name}.partial")
    parquet.write_table(pyarrow.Table.from_pylist([row(record) for record in records]), partial)
    partial.replace(out)


FORMATS: dict[str, Callable[[Sequence[CellRecord], Path], None]] = {
    "csv": to_csv,
    "parquet": to_parquet,
    "jsonl": to_jsonl,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep export", description="Write a sweep for other tools.")
    parser.add_argument("results", type=Path, help="a folder of results")
    parser.add_argument("--to", required=True, choices=[*FORMATS, *loggers.LOGGERS])
    parser.add_argument("--out", type=Path, help="the file, or the folder of a logger; default: NAME.<format>, runs/")
    parser.add_argument("--online", action="store_true", help="let Weights & Biases upload; default: offline")
    options = parser.parse_args(arguments)
    store = Store(options.results.resolve())
    try:
        records = store.records()
        if not records:
            raise StoreError(f"{options.results} holds no finished cell; `make sweep` makes some")
        if options.to in FORMATS:
            out = options.out or Path(f"{store.name}.{options.to}")
            FORMATS[options.to](records, out)
        else:
            out = options.out or Path("runs")
            loggers.LOGGERS[options.to](store.name, records, out, options.online)
    except (StoreError, LoggerError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    print(f"{out}: {len(records)} cells as {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
