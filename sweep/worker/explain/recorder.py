"""Watches one iteration: which operator, in which module, made which block.

A dispatch mode sees every operator and numbers it. The number goes into the metadata of PyTorch's memory history, so
that each allocation names its operator; what is known of a tensor is attached to its block as an annotation. In a
backward pass hooks of the graph's nodes do that: under a dispatch mode autograd would add gradients out of place
(`can_accumulate_inplace`, input_buffer.cpp) and hold more than it does. Nothing here holds a tensor or allocates.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sweep.explanation import Category
from sweep.record import Phase
from sweep.worker.explain.owners import Owner, address, local, owner
from sweep.worker.explain.replay import MARK

bindings: Any = torch._C
SCOPE_END = "scope"
RELEASED = "released"
SHAPE_ONLY = Category.TEMPORARIES
"""Of labels that say what a gradient looks like, and not what it is for."""


@dataclass(slots=True)
class Step:
    """One operator, or one node of a backward pass."""

    name: str
    """Empty for a node of a backward pass, which may be several operators."""
    module: str
    node: str
    """The autograd node; empty elsewhere."""
    scope: int
    """The number of the recomputation that it is part of; 0 for none."""
    weight: str
    """The parameter that autocast casts here; empty for any other operator."""
    outputs: list[tuple[int, tuple[int, ...], str]]
    """Storage, shape, dtype."""
    wide: bool
    """Whether a tensor as wide as the vocabulary goes in."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module, owners: dict[int, Owner], marks_address: int, vocabulary: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.labels: list[Owner] = []
        self.kv_cache_bytes = 0
        self._model = model
        self._owners = owners
        self._marks_address = marks_address
        self._vocabulary = vocabulary
        self._paths = {module: path for path, module in model.named_modules()}
        self._weights = {where: o.name for where, o in owners.items() if o.category is Category.PARAMETERS}
        self._modules_of_nodes: dict[int, str] = {}
        self._local = threading.local()
        self._scopes = 0
        self._phase: Phase | None = None
        self._micro_batch = -1
        self._gathered: dict[int, int] = {}

    def enter(self, phase: Phase) -> None:
        if phase is Phase.FORWARD and self._phase is not Phase.FORWARD:
            self._micro_batch += 1
        if phase is not self._phase:
            self._phase = phase
            self._mark(f"{phase.value} {self._micro_batch}")
            if phase is Phase.OPTIMIZER:
                self._note_shards()

    def _note_shards(self) -> None:
        """FSDP2's gradients are what its communication has written into."""
        for name, parameter in self._model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and local(gradient) is not gradient:
                self.label(Category.GRADIENTS, name, gradient, certain=True)

    def _mark(self, text: str) -> None:
        bindings._cuda_annotateMemory(self._marks_address, MARK + text)

    def label(self, category: Category, name: str, tensor: torch.Tensor, *, certain: bool = False) -> None:
        where = address(tensor)
        if where:
            self.labels.append(replace(owner(category, name, local(tensor)), certain=certain))
            with suppress(RuntimeError):  # memory that is not the caching allocator's own
                bindings._cuda_annotateMemory(where, str(len(self.labels) - 1))

    @property
    def _stack(self) -> list[nn.Module]:
        stack: list[nn.Module] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    @property
    def module(self) -> str:
        stack = self._stack
        return self._paths[stack[-1]] if stack else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_wrapper, types)):
            return NotImplemented  # a distributed tensor: its parts come by
        step = self._begin(func, args)
        self.steps.append(step)
        bindings._cuda_setMemoryMetadata(str(len(self.steps) - 1))
        out = func(*args, **(kwargs or {}))
        bindings._cuda_setMemoryMetadata(getattr(self._local, "node", ""))
        _note_outputs(step, out)
        if self._phase is Phase.FORWARD and torch.is_grad_enabled():
            # Autograd made this operator's node right before; a node has the number that was the next one then.
            self._modules_of_nodes[bindings._autograd._get_sequence_nr() - 1] = step.module
        return out

    def _begin(self, func: Any, args: Any) -> Step:
        scope = self._scopes if self._phase is Phase.BACKWARD and self._stack else 0
        namespace, _, name = str(func).partition(".")
        weight = ""
        if name.startswith("_to_copy"):
            weight = self._weights.get(address(args[0]), "")
        if namespace.endswith(("c10d", "c10d_functional")):
            for tensor in _tensors(args):
                self.label(Category.COMMUNICATION, str(func).removesuffix(".default"), tensor)
        return Step(
            name=f"{namespace}.{name}".removesuffix(".default").removeprefix("aten."),
            module=self.module,
            node="",
            scope=scope,
            weight=weight,
            outputs=[],
            wide=any(isinstance(one, torch.Tensor) and self.is_wide(tuple(one.shape)) for one in args),
        )

    def is_wide(self, shape: tuple[int, ...]) -> bool:
        return self._vocabulary is not None and len(shape) > 1 and shape[-1] == self._vocabulary

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles: list[Any] = []
        for module in self._paths:
            handles.append(module.register_forward_pre_hook(self._push, prepend=True))
            handles.append(module.register_forward_pre_hook(self._note_gathered))
            handles.append(module.register_forward_hook(self._pop, always_call=True))
        handles.append(self._model.register_forward_hook(self._note_cache))
        for name, parameter in hooked_parameters(self._model):
            handles += self._watch_gradient(name, parameter)
        backward = torch.autograd.backward
        try:
            torch.autograd.backward = self._watched_backward(backward)
            with self:
                yield
        finally:
            torch.autograd.backward = backward
            for handle in handles:
                handle.remove()
            bindings._cuda_setMemoryMetadata("")

    def _watched_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """A backward pass without the mode, every node of its graph watched."""

        @functools.wraps(backward)
        def watch_nodes(tensors: Any, *args: Any, **kwargs: Any) -> None:
            for node in _graph(_tensors(tensors)):
                self._watch_node(node)
            with _disable_current_modes():
                backward(tensors, *args, **kwargs)
            self._local.node = ""
            bindings._cuda_setMemoryMetadata("")

        return watch_nodes

    def _watch_node(self, node: Any) -> None:
        variable = getattr(node, "variable", None)
        module = self._modules_of_nodes.get(node._sequence_nr(), "") if variable is None else ""
        step = Step(
            name="", module=module, node=node.name().rpartition(":")[2], scope=0, weight="", outputs=[], wide=False
        )
        number = str(len(self.steps))
        self.steps.append(step)

        def begins(gradients: Any) -> None:
            arriving = list(_tensors(gradients))
            step.wide = any(self.is_wide(tuple(tensor.shape)) for tensor in arriving)
            for tensor in arriving:
                self.label(SHAPE_ONLY, "", tensor)
            self._local.node = number
            bindings._cuda_setMemoryMetadata(number)

        node.register_prehook(begins)

    def _push(self, module: nn.Module, _: object) -> None:
        if self._phase is Phase.BACKWARD and not self._stack:
            self._scopes += 1  # a recomputation: its operators are seen, those of autograd around it are not
            self.__enter__()  # type: ignore[no-untyped-call]
        self._stack.append(module)

    def _pop(self, module: nn.Module, *_: object) -> None:
        stack = self._stack
        if module not in stack:
            return
        while stack.pop() is not module:
            pass  # left by an exception: a recomputation stops as soon as it has what it needs
        for parameter in module._parameters.values():
            before = self._gathered.pop(id(parameter), 0)
            if before and parameter is not None and address(parameter) != before:
                self._mark(f"{RELEASED} {before}")
        if self._phase is Phase.BACKWARD and not stack:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mark(f"{SCOPE_END} {self._scopes}")

    def _note_gathered(self, module: nn.Module, _: object) -> None:
        """After the engine's own hooks: what is there now and was not between iterations has been gathered."""
        for name, parameter in module._parameters.items():
            if parameter is not None and type(parameter) is nn.Parameter:
                where = address(parameter)
                if where and where not in self._owners:
                    self._gathered[id(parameter)] = where
                    self.label(Category.GATHERED_PARAMETERS, f"{self._paths[module]}.{name}", parameter)

    def _note_cache(self, _module: object, _inputs: object, output: Any) -> None:
        cache = getattr(output, "past_key_values", None)
        for layer in getattr(cache, "layers", None) or ():
            for name in ("keys", "values"):
                tensor = getattr(layer, name, None)
                if isinstance(tensor, torch.Tensor):
                    self.kv_cache_bytes += tensor.untyped_storage().nbytes()
                    self.label(Category.KV_CACHE, name, tensor)

    def _watch_gradient(self, name: str, parameter: nn.Parameter) -> list[Any]:
        """Both what arrives at the parameter and what is kept of it."""
        if not parameter.requires_grad or not parameter.is_leaf:
            return []
        category = gradient_category(parameter)

        def arrives(gradient: torch.Tensor) -> None:
            self.label(category, name, gradient)

        def is_kept(this: torch.Tensor) -> None:
            if this.grad is not None:
                self.label(category, name, this.grad)

        hooks: Any = parameter
        return [hooks.register_hook(arrives), hooks.register_post_accumulate_grad_hook(is_kept)]


