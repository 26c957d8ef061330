"""The console script: `sweep plots`, `sweep report`; everything else is the Hydra application, `sweep model=...`."""

import sys


def main() -> None:
    command, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "plots":
        from sweep import plots

        sys.exit(plots.main(rest))
    if command == "report":
        from sweep import report

        sys.exit(report.main(rest))
    from sweep import run

    run.main()
