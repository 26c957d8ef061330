"""The check on a real GPU, with a virtual one in the real one's place, and without what a bare machine lacks."""

import csv
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import REPOSITORY

from sweep import virtual

needs_virtual_gpu = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))

STAGED = """
    # The "real" GPU is a virtual one, here and in the cells of device=cuda.
    import os, sys

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("hydra", "omegaconf", "rich", "pynvml", "deepspeed", "pandas", "matplotlib"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    from sweep import gpu_check, launch, virtual
    from sweep.spec import DeviceKind

    clean = launch.process_environment

    def process_environment(spec, cell_id):
        variables = clean(spec, cell_id)
        if spec.device.kind is DeviceKind.CUDA:
            gpu = virtual.environment(virtual.gpu("a100-80gb"))
            gpu["PYTHONPATH"] = gpu["PYTHONPATH"].split(os.pathsep)[0] + os.pathsep + variables["PYTHONPATH"]
            variables |= gpu
        return variables

    launch.process_environment = process_environment
    launch.spawn_warm = lambda *_: None
    sys.exit(gpu_check.main(sys.argv[1:]))
"""


@needs_virtual_gpu
def test_virtual_against_virtual_is_equal_without_hydra(tmp_path: Path) -> None:
    variables = os.environ | virtual.environment(virtual.gpu("a100-80gb"))
    variables["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STAGED), "--model", "tiny", "--cells", "1"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    assert printed[1] == "batch 1, bf16: ok, virtual ok"
    assert [line.split()[0] for line in printed[2:6]] == ["allocated", "active", "reserved", "NVML"]
    assert all(line.endswith("equal") for line in printed[2:6]), done.stdout
    folder = tmp_path / "results/gpu-check"
    rows = list(csv.DictReader((folder / "cells.csv").read_text().splitlines()))
    assert sorted(row["device"] for row in rows) == ["cuda", "virtual"]
    records = [json.loads(path.read_text()) for path in folder.glob("cells/*/record.json")]
    (real,) = [record for record in records if record["spec"]["device"]["kind"] == "cuda"]
    (rank,) = real["ranks"]
    assert len(rank["seconds_per_iteration"]) == 5
    assert len(rank["parts"]["forward_seconds"]) == 5
    assert rank["nvml"]["process_bytes"] > 0
    assert real["environment"]["baseline_used_bytes"] == {rank["device_uuid"]: 0}


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sweep.gpu_check"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "gpu-check needs a real GPU, and no NVIDIA GPU is visible.\n"
    assert list(tmp_path.iterdir()) == []
