"""What a sweep found: `python -m sweep.report [results/NAME ...]`.

Prints a line per series and writes, beside the records, report.html (one page that needs no network: tables, charts
whose points tell their values, failures, environment, the command of every cell) and summary.md for a pull request.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sweep.page import page
from sweep.store import Store, StoreError, write_atomically
from sweep.summary import markdown, print_summary

__all__ = ["main", "markdown", "page", "print_summary"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep report", description="Print and write what a sweep found.")
    parser.add_argument("results", nargs="*", type=Path, help="folders of results; default: all of them")
    parser.add_argument("--no-html", action="store_true", help="only the table and summary.md")
    options = parser.parse_args(arguments)
    found, problems = 0, []
    for path in options.results or sorted(Path("results").glob("*")):
        store = Store(path.resolve())
        try:
            if records := store.records():
                found += 1
                print_summary(Console(), records, name=store.name)
                write_atomically(path / "summary.md", markdown(store.name, records))
                if not options.no_html:
                    write_atomically(path / "report.html", page(store.name, records))
                    print(f"{path / 'report.html'} shows all of it, with charts")
            elif options.results:
                problems.append(f"{path} holds no finished cell; `make sweep` makes some")
        except (StoreError, OSError) as error:
            problems.append(str(error))
    if not found and not problems:
        problems.append("there are no results under results/; `make sweep` makes some")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
