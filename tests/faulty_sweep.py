"""`python faulty_sweep.py OVERRIDES...`: a whole sweep whose workers are cheap fakes that fail at random.

The fault of a cell is drawn from its seed. Everything else is the product: Hydra, sweeper, launcher, store.
"""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FAULTS = ("none", "kill", "exit", "hang", "garbage", "truncated", "full disk", "orphan", "full results", "no folder")


def fault_of(seed: int) -> str:
    return random.Random(seed).choice(FAULTS)


def work(folder: Path) -> int:
    """What a rank does here instead of training."""
    spec = json.loads((folder / "spec.json").read_text())
    fault, record = fault_of(spec["seed"]), folder / "rank0.json"
    time.sleep(float(os.environ.get("FAKE_WORK_SECONDS", "0")))
    good = {"rank": 0, "device_name": "CPU", "capacity_bytes": 1}
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exit":
        return 1
    elif fault == "hang":
        time.sleep(600)
    elif fault == "garbage":
        record.write_bytes(bytes(random.Random(spec["seed"]).randrange(256) for _ in range(200)))
        return 0
    elif fault == "truncated":
        record.write_text(json.dumps(good)[:20])
        return 0
    elif fault == "full disk":
        with Path("/dev/full").open("w") as file:
            file.write(json.dumps(good))
    elif fault == "orphan":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    record.write_text(json.dumps(good))
    return 0


def sweep() -> None:
    from sweep import launch, store
    from sweep.launch import stall
    from sweep.record import CellRecord
    from sweep.run import main
    from sweep.spec import CellSpec
    from sweep.store import CellDirectory

    begin, write = CellDirectory.begin, store.write_json

    def faulty_begin(self: CellDirectory, spec: CellSpec) -> None:
        if fault_of(spec.seed) == "no folder":
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("a file where the folder should be")
        begin(self, spec)

    def faulty_write(path: Path, value: Any) -> None:
        everything = os.environ.get("FULL_FROM_SEED", "1000000")
        if isinstance(value, CellRecord) and (
            value.spec.seed >= int(everything)
            or (path.name == "record.json" and fault_of(value.spec.seed) == "full results")
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, value)

    def fake_command(_spec: CellSpec, directory: Path) -> list[str]:
        return [sys.executable, __file__, "--work", str(directory)]

    patched: list[tuple[Any, str, Any]] = [
        (CellDirectory, "begin", faulty_begin),
        (store, "write_json", faulty_write),
        (launch, "command", fake_command),
        (stall, "START_SECONDS", 4.0),
    ]
    for owner, name, value in patched:
        setattr(owner, name, value)
    main()


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        sys.exit(work(Path(sys.argv[2])))
    sweep()
