"""What the tensors belong to that exist before an iteration begins, by the address of their storage."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sweep.explanation import Category

SEARCHED = ("deepspeed.", "torch.distributed.", "torch.optim.", "torch.amp.", "accelerate.", "sweep.worker.", "peft.")
"""Objects of these libraries are searched for tensors; what is theirs is named by the attribute that holds it."""
# DeepSpeed's own names, in the order in which they decide; `bit16` and `lp` are its words for the working precision.
HINTS = (
    ("moment", Category.OPTIMIZER_STATES),
    ("exp_avg", Category.OPTIMIZER_STATES),
    ("bucket", Category.COMMUNICATION),
    ("grad", Category.GRADIENTS),
    ("buffer", Category.COMMUNICATION),
    ("fp32", Category.MASTER_WEIGHTS),
    ("master", Category.MASTER_WEIGHTS),
    ("fp16", Category.PARAMETERS),
    ("bit16", Category.PARAMETERS),
    ("param", Category.PARAMETERS),
)


@dataclass(frozen=True, slots=True)
class Owner:
    category: Category
    name: str
    shape: tuple[int, ...]
    dtype: str
    certain: bool = False
    """It says what the block is for, whatever the code that allocated it does otherwise."""


def owner(category: Category, name: str, tensor: torch.Tensor) -> Owner:
    return Owner(category, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor that is on this device."""
    return getattr(tensor, "_local_tensor", tensor)


def address(tensor: torch.Tensor) -> int:
    """Of a tensor's storage on a GPU; 0 where it has none."""
    tensor = local(tensor)
    if not tensor.is_cuda or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # wrappers without a storage of their own
        return 0


def find_owners(model: nn.Module, optimizer: torch.optim.Optimizer, roots: Iterable[object]) -> dict[int, Owner]:
    """Every storage that is in Python's reach. The first that claims one has it."""
    found: dict[int, Owner] = {}
    parts: Counter[int] = Counter()

    def claim(category: Category, name: str, tensor: object) -> None:
        if isinstance(tensor, torch.Tensor) and (where := address(tensor)):
            parts[where] += category is Category.PARAMETERS
            found.setdefault(where, owner(category, name, local(tensor)))

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        shard = getattr(parameter, "ds_tensor", None)
        claim(Category.PARAMETERS, name, shard)
        claim(Category.PARAMETERS if shard is None else Category.GATHERED_PARAMETERS, name, parameter)
        claim(Category.GRADIENTS, name, parameter.grad)
    for where, one in found.items():
        if parts[where] > 1:
            found[where] = replace(one, name=f"{parts[where]} parameters in one flat tensor", shape=())
    for name, buffer in model.named_buffers():
        claim(Category.PARAMETERS, name, buffer)
    for stepped, state in optimizer.state.items():
        for key, value in state.items():
            name = names.get(id(stepped), "*")
            claim(Category.OPTIMIZER_STATES, f"{name} {key}", value)
    for group in optimizer.param_groups:
        for master in group["params"]:
            claim(Category.MASTER_WEIGHTS, names.get(id(master), "param_groups"), master)
            claim(Category.GRADIENTS, "param_groups", master.grad)
    for path, tensor in walk(roots):
        claim(_hinted(path), path, tensor)
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, nn.Parameter):
            claim(Category.UNATTRIBUTED, "held in Python", one)
    return found


def bucket_sizes() -> tuple[int, ...]:
    """In bytes, of the buckets of DistributedDataParallel, which nothing in Python holds."""
    models = [one for one in gc.get_objects() if type(one) is DistributedDataParallel]
    data: list[Any] = [model._get_ddp_logging_data() for model in models]  # type: ignore[no-untyped-call]
    texts = [one.get("rebuilt_bucket_sizes") or one.get("bucket_sizes") or "" for one in data]
    return tuple(int(size) for text in texts for size in str(text).split(",") if size.strip())


def _hinted(path: str) -> Category:
    last = path.lower()
    return next((category for hint, category in HINTS if hint in last), Category.UNATTRIBUTED)


def walk(roots: Iterable[object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are held by these objects and by what those hold, breadth first, with the attributes on the way."""
    seen: set[int] = set()
    queue: list[tuple[str, Any]] = [("", root) for root in roots]
    for path, one in queue:
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield path, one
        for name, child in _children(one):
            queue.append((f"{path}.{name}".strip("."), child))


def _children(one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, Mapping):
        yield from (("*" if not isinstance(key, str) else key, value) for key, value in list(one.items()))
    elif isinstance(one, list | tuple | set | frozenset):
        yield from (("*", value) for value in list(one))
    elif isinstance(one, nn.Module | torch.Tensor) or type(one).__module__.startswith(SEARCHED):
        yield from list(getattr(one, "__dict__", {}).items())
