import subprocess
import sys
from pathlib import Path

import pytest

from sweep import virtual
from sweep.virtual import build
from sweep.virtual.stubs import is_answered_with_success, missing_calls, write_stubs
from sweep.virtual.symbols import defined, undefined
from sweep.virtual.torch_build import torch_build

pytestmark = pytest.mark.usefixtures("needs_virtual_gpu")


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    code = "from sweep.virtual.build import library_folder; print(library_folder())"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = {process.communicate()[0].strip() for process in both}
    assert len(outputs) == 1
    folder = Path(outputs.pop())
    assert sorted(path.name for path in folder.glob("*.so*")) == ["libcuda.so.1", "libnvidia-ml.so.1"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing half-built is left"


def test_a_folder_that_the_loader_cannot_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a b"))
    with pytest.raises(virtual.VirtualGpuError, match="set XDG_CACHE_HOME to a folder without"):
        build.library_folder()


def test_a_library_that_is_built_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build.library_folder()
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert build.library_folder() == built
    assert virtual.check() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "needs a C compiler" in str(virtual.check())
    with pytest.raises(virtual.VirtualGpuError, match="needs a C compiler"):
        build.library_folder()


def test_every_cuda_call_of_pytorch_is_answered_or_refused() -> None:
    folder = torch_build().folder / "lib"
    needed = undefined(folder / "libtorch_cuda.so") | undefined(folder / "libc10_cuda.so")
    assert "cudaMalloc" in needed
    assert "ncclAllReduce" in needed
    assert missing_calls(needed, defined(build.library_folder() / build.DRIVER)) == []


@pytest.mark.parametrize("call", ["cublasSgemm_v2", "cublasCgemmBatched", "cublasSetMathMode", "cublasZgeru_v2"])
def test_what_only_computes_succeeds(call: str) -> None:
    assert is_answered_with_success(call)
    assert f"{call}(void) {{ return 0; }}" in write_stubs([call])


@pytest.mark.parametrize(
    "call", ["cudaGraphInstantiate", "cublasSnrm2_v2", "cusolverDnSgesvd_bufferSize", "cuFileRead"]
)
def test_what_would_tell_the_host_something_is_refused_by_name(call: str) -> None:
    assert not is_answered_with_success(call)
    assert f'vgpu_unsupported("{call}"' in write_stubs([call])
