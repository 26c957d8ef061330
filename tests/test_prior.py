from collections.abc import Callable
from pathlib import Path

import pytest

from sweep import virtual
from sweep.plan import Search
from sweep.prior import virtual_limit, virtual_twin
from sweep.spec import CellSpec, DeviceKind
from sweep.store import Store

MakeSpec = Callable[..., CellSpec]


def test_the_twin_differs_in_the_device_alone(make_spec: MakeSpec) -> None:
    real = make_spec(device={"kind": "cuda"})
    twin = virtual_twin(real, "NVIDIA A100-SXM4-80GB")
    assert twin is not None
    assert twin.device.kind is DeviceKind.VIRTUAL
    assert twin.device.gpu is not None
    assert twin.device.gpu.key == "a100-80gb"
    assert (twin.model, twin.engine, twin.seq_len) == (real.model, real.engine, real.seq_len)


def test_a_gpu_without_a_profile_has_no_twin(make_spec: MakeSpec, tmp_path: Path) -> None:
    assert virtual_twin(make_spec(), "NVIDIA Imaginary 1") is None
    assert virtual_limit(make_spec(), "NVIDIA Imaginary 1", Store(tmp_path), Search()) is None


@pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))
def test_the_limit_is_that_of_the_virtual_gpu(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(device={"kind": "cuda"}, seq_len=1024)
    assert virtual_limit(spec, "Tesla T4", Store(tmp_path), Search(max_batch_size=4)) == 4
