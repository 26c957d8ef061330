"""Lets a process be rank 0 of a world in which no other process exists.

The world's size, ``VGPU_WORLD_SIZE``, is looked up at each call: a forked child may be of another world than its
parent.
"""

import ctypes
import functools
import os
import sys
from typing import Any


def _world_size() -> int:
    """The size of the world that this process is alone in; 0 if it is an ordinary process."""
    return int(os.environ.get("VGPU_WORLD_SIZE") or 0)


def form_world_alone(c10d: Any) -> None:
    """Changes ``torch.distributed.distributed_c10d``, right after its import, so that it waits for no other rank."""
    from torch._C import _distributed_c10d as native

    _wrap_init_process_group(c10d, native)
    _wrap_destroy_process_group(c10d)
    _wrap_monitored_barrier(c10d)
    _wrap_color(c10d)
    _replace_gloo(c10d, native)


def _wrap_init_process_group(c10d: Any, native: Any) -> None:
    init_process_group = c10d.init_process_group

    @functools.wraps(init_process_group)
    def init_alone(backend: Any = None, init_method: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _world_size():
            return init_process_group(backend, init_method, timeout, *args, **kwargs)
        kwargs |= {"rank": 0, "world_size": _world_size(), "store": native.HashStore()}
        if timeout is not None:
            kwargs["timeout"] = timeout
        return init_process_group(backend, **kwargs)

    c10d.init_process_group = init_alone


def _wrap_destroy_process_group(c10d: Any) -> None:
    """PyTorch waits there for work that is under way, but without asking the device to finish it."""
    destroy_process_group = c10d.destroy_process_group

    @functools.wraps(destroy_process_group)
    def finish_and_destroy(*args: Any, **kwargs: Any) -> Any:
        torch: Any = sys.modules["torch"]
        if _world_size() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return destroy_process_group(*args, **kwargs)

    c10d.destroy_process_group = finish_and_destroy


def _wrap_monitored_barrier(c10d: Any) -> None:
    monitored_barrier = c10d.monitored_barrier

    @functools.wraps(monitored_barrier)
    def pass_barrier(*args: Any, **kwargs: Any) -> Any:
        return None if _world_size() else monitored_barrier(*args, **kwargs)

    c10d.monitored_barrier = pass_barrier


def _wrap_color(c10d: Any) -> None:
    """NCCL's split call names a colour only; the library needs to know how many ranks share it."""
    color_of = getattr(c10d, "_process_group_color", None)
    if color_of is None:
        return

    def color_and_size(ranks: list[int]) -> int:
        color: int = color_of(ranks)
        ctypes.CDLL(os.environ["VGPU_LIBRARY"]).vgpu_group_size(color, len(ranks))
        return color

    c10d._process_group_color = color_and_size


def _replace_gloo(c10d: Any, native: Any) -> None:
    """Gloo would wait for the other ranks: PyTorch's fake group, which echoes, or a group of one in its place."""
    fake = getattr(getattr(native, "FakeProcessGroup", None), "_create_internal", None)
    real_gloo: Any = c10d.ProcessGroupGloo
    real_create = getattr(c10d, "_create_gloo_process_group", None)

    class AloneGloo(real_gloo):  # type: ignore[misc]
        def __new__(cls, store: Any, rank: int, size: int, **kwargs: Any) -> Any:
            if _world_size() < 2:
                return real_gloo(store, rank, size, **kwargs)
            return fake(rank, size) if fake else real_gloo(store, 0, 1, **kwargs)

    def create(options: Any, backend_options: Any) -> Any:
        if _world_size() < 2 or fake is None:
            return real_create(options, backend_options) if real_create else None
        return fake(options.group_rank, options.group_size)

    c10d.ProcessGroupGloo = AloneGloo
    if real_create is not None:
        c10d._create_gloo_process_group = create
