"""A fork server: a process that has the libraries imported and CUDA untouched, and forks one cell after another.

A cell then starts in milliseconds instead of the seconds that importing torch, transformers and deepspeed takes. Which
GPU it has, which world it is in and how PyTorch's allocator is set are decided at each spawn.

>>> with WarmServer() as server:
...     env = {**os.environ, **environment(gpu("a100-80gb"), world_size=8)}
...     cell = server.spawn(["-m", "sweep.worker", "cell.json"], environment=env, stdout=out, stderr=err)
...     code = cell.wait(timeout=600)
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweep.virtual.environment import library_variables
from sweep.virtual.errors import VirtualGpuError

DEFAULT_MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers.trainer",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "accelerate",
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""What the server imports: what a training process imports at once, and what it would import at its first step. One
that is not installed is left out."""

_START_SECONDS = 120.0


class WarmCell:
    """One forked cell; it has the part of ``subprocess.Popen`` that watching a process needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def _end(self, returncode: int) -> None:
        self.returncode = returncode
        self._ended.set()

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while the cell runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code; ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"warm cell {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signals the cell and all it started: a cell is a session and a process group of its own."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Asks the cell to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the cell."""
        self.send_signal(signal.SIGKILL)


class WarmServer:
    """The server, as a context manager; leaving it ends the server and the cells that still run.

    ``environment`` is what the server itself starts with: variables that a library reads when it is imported
    (``HF_HOME``, ``OMP_NUM_THREADS``) have to be in it, for a cell cannot change them any more.
    """

    def __init__(
        self, *, modules: Sequence[str] = DEFAULT_MODULES, environment: Mapping[str, str] | None = None
    ) -> None:
        self._modules = tuple(modules)
        self._environment = dict(os.environ if environment is None else environment)
        self._cells: dict[int, WarmCell] = {}
        self._replies: dict[int, int | str] = {}
        self._changed = threading.Condition()
        self._requests = 0
        self._closed = False
        self._listener: threading.Thread | None = None
        self.warm_modules: tuple[str, ...] = ()

    def __enter__(self) -> "WarmServer":
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "sweep.virtual.warm_process", str(theirs.fileno()), *self._modules]
            root = str(Path(__file__).resolve().parents[2])
            variables = self._environment | library_variables(self._environment)
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), root)))
            self._process = subprocess.Popen(
                command, env=variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._socket = ours
        self._lines = ours.makefile("r", encoding="utf-8")
        ours.settimeout(_START_SECONDS)
        try:
            ready = json.loads(self._lines.readline() or "{}")
        except (TimeoutError, ValueError):
            ready = {}
        if "ready" not in ready:
            self.__exit__()
            reason = ready.get("error", "its own output says why")
            raise VirtualGpuError(f"The warm server did not start; run the cells without it: {reason}.")
        self.warm_modules = tuple(ready["ready"])
        ours.settimeout(None)
        self._listener = threading.Thread(target=self._listen, name="warm-server", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._listener is not None:
            self._listener.join()
        self._lines.close()
        self._socket.close()

    def spawn(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path | None = None,
        cwd: Path | None = None,
    ) -> WarmCell:
        """Forks a cell that runs ``python ARGUMENTS``: ``["-m", module, ...]`` or ``[script, ...]``.

        ``environment`` is the cell's whole environment, like ``env`` of ``subprocess.Popen``. Without ``stderr``, both
        streams go to ``stdout``. Files are appended to.
        """
        allocator = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        if "backend" in allocator and "cudaMallocAsync" in allocator:
            raise VirtualGpuError(
                "PyTorch chooses its allocator backend when it is imported; start a cudaMallocAsync cell cold."
            )
        with self._changed:
            self._requests += 1
            number = self._requests
        message: dict[str, Any] = {
            "number": number,
            "arguments": list(arguments),
            "environment": dict(environment),
            "stdout": str(stdout),
            "stderr": str(stderr or stdout),
            "cwd": str(cwd or Path.cwd()),
        }
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise VirtualGpuError("The warm server has ended; start the cells cold or start another one.") from error
        with self._changed:
            self._changed.wait_for(lambda: number in self._replies or self._closed)
            reply = self._replies.pop(number, "it ended")
        if isinstance(reply, str):
            raise VirtualGpuError(f"The warm server could not start the cell; start it cold: {reply}.")
        return self._cells[reply]

    def _listen(self) -> None:
        for line in self._lines:
            message = json.loads(line)
            with self._changed:
                if "returncode" in message:
                    self._cells.pop(message["pid"])._end(message["returncode"])
                    continue
                if "pid" in message:
                    self._cells[message["pid"]] = WarmCell(message["pid"])
                self._replies[message["number"]] = message.get("pid", message.get("error", "no reason given"))
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            for cell in self._cells.values():
                cell._end(-signal.SIGKILL)
            self._changed.notify_all()
