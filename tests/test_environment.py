"""Which devices there are and what decides a result."""

import pytest

from sweep import environment
from sweep.environment import visible_gpus
from sweep.launch import commands
from sweep.nvml import NvmlError


class FakeDevice:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.name = "NVIDIA " + uuid


class FakeNvml:
    """Two GPUs, of which the second has an instance: the virtual GPU has no instances."""

    def devices(self) -> list[FakeDevice]:
        return [FakeDevice("GPU-aaaa-1"), FakeDevice("GPU-bbbb-2")]

    def device(self, uuid: str) -> FakeDevice:
        if uuid != "MIG-cccc-3":
            raise NvmlError(uuid, 6)
        return FakeDevice(uuid)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("1,0", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("GPU-bbbb", ["GPU-bbbb-2"]),
        ("MIG-cccc-3", ["MIG-cccc-3"]),
        ("MIG-none,0", []),
        ("0,-1,1", ["GPU-aaaa-1"]),
        ("", []),
    ],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, uuids: list[str]) -> None:
    monkeypatch.setattr(environment, "Nvml", FakeNvml)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in visible_gpus()] == uuids


@pytest.mark.parametrize(
    ("torch", "variable"),
    [
        ("2.8.0", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.0+cu128", "PYTORCH_ALLOC_CONF"),
        ("2.10.1", "PYTORCH_ALLOC_CONF"),
        ("3.0.0", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_allocators_variable_is_one_that_torch_knows(
    monkeypatch: pytest.MonkeyPatch, torch: str, variable: str
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: torch)
    assert commands.allocator_variable() == variable
