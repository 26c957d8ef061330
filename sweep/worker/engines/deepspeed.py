"""DeepSpeed ZeRO 0 to 3 with DeepSpeed's own defaults; the model of stage 3 is built under `zero.Init`.

https://www.deepspeed.ai/docs/config-json/ describes the configuration.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from sweep.spec import CellSpec, DeviceKind, Precision
from sweep.worker.engines import Batch, loss_of
from sweep.worker.optimizers import Given, optimizer_for

CPU_BUCKET = 1_000_000
"""Elements."""
DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def deepspeed_config(spec: CellSpec) -> dict[str, Any]:
    """The `ds_config.json` of a cell."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.batch_size,
        "gradient_accumulation_steps": spec.accumulation,
        "zero_optimization": {"stage": spec.engine.zero_stage},
        # The client's torch optimizer has the footprint of DeepSpeed's own FusedAdam and needs no CUDA compiler.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if spec.device.kind is DeviceKind.CPU:
        # The default buckets of 500 million elements are 2 GB each: more than a rank's memory limit.
        config["zero_optimization"] |= {"reduce_bucket_size": CPU_BUCKET, "allgather_bucket_size": CPU_BUCKET}
    if spec.precision in DTYPES:
        config[spec.precision.value] = {"enabled": True}
    if spec.gradient_clipping is not None:
        config["gradient_clipping"] = spec.gradient_clipping
    return config


class DeepSpeedEngine:
    def __init__(self, spec: CellSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._config = deepspeed_config(spec)
        deepspeed.init_distributed()

    def load(self, build: Callable[[torch.dtype], nn.Module]) -> None:
        dtype = DTYPES.get(self._spec.precision, torch.float32)
        if self._spec.engine.zero_stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=self._config):
                self.model = build(dtype)
        else:
            with self._device:
                self.model = build(dtype)

    def prepare(self, given: Given = None) -> None:
        self.optimizer = optimizer_for(self._spec, self.model, given)
        self._engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=self._config)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        yield

    def forward(self, batch: Batch) -> torch.Tensor:
        return loss_of(self._engine, batch)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    @property
    def optimizer_steps(self) -> int:
        return int(self._engine.global_steps - self._engine.skipped_steps)

    @property
    def parameter_count(self) -> int:
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self.model.parameters())
