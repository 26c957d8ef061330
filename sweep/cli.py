"""The console script: `sweep plots`, `sweep report`; everything else is the Hydra application, `sweep model=...`."""

import sys


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "plots":
        from sweep.plots import main as run
    elif command == "report":
        from sweep.report import main as run
    else:
        from sweep.run import main as run
    if command in ("plots", "report"):
        del sys.argv[1]
    run()
