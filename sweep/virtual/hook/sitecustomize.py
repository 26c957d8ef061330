"""Runs at the start of a Python process that has a virtual GPU; Python imports it by its name.

It forms the process group without the other ranks. It imports nothing of PyTorch itself: it waits until the process
imports ``torch.distributed``.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)


class _AfterImport:
    """A finder that lets the others find one module and calls a function after it was executed."""

    def __init__(self, module, function):
        self.module, self.function = module, function

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.function(module)

        spec.loader.exec_module = exec_module
        return spec


def _tell_group_size(color, ranks):
    """NCCL's split call names a colour only; the library needs to know how many ranks share it."""
    import ctypes

    ctypes.CDLL(os.environ["VGPU_LIBRARY"]).vgpu_group_size(color, ranks)


def _form_world_alone(c10d):
    """Makes this process rank 0 of a world in which no other process exists."""
    world_size = int(os.environ.get("VGPU_WORLD_SIZE") or 0)
    if not world_size:
        return
    from torch._C import _distributed_c10d as native

    init_process_group = c10d.init_process_group

    def init_alone(backend=None, init_method=None, timeout=None, *args, **kwargs):
        for name in ("world_size", "rank", "store"):
            kwargs.pop(name, None)
        arguments = {} if timeout is None else {"timeout": timeout}
        return init_process_group(
            backend, rank=0, world_size=world_size, store=native.HashStore(), **arguments, **kwargs
        )

    c10d.init_process_group = init_alone
    _replace_gloo(c10d, native)
    color_of = getattr(c10d, "_process_group_color", None)
    if color_of is not None:

        def color_and_size(ranks):
            color = color_of(ranks)
            _tell_group_size(color, len(ranks))
            return color

        c10d._process_group_color = color_and_size


def _replace_gloo(c10d, native):
    """Gloo would wait for the other ranks: PyTorch's fake group, which echoes, or a group of one in its place."""
    create = getattr(getattr(native, "FakeProcessGroup", None), "_create_internal", None)
    real_gloo = c10d.ProcessGroupGloo

    class AloneGloo:
        def __new__(cls, store, rank, size, **kwargs):
            return create(rank, size) if create else real_gloo(store, 0, 1, **kwargs)

    c10d.ProcessGroupGloo = AloneGloo
    if create and hasattr(c10d, "_create_gloo_process_group"):
        c10d._create_gloo_process_group = lambda options, _: create(options.group_rank, options.group_size)


def _run_shadowed_sitecustomize():
    """Python runs only the first ``sitecustomize`` on its path: run the one that this file hides, if any."""
    elsewhere = [entry for entry in sys.path if entry and str(Path(entry).resolve()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _AfterImport("torch.distributed.distributed_c10d", _form_world_alone))
_run_shadowed_sitecustomize()
