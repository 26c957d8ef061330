"""The C sources under the sanitizers, with the programs in ``native/``."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sweep.virtual import build

CHECKS = Path(__file__).parent / "native"
SANITIZERS = {"memory": "-fsanitize=address,undefined", "threads": "-fsanitize=thread"}
PROGRAMS = [
    *((name, ()) for name in ("ranges", "values", "memory", "nccl", "threads")),
    *(("clock", (lag,)) for lag in ("none", "until-sync", "simulated")),
]
FLAGS = ("-std=gnu11", "-g", "-O1", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="module", params=SANITIZERS)
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := build.machine_obstacle() or (None if build.compiler() else "no C compiler"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(request.param)
    native = build.sources()[0].parent
    command = [str(build.compiler()), *FLAGS, SANITIZERS[request.param], f"-I{native}"]

    def run(*arguments: str) -> None:
        done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: run("-c", str(source)), build.sources()))
        objects = sorted(path.name for path in folder.glob("*.o"))
        names = {name for name, _ in PROGRAMS}
        link = ("-ldl", "-lpthread", "-lm")
        list(pool.map(lambda name: run(str(CHECKS / f"check_{name}.c"), *objects, "-o", name, *link), names))
    return folder


@pytest.mark.parametrize(("name", "arguments"), PROGRAMS)
def test_program(programs: Path, name: str, arguments: tuple[str, ...]) -> None:
    done = subprocess.run([programs / name, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_the_other_cuda_version_compiles_without_warnings(tmp_path: Path) -> None:
    if reason := build.machine_obstacle() or (None if build.compiler() else "no C compiler"):
        pytest.skip(reason)
    for major in (12, 13):
        for source in (*build.sources(), build.sources()[0].parent / "nvml" / "nvml.c"):
            command = [str(build.compiler()), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
            done = subprocess.run(
                [*command, f"-DVGPU_CUDA_MAJOR={major}", str(source)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
