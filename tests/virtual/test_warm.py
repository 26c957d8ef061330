import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweep import virtual
from sweep.virtual.warm import WarmCell, WarmServer


def _environment(gpu: str = "t4", **options: int) -> dict[str, str]:
    return {**os.environ, **virtual.environment(virtual.gpu(gpu), **options)}  # type: ignore[arg-type]


def _start(server: WarmServer, folder: Path, code: str, environment: dict[str, str] | None = None) -> WarmCell:
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    return server.spawn([str(script)], environment=environment or _environment(), stdout=folder / "out")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a reason')", 1),
        ("raise ValueError('broken')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_exit_code_is_reported(warm_server: WarmServer, tmp_path: Path, code: str, expected: int) -> None:
    assert _start(warm_server, tmp_path, code).wait(30) == expected
    assert ("ValueError: broken" in (tmp_path / "out").read_text(encoding="utf-8")) == ("broken" in code)


def test_each_cell_is_another_gpu(warm_server: WarmServer, tmp_path: Path) -> None:
    code = "import torch; print(torch.cuda.get_device_name(), torch.cuda.device_count())"
    for gpu, count, name in (("t4", 1, "Tesla T4"), ("h200", 3, "NVIDIA H200"), ("l4", 1, "NVIDIA L4")):
        folder = tmp_path / gpu
        folder.mkdir()
        assert _start(warm_server, folder, code, _environment(gpu, gpus=count)).wait(30) == 0
        assert (folder / "out").read_text(encoding="utf-8") == f"{name} {count}\n"


def test_the_allocator_is_set_per_cell(warm_server: WarmServer, tmp_path: Path) -> None:
    code = """
import torch
torch.ones(1, device="cuda")
settings = torch.cuda.memory._snapshot()["allocator_settings"]
print(settings["expandable_segments"], settings["max_split_size"])
"""
    environment = {**_environment(), "PYTORCH_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}
    assert _start(warm_server, tmp_path, code, environment).wait(30) == 0
    assert (tmp_path / "out").read_text(encoding="utf-8").split() == ["True", str(128 << 20)]


def test_an_allocator_backend_needs_a_cold_start(warm_server: WarmServer, tmp_path: Path) -> None:
    environment = {**_environment(), "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    with pytest.raises(virtual.VirtualGpuError, match="start a cudaMallocAsync cell cold"):
        _start(warm_server, tmp_path, "pass", environment)


def test_killing_a_cell_ends_what_it_started(warm_server: WarmServer, tmp_path: Path) -> None:
    code = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
print(os.getpid() == os.getsid(0), child.pid, flush=True)
time.sleep(600)
"""
    cell = _start(warm_server, tmp_path, code)
    out = tmp_path / "out"
    while not (out.exists() and out.read_text(encoding="utf-8").endswith("\n")):
        time.sleep(0.02)
    with pytest.raises(subprocess.TimeoutExpired):
        cell.wait(0.01)
    assert cell.poll() is None
    cell.kill()
    assert cell.wait(30) == -signal.SIGKILL
    leads_session, child = out.read_text(encoding="utf-8").split()
    assert leads_session == "True"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _is_running(int(child)):
        time.sleep(0.02)
    assert not _is_running(int(child))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_several_cells_at_once_and_a_module(warm_server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "one_module.py").write_text("import sys; print(__name__, sys.argv[1:])", encoding="utf-8")
    cells = [
        warm_server.spawn(
            ["-m", "one_module", str(i)], environment=_environment(), stdout=tmp_path / str(i), cwd=tmp_path
        )
        for i in range(4)
    ]
    assert [cell.wait(30) for cell in cells] == [0] * 4
    assert (tmp_path / "3").read_text(encoding="utf-8") == "__main__ ['3']\n"


@pytest.mark.usefixtures("needs_virtual_gpu")
def test_leaving_the_server_ends_its_cells(tmp_path: Path) -> None:
    with WarmServer(modules=()) as server:
        cell = _start(server, tmp_path, "import time; time.sleep(600)")
    assert cell.wait(30) == -signal.SIGKILL
    with pytest.raises(virtual.VirtualGpuError, match="server has ended"):
        _start(server, tmp_path, "pass")


@pytest.mark.usefixtures("needs_virtual_gpu")
def test_a_module_that_touches_cuda_or_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text("import torch; torch.cuda.init()", encoding="utf-8")
    (tmp_path / "broken.py").write_text("1 / 0", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with (
        pytest.raises(virtual.VirtualGpuError, match="starts CUDA while it is imported"),
        WarmServer(modules=["greedy"], environment=environment),
    ):
        pass
    with (
        pytest.raises(virtual.VirtualGpuError, match="importing failed with ZeroDivisionError"),
        WarmServer(modules=["broken"], environment=environment),
    ):
        pass


def test_a_cell_starts_warm(warm_server: WarmServer, tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules, sys.executable)"
    assert _start(warm_server, tmp_path, code).wait(30) == 0
    assert (tmp_path / "out").read_text(encoding="utf-8").split() == ["True", sys.executable]
