import subprocess
import sys
from pathlib import Path

import pytest

from sweep import virtual
from sweep.virtual import torch_build
from sweep.virtual.environment import nccl_communicator_bytes

A100 = virtual.gpu("a100-80gb")


def test_check_and_import_leave_torch_alone() -> None:
    code = (
        "import sys; from sweep import virtual; virtual.check(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'hydra', 'omegaconf', 'sweep.spec')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "gpus is 0; give 1 to 64"),
        ({"gpus": 65}, "gpus is 65"),
        ({"world_size": 0}, "world_size is 0"),
        ({"lag": "some"}, "lag is 'some'; give one of none, until-sync, simulated"),
        ({"other_processes_bytes": 1 << 50}, "other_processes_bytes is"),
    ],
)
def test_wrong_values_are_named(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(virtual.VirtualGpuError, match=message):
        virtual.gpu_variables(A100, **options)  # type: ignore[arg-type]


def test_a_world_is_rank_zero_of_it_and_shows_all_its_gpus() -> None:
    variables = virtual.gpu_variables(A100, world_size=8)
    assert variables["VGPU_COUNT"] == variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "8"
    assert variables["RANK"] == variables["LOCAL_RANK"] == "0"
    assert virtual.gpu_variables(A100, world_size=16, gpus=8)["LOCAL_WORLD_SIZE"] == "8"
    assert "RANK" not in virtual.gpu_variables(A100, gpus=2)


def test_nccl_takes_nothing_in_a_world_of_one() -> None:
    assert nccl_communicator_bytes(1) == 0
    assert 0 < nccl_communicator_bytes(2) < nccl_communicator_bytes(8)


@pytest.mark.usefixtures("needs_virtual_gpu")
def test_existing_variables_are_kept_behind_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("LD_PRELOAD", "/my.so")
    variables = virtual.environment(A100)
    assert variables["PYTHONPATH"].endswith(":/mine")
    assert variables["LD_PRELOAD"].endswith(":/my.so")
    folder = Path(variables["TRITON_LIBCUDA_PATH"])
    assert (folder / "libcuda.so.1").exists()
    assert (folder / "libnvidia-ml.so.1").exists()


def _fake_torch(folder: Path, version: str) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(version, encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\n", "2.9.0.cpu is not a CUDA build"),
        ("__version__ = '2.2.0+cu118'\ncuda = '11.8'\n", "built for CUDA 11.8; install a build for CUDA 12 or 13"),
    ],
)
def test_a_torch_that_cannot_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, message: str
) -> None:
    _fake_torch(tmp_path, version)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert message.replace(".cpu", "+cpu") in (virtual.check() or "")
    with pytest.raises(virtual.VirtualGpuError):
        torch_build.torch_build()


def test_a_missing_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert (virtual.check() or "").startswith("PyTorch is missing from")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a library that is there already needs none
    monkeypatch.delenv("CC", raising=False)
    assert "needs a C compiler; install gcc" in (virtual.check() or "")


def test_another_operating_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in (virtual.check() or "")
