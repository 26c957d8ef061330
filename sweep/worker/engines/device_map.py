"""One process, its layers spread evenly over several devices by accelerate: `device_map="balanced"`."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.utils import get_balanced_memory, set_module_tensor_to_device
from torch import nn

from sweep.spec import Weights
from sweep.worker.engines import stored_dtype
from sweep.worker.engines.accelerated import AcceleratedEngine

STANDARD_DEVIATION = 0.02


class DeviceMapEngine(AcceleratedEngine):
    def load(self, build: Callable[[torch.dtype], nn.Module]) -> None:
        """Each parameter is made on its own device, as `from_pretrained(device_map="balanced")` does it.

        Pretrained ones are loaded on the host and moved there.
        """
        dtype = stored_dtype(self._spec)
        pretrained = self._spec.model.weights is Weights.PRETRAINED
        with nullcontext() if pretrained else init_empty_weights(include_buffers=False):
            model: Any = build(dtype)
        model.tie_weights()
        whole = list(model._no_split_modules or ())
        room = get_balanced_memory(model, no_split_module_classes=whole, dtype=dtype)
        device_map = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole, dtype=dtype)
        places = {name: _device_of(name, device_map) for name, _ in model.named_parameters()}
        if not pretrained:
            _make_parameters(model, places, dtype)
            model.tie_weights()
        self.model = dispatch_model(model, device_map)


def _make_parameters(model: nn.Module, places: Mapping[str, torch.device], dtype: torch.dtype) -> None:
    for name, parameter in list(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=dtype, device=places[name])
        value = value.normal_(std=STANDARD_DEVIATION) if value.dim() > 1 else value.fill_(1.0)
        set_module_tensor_to_device(model, name, places[name], value=value)


def _device_of(name: str, device_map: dict[str, Any]) -> torch.device:
    """Of the longest prefix that the map names."""
    prefixes = [prefix for prefix in device_map if prefix == "" or name == prefix or name.startswith(prefix + ".")]
    place = device_map[max(prefixes, key=len)]
    if not isinstance(place, int):
        raise torch.OutOfMemoryError(f"the model does not fit on its devices: {name} was placed on the {place}")
    return torch.device("cuda", place)
