"""`python -m sweep.worker CELL_DIRECTORY`: what one rank of a cell runs, started by the launcher.

RANK, LOCAL_RANK and WORLD_SIZE come from torch.distributed.run, or from the virtual GPU, which plays rank 0 alone.
The rank's record is written whatever happens short of a SIGKILL; the exit code repeats it for the launcher.
"""

import os
import sys
import traceback
from pathlib import Path

from sweep.launch.lifeline import die_with_parent
from sweep.store import CellDirectory, write_json
from sweep.worker import EXIT_FAILED, EXIT_OOM


def main() -> int:
    die_with_parent()
    directory = CellDirectory(Path(sys.argv[1]))
    spec = directory.read_spec()
    from sweep.worker.train import (
        run_rank,
    )  # imports torch: after the directory and the spec are known to be good

    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    record, *further = run_rank(spec, rank, local_rank, directory.path)
    for each in (*further, record):  # the first tells of a failure: nobody ends the process before all are written
        write_json(directory.rank_path(each.rank), each)
    return 0 if record.failure is None else EXIT_OOM if record.oom or record.host_oom else EXIT_FAILED


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips destructors: after a failure they would wait for ranks that will never answer.
    os._exit(code)
