"""The process behind ``WarmServer``: imports, then forks a child for each line that it reads from its socket."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any


def import_all(names: list[str]) -> list[str]:
    """Imports what is installed of it and returns those names."""
    # is_available() would ask the CUDA runtime, and the answer would stay; NVML is asked anew each time.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return [name for name in names if _import_if_installed(name)]


def _import_if_installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False
    return True


def cuda_was_touched() -> bool:
    """Whether an import has made a CUDA call: the GPU would be decided, for all cells."""
    return bool(ctypes.CDLL(os.environ["VGPU_LIBRARY"]).vgpu_is_armed())


def _set_allocator(environment: dict[str, str]) -> None:
    """PyTorch has read its allocator's settings when it was imported: read them again."""
    torch: Any = sys.modules.get("torch")
    settings = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF")
    if torch is None or not settings:
        return
    older = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", older)
    if set_settings is not None:
        set_settings(settings)


def _run(arguments: list[str]) -> None:
    """What ``python ARGUMENTS`` would do."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _exit_code(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return (ending.code or 0) & 0xFF
    print(ending.code, file=sys.stderr)
    return 1


def be_the_cell(request: dict[str, Any]) -> None:
    """Turns the forked child into the cell and ends with the exit code that Python would have."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream, file in ((1, request["stdout"]), (2, request["stderr"])):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(opened, stream)
            os.close(opened)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _set_allocator(request["environment"])
        _run(request["arguments"])
        code = 0
    except SystemExit as ending:
        code = _exit_code(ending)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Server:
    """Reads requests, forks, and reports each child's pid and exit code."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.children: set[int] = set()
        self.waker, self.woken = socket.socketpair()
        self.woken.setblocking(False)
        self.waker.setblocking(False)

    def tell(self, **message: Any) -> None:
        """Sends one line."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def fork(self, request: dict[str, Any]) -> None:
        """Starts one cell."""
        try:
            pid = os.fork()
        except OSError as error:
            self.tell(number=request["number"], error=str(error))
            return
        if pid == 0:
            self.connection.close()
            be_the_cell(request)
        self.children.add(pid)
        self.tell(number=request["number"], pid=pid)

    def reap(self) -> None:
        """Reports the children that have ended."""
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self.children.discard(pid)
            self.tell(pid=pid, returncode=os.waitstatus_to_exitcode(status))

    def serve(self) -> None:
        """Serves until the other end closes; then ends what still runs."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(self.woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self.woken in ready:
                    self.reap()
                if self.connection in ready:
                    received = self.connection.recv(1 << 16)
                    if not received:
                        break
                    *lines, buffer = (buffer + received).split(b"\n")
                    for line in lines:
                        self.fork(json.loads(line))
        signal.set_wakeup_fd(-1)
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def end_with_parent() -> None:
    """The closed socket is noticed only after the imports: a parent that ends before must not leave us behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, prctl(2)


def main() -> None:
    """``python -m sweep.virtual.warm_process SOCKET MODULE...``."""
    end_with_parent()
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    os.set_inheritable(server.connection.fileno(), False)
    try:
        imported = import_all(sys.argv[2:])
    except Exception as error:
        server.tell(error=f"importing failed with {type(error).__name__}: {error}")
        raise
    if cuda_was_touched():
        server.tell(error="one of the imported libraries starts CUDA while it is imported")
        return
    gc.collect()
    gc.freeze()
    server.tell(ready=imported)
    server.serve()


if __name__ == "__main__":
    main()