def fully_sharded(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parameters that FSDP2 manages, each with its unsharded twin, by name."""
    for path, module in model.named_modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in getattr(state(), "_fsdp_param_groups", None) or _single_group(state()) if state else ():
            for managed in group.fsdp_params:
                yield managed._param_fqn or f"{path}.{managed._module_info.param_name}", managed


def _single_group(state: Any) -> list[Any]:
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def hooked_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those at which gradients arrive: the unsharded ones where FSDP2 shards them."""
    sharded = list(fully_sharded(model))
    if not sharded:
        yield from model.named_parameters()
    for name, managed in sharded:
        twin = getattr(managed, "_unsharded_param", None)
        if twin is not None:
            twin.is_unsharded_twin = True
            yield name, twin


def gradient_category(parameter: nn.Parameter) -> Category:
    """With ZeRO-2 and -3 and FSDP2, what arrives at a parameter is as large as the whole parameter."""
    unsharded = hasattr(parameter, "ds_tensor") or getattr(parameter, "is_unsharded_twin", False)
    return Category.UNSHARDED_GRADIENTS if unsharded else Category.GRADIENTS


def _is_wrapper(kind: Any) -> bool:
    """Whether tensors of this class take operators apart themselves."""
    return kind not in (torch.Tensor, nn.Parameter) and (
        getattr(kind, "__torch_dispatch__", None) is not bindings._disabled_torch_dispatch_impl
    )


def _graph(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Every node that a backward pass from here goes through."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(found)


def _note_outputs(step: Step, out: Any) -> None:
    for tensor in _tensors(out):
        if where := address(tensor):
            step.outputs.append((where, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
