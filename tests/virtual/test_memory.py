import dataclasses
import os
import subprocess
import sys

import pytest

from sweep import virtual

from .conftest import Script

GIB = 1 << 30


def test_the_device_is_the_profile(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        p = torch.cuda.get_device_properties(0)
        answer = {"name": p.name, "capability": [p.major, p.minor], "memory": p.total_memory,
                  "sms": p.multi_processor_count, "l2": p.L2_cache_size, "free_and_total": torch.cuda.mem_get_info(),
                  "count": torch.cuda.device_count(), "bf16": torch.cuda.is_bf16_supported()}
        """,
        gpu="l4",
        gpus=3,
        other_processes_bytes=GIB,
    )
    profile = virtual.gpu("l4")
    free, total = answer["free_and_total"]
    assert answer["name"] == "NVIDIA L4"
    assert answer["capability"] == [8, 9]
    assert answer["bf16"]
    assert (answer["memory"], answer["sms"], answer["l2"]) == (total, profile.sm_count, profile.l2_bytes)
    assert total == profile.total_memory_bytes
    assert answer["count"] == 3
    assert free == total - GIB - profile.assumed_context_bytes


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_running_out_is_pytorchs_own_error(on_gpu: Script, allocator: str) -> None:
    answer = on_gpu(
        """
        import torch
        held = []
        try:
            while True:
                held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError as error:
            message = str(error)
        stats = torch.cuda.memory_stats()
        del held
        torch.cuda.empty_cache()
        answer = {"message": message, "allocated": stats["allocated_bytes.all.peak"], "ooms": stats["num_ooms"],
                  "left": torch.cuda.memory_reserved(), "free": torch.cuda.mem_get_info()[0]}
        """,
        gpu="t4",
        allocator=allocator,
    )
    assert (
        "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 14.74 GiB"
        in answer["message"]
    )
    assert "14.00 GiB is allocated by PyTorch" in answer["message"]
    assert (answer["allocated"], answer["ooms"], answer["left"]) == (14 * GIB, 1, 0)
    profile = virtual.gpu("t4")
    assert answer["free"] == profile.total_memory_bytes - profile.assumed_context_bytes


def test_total_memory_can_be_overridden(on_gpu: Script) -> None:
    answer = on_gpu(
        "import torch; answer = {'total': torch.cuda.mem_get_info()[1]}",
        gpu=dataclasses.replace(virtual.gpu("t4"), total_memory_bytes=3 * GIB),
    )
    assert answer == {"total": 3 * GIB}


def test_history_snapshot_and_summary(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        torch.cuda.memory._record_memory_history(max_entries=1000)
        kept = torch.zeros(5 << 20, dtype=torch.uint8, device="cuda")
        snapshot = torch.cuda.memory._snapshot()
        actions = [entry["action"] for entry in snapshot["device_traces"][0]]
        answer = {"actions": actions, "segments": [s["total_size"] for s in snapshot["segments"]],
                  "summary": torch.cuda.memory_summary()}
        """
    )
    assert answer["actions"] == ["segment_alloc", "alloc"]
    assert answer["segments"] == [20 << 20]
    assert "Allocated memory" in answer["summary"]
    assert "5120 KiB" in answer["summary"]


def test_two_devices_in_one_process(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        here = torch.tensor([1, 2, 3], device="cuda:0")
        there = here.to("cuda:1")
        big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
        answer = {"values": there.tolist(), "device": str(there.device),
                  "peer": torch.cuda.can_device_access_peer(0, 1),
                  "allocated": [torch.cuda.memory_allocated(d) for d in range(2)],
                  "free": [torch.cuda.mem_get_info(d)[0] for d in range(2)]}
        """,
        gpus=2,
    )
    assert answer["values"] == [1, 2, 3]
    assert answer["device"] == "cuda:1"
    assert answer["peer"]
    assert answer["allocated"] == [512, 512 + GIB]
    assert answer["free"][0] - answer["free"][1] == GIB


def test_pinned_memory_is_host_memory(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        host = torch.arange(1000).pin_memory()
        back = host.to("cuda", non_blocking=True).cpu()
        answer = {"pinned": host.is_pinned(), "plain": torch.arange(3).is_pinned(), "sum": int(host.sum()),
                  "same": bool((back == host).all())}
        """
    )
    assert answer == {"pinned": True, "plain": False, "sum": 499500, "same": True}


def test_host_memory_stays_flat_over_a_thousand_steps(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        layer = torch.nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters())
        sizes = []
        for step in range(1200):
            batch = torch.randn(8 + step % 5, 512).to("cuda")
            layer(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (200, 1199):
                sizes.append(resident())
        answer = {"grown": sizes[1] - sizes[0]}
        """
    )
    assert answer["grown"] < 4 << 20


@pytest.mark.usefixtures("needs_virtual_gpu")
def test_the_stream_ordered_backend() -> None:
    """PyTorch chooses its backend when it is imported, so this cell is a cold one."""
    script = """
import torch
held = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
first = torch.cuda.mem_get_info()[0]
del held
torch.cuda.empty_cache()
try:
    torch.empty(15 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(torch.cuda.get_allocator_backend(), torch.cuda.mem_get_info()[0] - first, "out of memory" in str(error))
"""
    environment = {**os.environ, **virtual.environment(virtual.gpu("t4"))}
    environment["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["cudaMallocAsync", str(3 << 30), "True"], done.stderr


def test_sharing_memory_between_processes_is_refused(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        from torch.multiprocessing.reductions import reduce_tensor
        try:
            reduce_tensor(torch.ones(1, device="cuda"))
            answer = {"error": None}
        except RuntimeError as error:
            answer = {"error": str(error)}
        """
    )
    assert "operation not supported on the virtual GPU: cudaIpcGetMemHandle" in answer["error"]


def test_managed_memory_stays_on_the_host(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import ctypes
        import torch
        torch.cuda.init()
        free = torch.cuda.mem_get_info()[0]
        runtime, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        codes = [runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(1 << 30), 1)]
        ctypes.memset(address, 1, 100)
        answer = {"taken": free - torch.cuda.mem_get_info()[0], "codes": [*codes, runtime.cudaFree(address)]}
        """
    )
    assert answer == {"taken": 0, "codes": [0, 0]}
