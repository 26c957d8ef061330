"""Runs at the start of every Python process that has a virtual GPU; Python imports it by its name.

It imports nothing of PyTorch itself: it waits until the process imports ``torch.distributed``.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = str(Path(__file__).resolve().parent)


class _AfterImport:
    """A finder that lets the others find one module and calls a function after it was executed."""

    def __init__(self, module: str, function: Callable[[ModuleType], None]) -> None:
        self.module, self.function = module, function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.function(module)

        loader.exec_module = exec_module
        return spec


def _form_world_alone(c10d: ModuleType) -> None:
    sys.path.append(_HERE)
    importlib.import_module("sweep_virtual_world").form_world_alone(c10d)


def _run_shadowed_sitecustomize() -> None:
    """Python runs only the first ``sitecustomize`` on its path: run the one that this file hides, if any."""
    elsewhere = [entry for entry in sys.path if entry and str(Path(entry).resolve()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _AfterImport("torch.distributed.distributed_c10d", _form_world_alone))
_run_shadowed_sitecustomize()
