"""The console script: `sweep plots`, `sweep import` and the like; everything else is the Hydra application."""

import importlib
import sys

COMMANDS = {
    "models": "sweep.models",
    "plots": "sweep.plots",
    "report": "sweep.report",
    "import": "sweep.importing",
    "export": "sweep.exporting",
    "recommend": "sweep.recommend",
    "compare": "sweep.compare",
    "calibrate": "sweep.calibrate",
    "explain": "sweep.explain",
}


def main() -> None:
    command, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command in COMMANDS:
        sys.exit(importlib.import_module(COMMANDS[command]).main(rest))
    from sweep import run

    run.main()


if __name__ == "__main__":
    main()
