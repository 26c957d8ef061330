"""The virtual GPU: PyTorch's own CUDA memory behaviour on a machine without a GPU.

>>> from sweep import virtual
>>> variables = virtual.environment(virtual.gpu("a100-80gb"), world_size=8)
>>> subprocess.run([sys.executable, "train.py"], env={**os.environ, **variables})

Nothing here imports PyTorch or any other part of ``sweep``.
"""

from sweep.virtual.environment import DEFAULT_LAG, LAGS, MAX_GPUS, check, environment, fingerprint, gpu_variables
from sweep.virtual.errors import VirtualGpuError
from sweep.virtual.profiles import ASSUMED_CONTEXT_BYTES, GpuProfile, gpu, gpus

__all__ = [
    "ASSUMED_CONTEXT_BYTES",
    "DEFAULT_LAG",
    "LAGS",
    "MAX_GPUS",
    "GpuProfile",
    "VirtualGpuError",
    "check",
    "environment",
    "fingerprint",
    "gpu",
    "gpu_variables",
    "gpus",
]
