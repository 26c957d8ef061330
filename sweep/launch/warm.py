"""Warm starts for the virtual device: one fork server per sweep, started when the first cell needs it.

A cell then costs what it does and not what importing torch, transformers and DeepSpeed does. Where the server cannot
start, cells start cold and give the same numbers.
"""

import atexit
import functools
import os
from collections.abc import Mapping

from sweep.launch.commands import worker_arguments
from sweep.launch.process import Child
from sweep.store import CellDirectory
from sweep.virtual import VirtualGpuError
from sweep.virtual.warm import WarmServer

FIXED_AT_IMPORT = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "DS_ACCELERATOR")


@functools.cache
def _server(fixed: tuple[tuple[str, str], ...]) -> WarmServer | None:
    server = WarmServer(environment=os.environ | dict(fixed))
    try:
        server.__enter__()
    except VirtualGpuError:
        return None
    atexit.register(server.__exit__)
    return server


def spawn_warm(directory: CellDirectory, variables: Mapping[str, str]) -> Child | None:
    """Start a cell's only process from the warm server; None where it has to start cold."""
    server = _server(tuple((name, variables[name]) for name in FIXED_AT_IMPORT if name in variables))
    if server is None:
        return None
    try:
        return server.spawn(
            worker_arguments(directory.path.resolve()),
            environment=variables,
            stdout=directory.stdout_path.resolve(),
            stderr=directory.stderr_path.resolve(),
        )
    except VirtualGpuError:
        return None
