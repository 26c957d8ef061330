import os
import subprocess
import sys

import pytest

from sweep import virtual

from .conftest import Script


def test_a_call_that_is_not_known_fails_with_its_name(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        try:
            torch.linalg.svd(torch.ones(4, 4, device="cuda"))
            answer = {"error": None}
        except RuntimeError as error:
            answer = {"error": str(error)}
        """
    )
    assert "cusolverDn" in answer["error"]


def test_capturing_a_graph_is_refused(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        x = torch.ones(4, device="cuda")
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x + 1
            answer = {"error": None}
        except RuntimeError as error:
            answer = {"error": str(error)}
        """
    )
    assert "not supported on the virtual GPU: cudaStreamBeginCapture" in answer["error"]


@pytest.mark.parametrize("gpu", ["t4", "a100-80gb", "h100-80gb", "b200"])
def test_attention_runs_on_every_generation(on_gpu: Script, gpu: str) -> None:
    answer = on_gpu(
        """
        import torch
        q = torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        answer = {"grad": list(q.grad.shape), "peak": torch.cuda.memory_stats()["allocated_bytes.all.peak"]}
        """,
        gpu=gpu,
    )
    assert answer["grad"] == [2, 8, 512, 64]
    assert answer["peak"] < 30 << 20, "no 512 x 512 matrix of scores was made"


def test_convolutions_run(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        layer = torch.nn.Conv2d(3, 16, 3, padding=1, device="cuda")
        image = torch.randn(2, 3, 32, 32, device="cuda", requires_grad=True)
        layer(image).sum().backward()
        answer = {"grad": list(layer.weight.grad.shape), "sum": layer.weight.grad.sum().item()}
        """
    )
    assert answer == {"grad": [16, 3, 3, 3], "sum": 0.0}


COMPILED = """
import torch

@torch.compile
def gelu_and_norm(x, w):
    return torch.nn.functional.layer_norm(torch.nn.functional.gelu(x) * w, (512,))

x = torch.randn(64, 512, device="cuda", requires_grad=True)
w = torch.randn(512, device="cuda", requires_grad=True)
for _ in range(3):
    gelu_and_norm(x, w).sum().backward()
answer = {"grad": x.grad.abs().sum().item(), "peak": torch.cuda.memory_stats()["allocated_bytes.all.peak"]}
"""


@pytest.mark.slow
def test_compiled_kernels_load_and_launch_as_nothing(on_gpu: Script) -> None:
    first, second = (on_gpu(COMPILED) for _ in range(2))
    assert first["grad"] == 0.0
    assert first == second


TUNED = """
import torch
import triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 256, 1024) for w in (2, 4, 8)], key=["n"])
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

x = torch.ones(100000, device="cuda")
double[lambda meta: (triton.cdiv(100000, meta["BLOCK"]),)](x, 100000)
answer = {"best": str(double.best_config)}
"""


@pytest.mark.slow
def test_autotuning_always_chooses_the_same(on_gpu: Script) -> None:
    first, second = (on_gpu(TUNED) for _ in range(2))
    assert first == second
    assert "BLOCK: 64, num_warps: 2" in first["best"]


@pytest.mark.usefixtures("needs_virtual_gpu")
def test_a_library_with_its_own_runtime_is_refused() -> None:
    """The first thing that such a runtime does is to ask the driver for its tables."""
    code = """
import ctypes
table = ctypes.c_void_p()
print(ctypes.CDLL("libcuda.so.1").cuGetExportTable(ctypes.byref(table), None))
"""
    environment = {**os.environ, **virtual.environment(virtual.gpu("t4"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "801"
    assert "is not supported on the virtual device" in done.stderr


@pytest.mark.usefixtures("needs_virtual_gpu")
def test_a_lost_preload_is_noticed() -> None:
    environment = {**os.environ, **virtual.environment(virtual.gpu("t4"))}
    del environment["LD_PRELOAD"]
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "The virtual GPU is not in effect" in done.stderr
