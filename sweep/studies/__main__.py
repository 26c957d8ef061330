"""`python -m sweep.studies`: write docs/<experiment>.md and its charts from docs/records/ alone.

`--take results` first takes there what that folder has of the experiments: one file a cell, without logs.
"""

import argparse
import shutil
from pathlib import Path

from sweep.store import RESULTS, Store
from sweep.studies import QUESTIONS
from sweep.studies.pages import write


def take(results: Path, records: Path) -> None:
    """Replace the records of every experiment's sweep that has new ones."""
    for folder in sorted(path for name in QUESTIONS for path in results.glob(f"{name}-*")):
        if found := Store(folder).records():
            shutil.rmtree(records / folder.name, ignore_errors=True)
            for record in found:
                cell = Store(records / folder.name).cell(record.cell_id)
                cell.path.mkdir(parents=True)
                shutil.copy(Store(folder).cell(record.cell_id).record_path, cell.record_path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sweep.studies", description="Write the pages of the studies.")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the pages and records/ are")
    parser.add_argument("--take", type=Path, metavar="RESULTS", help=f"first take new records, from {RESULTS}/ usually")
    options = parser.parse_args()
    if options.take:
        take(options.take, options.docs / "records")
    for path in write(options.docs / "records", options.docs):
        print(path)


main()
