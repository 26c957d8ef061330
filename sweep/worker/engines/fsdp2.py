"""FSDP2, PyTorch's `fully_shard`, wrapped layer by layer as accelerate does it.

accelerate itself offers FSDP on several GPUs only; its plugin and its wrapping are used here on every device. With
FSDP2 accelerate uses no autocast: the mixed-precision policy casts a layer's parameters as they are gathered.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin, init_empty_weights
from accelerate.utils.fsdp_utils import fsdp2_prepare_model, get_fsdp2_grad_scaler
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sweep.spec import CellSpec, Precision, Weights
from sweep.worker.engines import Batch, loss_of, stored_dtype
from sweep.worker.failure import NotInEffectError
from sweep.worker.optimizers import Given, optimizer_for

STANDARD_DEVIATION = 0.02
"""Of weights that are made after sharding: `initializer_range` of most architectures."""


class Fsdp2Engine:
    def __init__(self, spec: CellSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        engine = spec.engine
        self._mixed = spec.precision.value if spec.precision in (Precision.BF16, Precision.FP16) else "no"
        self._plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=engine.reshard_after_forward is not False,
            cpu_offload=bool(engine.cpu_offload),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=engine.wrap_layers.split(",") if engine.wrap_layers else None,
            cpu_ram_efficient_loading=False,
        )
        if self._mixed != "no":
            self._plugin.set_mixed_precision(self._mixed)
        self._scaler = get_fsdp2_grad_scaler(device=device.type, enabled=spec.precision is Precision.FP16)
        self._micro_batches = self._steps = 0

    def load(self, build: Callable[[torch.dtype], nn.Module]) -> None:
        """Random parameters are made sharded on a GPU, pretrained ones are loaded on the host and sharded from there.

        In both cases no device ever holds the whole model.
        """
        dtype = stored_dtype(self._spec)
        if self._device.type == "cpu" or self._spec.model.weights is Weights.PRETRAINED:
            self.model = build(dtype)
        else:
            with init_empty_weights(include_buffers=False):
                self.model = build(dtype)

    def prepare(self, given: Given = None) -> None:
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=self._plugin),
            mixed_precision=self._mixed,
            is_main_process=False,
            device=self._device,
        )
        self._require_wrapped_layers()
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        fsdp2_prepare_model(accelerator, self.model)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            self._fill(buffers)
        sharded = dict(self.model.named_parameters())
        for group in given.param_groups if isinstance(given, torch.optim.Optimizer) else given or ():
            group["params"] = [sharded[names[parameter]] for parameter in group["params"]]
        self.optimizer = optimizer_for(self._spec, self.model, given)

    def _require_wrapped_layers(self) -> None:
        """Raises `NotInEffectError` where the model has none of a class, or where one would be sharded twice.

        accelerate shards the input embeddings on their own; a class that holds them, as BERT names one, must not be.
        """
        model: Any = self.model
        kinds = {type(module).__name__ for module in model.modules()}
        asked = [name for name in (self._spec.engine.wrap_layers or "").split(",") if name]
        for name in asked:
            if name not in kinds:
                raise NotInEffectError(f"engine.wrap_layers={name} is not in effect: the model has no such module")
        names = kinds.intersection(asked or getattr(model, "_no_split_modules", None) or ())
        embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        holders = {
            type(one).__name__ for one in model.modules() if one is not embeddings and embeddings in one.modules()
        }
        if twice := names & holders:
            others = ",".join(sorted(names - holders)) or "null"
            raise NotInEffectError(
                f"accelerate would shard the embeddings twice, in {min(twice)} and on their own, which PyTorch "
                f"refuses; choose engine.wrap_layers={others}"
            )

    def _fill(self, buffers: dict[str, torch.Tensor]) -> None:
        """Give every shard memory and values; buffers, which are not sharded, get theirs back."""
        self.model.to_empty(device="cpu" if self._spec.engine.cpu_offload else self._device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if parameter.dim() > 1:
                    local.normal_(std=STANDARD_DEVIATION)
                else:
                    local.fill_(1.0)
            for name, buffer in buffers.items():
                owner, _, last = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[last] = buffer.to(self._device)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        self._micro_batches += 1
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(self._is_last or bool(self._spec.engine.sync_each_micro_batch))
        yield

    @property
    def _is_last(self) -> bool:
        return self._micro_batches % self._spec.accumulation == 0

    def forward(self, batch: Batch) -> torch.Tensor:
        return loss_of(self.model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        self._scaler.scale(loss / self._spec.accumulation).backward()

    def step(self) -> None:
        if not self._is_last:
            return
        if self._spec.gradient_clipping is not None:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._spec.gradient_clipping)
        scale = self._scaler.get_scale()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        if not self._scaler.is_enabled() or self._scaler.get_scale() >= scale:
            self._steps += 1

    @property
    def optimizer_steps(self) -> int:
        return self._steps

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())
