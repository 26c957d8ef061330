"""Lets every backward pass be over when it returns.

PyTorch's thread for a device drops the last of a backward pass while the caller goes on. Which of the caller's
allocations still find that memory taken is a race, on a real GPU as well: peaks would differ from run to run.
"""

import functools
import sys
from typing import Any

PASSES_AFTER_DDP = 16
"""Backward passes within which DistributedDataParallel has rebuilt its buckets, also under gradient accumulation."""
_watched = 0


def watch_data_parallel(distributed: Any) -> None:
    """DistributedDataParallel replaces its buckets once. NCCL's watchdog still refers to the old ones, until it looks,
    every 100 ms of real time: an iteration takes longer than that on a real GPU, and less on this one."""
    start = distributed.DistributedDataParallel.__init__

    @functools.wraps(start)
    def start_watched(*args: Any, **kwargs: Any) -> None:
        global _watched
        _watched = PASSES_AFTER_DDP
        start(*args, **kwargs)

    distributed.DistributedDataParallel.__init__ = start_watched


def _let_watchdog_look(torch: Any) -> None:
    global _watched
    if not _watched:
        return
    _watched -= 1
    torch.cuda.synchronize()
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    for group in c10d._world.pg_map:
        if "cuda" in str(group._device_types):
            wait = getattr(group._get_backend(torch.device("cuda")), "_wait_for_pending_works", None)
            if wait is not None:  # of NCCL
                wait()


def finish_backward_passes(torch: Any) -> None:
    """Wraps what starts a backward pass, once PyTorch is imported."""
    for name in ("backward", "grad"):
        _wrap(torch, name)


def _wrap(torch: Any, name: str) -> None:
    start = getattr(torch.autograd, name)
    empty = functools.cache(lambda device: _empty_graph(torch, device))
    grad = torch.autograd.grad if name == "backward" else start

    @functools.wraps(start)
    def start_and_finish(*args: Any, **kwargs: Any) -> Any:
        result = start(*args, **kwargs)
        # Not within another backward pass: reentrant checkpointing starts one in the device's own thread.
        if torch._C._current_graph_task_id() == -1 and torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                if torch._C._cuda_hasPrimaryContext(device):
                    out, leaf, seed = empty(device)
                    # The thread takes this one up only when it is done with the last one.
                    grad(out, leaf, grad_outputs=seed, retain_graph=True)
            _let_watchdog_look(torch)
        return result

    setattr(torch.autograd, name, start_and_finish)


def _empty_graph(torch: Any, device: int) -> tuple[Any, Any, Any]:
    """A graph of tensors without elements: it takes the device's thread, and no memory."""
    with torch.enable_grad():
        leaf = torch.empty(0, device=f"cuda:{device}", requires_grad=True)
        return leaf.view(0), leaf, torch.empty(0, device=f"cuda:{device}")
