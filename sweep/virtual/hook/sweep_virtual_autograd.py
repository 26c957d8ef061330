"""Lets every backward pass be over when it returns.

PyTorch's thread for a device drops the last of a backward pass while the caller goes on. Which of the caller's
allocations still find that memory taken is a race, on a real GPU as well: peaks would differ from run to run.
"""

import functools
from typing import Any


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
        return result

    setattr(torch.autograd, name, start_and_finish)


def _empty_graph(torch: Any, device: int) -> tuple[Any, Any, Any]:
    """A graph of tensors without elements: it takes the device's thread, and no memory."""
    with torch.enable_grad():
        leaf = torch.empty(0, device=f"cuda:{device}", requires_grad=True)
        return leaf.view(0), leaf, torch.empty(0, device=f"cuda:{device}")
