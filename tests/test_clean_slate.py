"""Nothing is measured on a device that somebody else uses: staged with the virtual GPU's NVML."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import REPOSITORY

from sweep import virtual

pytestmark = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))


def on_a_gpu(program: str, folder: Path, other_processes_bytes: int = 0) -> str:
    """What a program prints for which the virtual GPUs are the real ones."""
    variables = os.environ | virtual.environment(
        virtual.gpu("a100-80gb"), gpus=2, other_processes_bytes=other_processes_bytes
    )
    variables["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"
    setting = "from sweep.environment import visible_gpus\nfrom sweep.launch import clean_slate\n"
    done = subprocess.run(
        [sys.executable, "-c", setting + textwrap.dedent(program)],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_desktop_is_a_baseline_and_a_computation_is_not(tmp_path: Path) -> None:
    ask = """
        print(clean_slate.busy_reason(visible_gpus(), wait_seconds=0))
        print(clean_slate.baseline_bytes(visible_gpus()))
    """
    free, baselines = on_a_gpu(ask, tmp_path, 300 << 20).splitlines()
    assert free == "None"
    assert baselines.count(str(300 << 20)) == 2
    busy, baselines = on_a_gpu(ask, tmp_path, 9 << 30).splitlines()
    assert "9.0 GiB of NVIDIA A100-SXM4-80GB (GPU-" in busy
    assert "held by processes that are not visible from here" in busy
    assert baselines == "{}"


def test_who_holds_the_device_is_named_and_only_that_device(tmp_path: Path) -> None:
    program = """
        import os, torch
        gpus = visible_gpus()
        assert clean_slate.busy_reason(gpus, wait_seconds=0) is None
        held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda:1")
        print(os.getpid(), clean_slate.busy_reason(gpus, wait_seconds=0))
        print(clean_slate.busy_reason(gpus[:1], wait_seconds=0))
    """
    busy, other = on_a_gpu(program, tmp_path).splitlines()
    pid, sentence = busy.split(" ", 1)
    assert re.search(rf"held by python\S* \(pid {pid}, 2\.\d GiB\)", sentence), sentence
    assert sentence.count("GiB of") == 1
    assert other == "None"


def test_memory_that_comes_back_late_is_waited_for(tmp_path: Path) -> None:
    program = """
        import threading, time, torch
        gpus = visible_gpus()
        torch.empty(1, device="cuda:0")
        assert clean_slate.busy_reason(gpus, wait_seconds=0) is None
        held = [torch.empty(4 << 30, dtype=torch.uint8, device="cuda:0")]
        def release():
            held.clear()
            torch.cuda.empty_cache()
        assert clean_slate.busy_reason(gpus, wait_seconds=0) is not None
        threading.Timer(1.0, release).start()
        print(clean_slate.busy_reason(gpus, wait_seconds=60))
    """
    assert on_a_gpu(program, tmp_path) == "None"


def test_a_cell_on_a_busy_device_is_not_run(tmp_path: Path) -> None:
    program = """
        from pathlib import Path
        from conftest import read_model
        from sweep.launch import run_cell
        from sweep.spec import CellSpec, from_json
        from sweep.store import Store
        clean_slate.WAIT_SECONDS = 0.0
        content = {"model": read_model("tiny"), "engine": {"name": "ddp"}, "device": {"kind": "cuda"}}
        spec = from_json(CellSpec, content | {"world_size": 2, "batch_size": 1, "seq_len": 32})
        record = run_cell(spec, Store(Path("results")), [])
        print(record.status.value, len(record.ranks), record.reason)
    """
    printed = on_a_gpu(program, tmp_path, 9 << 30)
    assert printed.startswith("busy_device 0 9.0 GiB of NVIDIA A100-SXM4-80GB")
    assert not list(tmp_path.glob("results/cells/*/stderr.log"))


def test_more_ranks_than_devices_is_one_sentence(tmp_path: Path) -> None:
    program = """
        from sweep.environment import DeviceError, require_device
        from sweep.spec import DeviceKind
        try:
            require_device(DeviceKind.CUDA, 3)
        except DeviceError as error:
            print(error)
        print(require_device(DeviceKind.CUDA, None))
    """
    sentence, all_of_them = on_a_gpu(program, tmp_path).splitlines()
    assert sentence == "world_size=3 needs as many GPUs, but 2 are visible."
    assert all_of_them == "2"


def test_ranks_get_the_chosen_devices_by_uuid(tmp_path: Path) -> None:
    program = """
        import os
        from conftest import read_model
        from sweep.launch.commands import environment
        from sweep.spec import CellSpec, from_json
        content = {"model": read_model("tiny"), "engine": {"name": "ddp"}, "device": {"kind": "cuda"}}
        spec = from_json(CellSpec, content | {"world_size": 1, "batch_size": 1, "seq_len": 32})
        os.environ["CUDA_VISIBLE_DEVICES"] = "1,0"
        first, second = (gpu.uuid for gpu in visible_gpus())
        print(environment(spec, "id")["CUDA_VISIBLE_DEVICES"] == first, first.endswith("2"))
    """
    assert on_a_gpu(program, tmp_path) == "True True"
