"""`python -m sweep.launch.elastic ...`: torch.distributed.run that ends with the process that started it.

How each rank ended is left in `ended.json`, because a rank that was killed cannot tell.
"""

import json
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from sweep.launch.lifeline import die_with_parent
from sweep.launch.progress import ended_path


def main() -> int:
    arguments = parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # The agent ends the others with SIGTERM: they come last, whatever the clock says.
        order = lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp)  # noqa: E731
        failures = sorted(error.failures.items(), key=order)
        path = ended_path(Path(arguments.training_script_args[-1]))
        path.write_text(json.dumps({rank: failure.exitcode for rank, failure in failures}), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
