"""The PyTorch of this interpreter, read from its files: importing it would take seconds and start CUDA."""

import importlib.machinery
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from sweep.virtual.errors import VirtualGpuError


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """Where PyTorch is, its version with the local part, and the CUDA version it was built for."""

    folder: Path
    version: str
    cuda: str | None

    @property
    def cuda_major(self) -> int:
        """12 of '12.1'."""
        return int((self.cuda or "0").split(".")[0])

    @property
    def cuda_minor(self) -> int:
        """1 of '12.1'."""
        return int((self.cuda or "0.0").split(".")[1])


def _field(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def torch_build() -> TorchBuild:
    """Reads ``torch/version.py``; a ``VirtualGpuError`` if PyTorch is missing or is not a CUDA build that is known."""
    spec = importlib.machinery.PathFinder.find_spec("torch", sys.path)
    if spec is None or spec.origin is None:
        raise VirtualGpuError(f"PyTorch is missing from {sys.executable}; install a CUDA build of it there.")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    build = TorchBuild(folder=folder, version=_field(text, "__version__") or "unknown", cuda=_field(text, "cuda"))
    if build.cuda is None:
        raise VirtualGpuError(f"PyTorch {build.version} is not a CUDA build; install one, it needs no GPU.")
    if build.cuda_major not in (12, 13):
        raise VirtualGpuError(
            f"PyTorch {build.version} is built for CUDA {build.cuda}; install a build for CUDA 12 or 13."
        )
    return build
