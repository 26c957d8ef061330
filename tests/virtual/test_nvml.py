import json
import os
import subprocess
import sys

import pytest

from sweep import virtual

from .conftest import Script


def test_nvidia_ml_py_reads_the_same_books(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import os
        import pynvml as nvml
        import torch
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(1)
        before = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        idle = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
        first = nvml.nvmlDeviceGetMemoryInfo(handle)
        second = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        uuid = "GPU-" + str(torch.cuda.get_device_properties(1).uuid)
        try:
            nvml.nvmlDeviceGetUtilizationRates(handle)
            utilisation = "supported"
        except nvml.NVMLError_NotSupported:
            utilisation = "not supported"
        bus = nvml.nvmlDeviceGetPciInfo(handle).busId
        answer = {
            "count": nvml.nvmlDeviceGetCount(), "name": nvml.nvmlDeviceGetName(handle), "idle": idle,
            "uuids_agree": uuid == nvml.nvmlDeviceGetUUID(handle), "utilisation": utilisation,
            "by_uuid": nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(uuid)),
            "by_bus": nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByPciBusId(bus)),
            "before": before.used, "first": [first.total, first.used],
            "second": [second.total, second.reserved, second.used],
            "mine": [p.pid == os.getpid() for p in processes], "used": [p.usedGpuMemory for p in processes],
            "cuda": nvml.nvmlSystemGetCudaDriverVersion(), "driver": nvml.nvmlSystemGetDriverVersion(),
        }
        """,
        gpus=2,
        other_processes_bytes=5 << 20,
    )
    profile = virtual.gpu("a100-80gb")
    used = profile.assumed_context_bytes + (1 << 30)
    reserved = (profile.nvml_total_bytes or 0) - profile.total_memory_bytes
    assert answer["count"] == 2
    assert answer["name"] == profile.name
    assert answer["uuids_agree"]
    assert answer["by_uuid"] == answer["by_bus"] == 1
    assert answer["utilisation"] == "not supported"
    assert answer["idle"] == 0
    assert answer["mine"] == [True]
    assert answer["used"] == [used]
    assert answer["before"] == 5 << 20
    assert answer["second"] == [profile.nvml_total_bytes, reserved, used + (5 << 20)]
    assert answer["first"] == [profile.nvml_total_bytes, used + (5 << 20) + reserved]
    assert answer["cuda"] >= 12000
    assert answer["driver"]


VISIBLE = """
import json
import pynvml as nvml
import torch
nvml.nvmlInit()
handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
count = torch.cuda.device_count()
held = [torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{i}") for i in range(count)]
used = [nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used >> 30 for handle in handles]
uuids = ["GPU-" + str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
indices = [nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
print(json.dumps({"used": used, "indices": indices}))
"""


@pytest.mark.usefixtures("needs_virtual_gpu")
@pytest.mark.parametrize(
    ("visible", "used", "indices"),
    [
        ("2,0", [1, 0, 1, 0], [2, 0]),
        ("3", [0, 0, 0, 1], [3]),
        ("1,9,2", [0, 1, 0, 0], [1]),
        ("GPU-76677075-0000-0000-0000-000000000002", [0, 1, 0, 0], [1]),
        ("", [0, 0, 0, 0], []),
    ],
)
def test_visible_devices_change_the_numbers_of_cuda_but_not_of_nvml(
    visible: str, used: list[int], indices: list[int]
) -> None:
    environment = {**os.environ, **virtual.environment(virtual.gpu("a100-80gb"), gpus=4)}
    environment["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run([sys.executable, "-c", VISIBLE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"used": used, "indices": indices}
