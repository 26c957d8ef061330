"""Runs at the start of every Python process that has a virtual GPU; Python imports it by its name.

It imports nothing of PyTorch itself: it waits until the process does.
"""

import atexit
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = str(Path(__file__).resolve().parent)


class _AroundImport:
    """A finder that lets the others find one module and calls a function before or after it is executed."""

    def __init__(
        self,
        module: str,
        *,
        before: Callable[[importlib.machinery.ModuleSpec], None] | None = None,
        after: Callable[[ModuleType], None] | None = None,
    ) -> None:
        self.module, self.before, self.after = module, before, after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        if self.before is not None:
            self.before(spec)
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self.after is not None:
                self.after(module)

        loader.exec_module = exec_module
        return spec


def _check_preload(spec: importlib.machinery.ModuleSpec) -> None:
    """Without the library PyTorch would find no GPU and many a script would quietly train on the CPU."""
    library = os.environ["VGPU_LIBRARY"]
    if library not in Path("/proc/self/maps").read_text(encoding="utf-8"):
        raise ImportError(
            f"The virtual GPU is not in effect: {library} was not preloaded; start this process with the LD_PRELOAD "
            "that it was given, and without set-user-id programs in between."
        )
    folder = Path(spec.origin or "").parent
    if folder.resolve() != Path(os.environ["VGPU_TORCH_FOLDER"]).resolve():  # one environment may have two paths
        raise ImportError(
            f"The virtual GPU was built for the PyTorch in {os.environ['VGPU_TORCH_FOLDER']}, and this is {folder}; "
            f"start it with this interpreter: {sys.executable} -m sweep.virtual run ..."
        )


def _our_module(name: str) -> Any:
    if _HERE not in sys.path:
        sys.path.append(_HERE)
    return importlib.import_module(name)


def _run_shadowed_sitecustomize() -> None:
    """Python runs only the first ``sitecustomize`` on its path: run the one that this file hides, if any."""
    elsewhere = [entry for entry in sys.path if entry and str(Path(entry).resolve()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _let_autograd_finish() -> None:
    """A backward pass is over before its thread has dropped the graph, for which the thread wants the interpreter.

    A script that ends right after it would abort in that thread ("terminate called without an active exception").
    With a real GPU, reading a loss or a synchronisation gives the thread that moment.
    """
    if "torch" in sys.modules:
        time.sleep(0.05)


def _start() -> None:
    atexit.register(_let_autograd_finish)
    finders = [
        _AroundImport(
            "torch",
            before=_check_preload,
            after=lambda module: _our_module("sweep_virtual_autograd").finish_backward_passes(module),
        ),
        _AroundImport(
            "torch.nn.parallel.distributed",
            after=lambda module: _our_module("sweep_virtual_autograd").watch_data_parallel(module),
        ),
        _AroundImport(
            "torch.distributed.distributed_c10d",
            after=lambda module: _our_module("sweep_virtual_world").form_world_alone(module),
        ),
    ]
    if os.environ.get("VGPU_REPORT_FOLDER"):
        _our_module("sweep_virtual_report").report_at_exit()
        finders.append(
            _AroundImport(
                "torch.cuda.memory",
                after=lambda module: _our_module("sweep_virtual_report").collect_before_resets(module),
            )
        )
    sys.meta_path[:0] = finders


if os.environ.get("VGPU_LIBRARY"):
    _start()
_run_shadowed_sitecustomize()
