"""End a child when its parent ends, however the parent ended (prctl(2), PR_SET_PDEATHSIG; Linux only)."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Call first thing in the child; a child whose parent is already gone ends at once."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get("SWEEP_PARENT_PID")
    if os.getppid() == 1 and expected not in (None, "1"):
        os._exit(1)
