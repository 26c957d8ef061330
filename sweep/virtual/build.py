"""Compiles the virtual GPU for the PyTorch of this interpreter, once, into a cache."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sweep.virtual.errors import VirtualGpuError
from sweep.virtual.stubs import missing_calls, write_stubs
from sweep.virtual.symbols import defined, undefined
from sweep.virtual.torch_build import TorchBuild, torch_build

HERE = Path(__file__).parent
_NATIVE = HERE / "native"
DRIVER = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"
"""The files carry the names of the libraries they stand in for: Triton and nvidia-ml-py look for a file, by name."""

_USES_CUDA = ("c10_cuda", "torch_cuda", "torch_cuda_linalg", "torch_python", "torch_nvshmem", "caffe2_nvrtc")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")


def compiler() -> str | None:
    """The C compiler: ``$CC`` if set, else cc, gcc or clang, whichever there is."""
    wanted = os.environ.get("CC", "").split()
    return next((found for name in (*wanted[:1], "cc", "gcc", "clang") if (found := shutil.which(name))), None)


def machine_obstacle() -> str | None:
    """Why this operating system or processor cannot do it, or None."""
    if sys.platform != "linux":
        return f"The virtual GPU needs Linux, and this is {platform.system()}; run it in a Linux container or machine."
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"The virtual GPU needs an x86-64 or aarch64 processor, and this is {platform.machine()}."
    return None


def compiler_obstacle() -> str | None:
    """Why it cannot be built here, or None; a library that is in the cache needs no compiler."""
    if compiler() is not None or (cache_folder() / _build_key(torch_build()) / DRIVER).exists():
        return None
    return "The virtual GPU needs a C compiler; install gcc (apt-get install gcc) or set CC to one."


def cache_folder() -> Path:
    """Where built libraries are kept: ``$XDG_CACHE_HOME/sweep/virtual`` or ``~/.cache/sweep/virtual``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sweep" / "virtual"


def sources() -> list[Path]:
    """The hand-written C files of the driver library."""
    return sorted(_NATIVE.glob("*.c"))


def _build_key(torch: TorchBuild) -> str:
    digest = hashlib.sha256(f"{torch.version} {torch.folder} {platform.machine()} {_FLAGS}".encode())
    for path in sorted((*_NATIVE.rglob("*.[ch]"), HERE / "stubs.py", HERE / "build.py")):
        digest.update(path.read_bytes())
    return f"torch-{torch.version}-{digest.hexdigest()[:16]}"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise VirtualGpuError(
            f"The virtual GPU did not compile; this compiler may be too old, set CC to another:\n{done.stderr}"
        )


def _compile(folder: Path, torch: TorchBuild) -> None:
    """Compiles everything into the folder: the answered calls first, then stubs for what PyTorch needs besides."""
    cc = compiler()
    assert cc is not None, "checked by compiler_obstacle"
    macros = [f"-DVGPU_CUDA_MAJOR={torch.cuda_major}", f"-DVGPU_CUDA_MINOR={torch.cuda_minor}", f"-I{_NATIVE}"]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        _run([cc, *_FLAGS, *macros, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources()))
    link = [cc, "-shared", "-o"]
    libraries = ["-ldl", "-lpthread", "-lm"]
    answered = folder / "answered.so"
    _run([*link, str(answered), *map(str, objects), *libraries])
    needed: set[str] = set()
    for name in _USES_CUDA:
        library = torch.folder / "lib" / f"lib{name}.so"
        needed |= undefined(library) if library.exists() else set()
    stubs = folder / "stubs.c"
    stubs.write_text(write_stubs(missing_calls(needed, defined(answered))), encoding="utf-8")
    objects.append(compile_one(stubs))
    _run([*link, str(folder / DRIVER), *map(str, objects), f"-Wl,-soname,{DRIVER}", *libraries])
    nvml = compile_one(_NATIVE / "nvml" / "nvml.c")
    _run([*link, str(folder / NVML), str(nvml), f"-Wl,-soname,{NVML}", str(folder / DRIVER)])
    for leftover in (*objects, nvml, answered):
        leftover.unlink()


def library_folder() -> Path:
    """The folder with the two libraries for this interpreter's PyTorch, built if need be.

    Several processes may build at once: each builds in a folder of its own, and the first to rename it wins.
    """
    if obstacle := machine_obstacle():
        raise VirtualGpuError(obstacle)
    torch = torch_build()
    if obstacle := compiler_obstacle():
        raise VirtualGpuError(obstacle)
    home = cache_folder()
    target = home / _build_key(torch)
    if " " in str(target) or ":" in str(target):
        raise VirtualGpuError(
            f"LD_PRELOAD cannot name {target}, which has a space or a colon; set XDG_CACHE_HOME to a folder without."
        )
    if (target / DRIVER).exists():
        return target
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=home) as scratch:
        building = Path(scratch) / "library"
        building.mkdir()
        _compile(building, torch)
        try:
            building.rename(target)
        except OSError:
            if not (target / DRIVER).exists():
                raise
    return target
