"""`python -m sweep.studies`: write docs/<experiment>.md and its charts from docs/records/ alone.

`--take results` first takes there what that folder has of the experiments: one file a cell, without logs.
"""

import argparse
from pathlib import Path

from sweep.store import RESULTS
from sweep.studies.pages import take, write


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
