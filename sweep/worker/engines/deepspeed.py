"""DeepSpeed ZeRO 0 to 3. Under `zero.Init`, stage 3 shards the model as it is built; without, once it is whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deepspeed
import torch
from torch import nn

from sweep.spec import CellSpec, Precision
from sweep.spec.deepspeed import deepspeed_config
from sweep.worker.engines import Batch, loss_of
from sweep.worker.optimizers import Given, optimizer_for

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.BF16_PURE: torch.bfloat16}


class DeepSpeedEngine:
    def __init__(self, spec: CellSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._config = deepspeed_config(spec) | {"steps_per_print": 10**9}
        deepspeed.init_distributed()

    def load(self, build: Callable[[torch.dtype], nn.Module]) -> None:
        dtype = DTYPES.get(self._spec.precision, torch.float32)
        if self._spec.engine.builds_sharded:
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
