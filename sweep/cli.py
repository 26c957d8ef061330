"""The console script: `sweep plots`, `sweep import` and the like; everything else is the Hydra application."""

import importlib
import sys

from sweep.help import COMMANDS, short_help


def main() -> None:
    command, *rest = sys.argv[1:] or [""]
    if not command:
        print(short_help())
        return
    if command in COMMANDS:
        module, _ = COMMANDS[command]
        sys.exit(importlib.import_module(module).main(rest))
    from sweep import run

    run.main()


if __name__ == "__main__":
    main()
