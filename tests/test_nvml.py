"""Device memory as the driver sees it: the right device, by UUID; sampled; of old drivers and of parts of a GPU."""

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY

from sweep import environment, nvml, virtual
from sweep.launch import run_cell
from sweep.measure import nvml as sampling
from sweep.measure.nvml import NvmlSampler, trace_of
from sweep.record import NvmlMemory, Phase, Status
from sweep.spec import CellSpec
from sweep.store import Store

MakeSpec = Callable[..., CellSpec]
VIRTUAL = {"kind": "virtual", "gpu": {"key": "a100-80gb"}}
needs_virtual_gpu = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))


def on_two_gpus(program: str, visible: str | None = None) -> str:
    """What a program prints that sees two virtual GPUs."""
    variables = os.environ | virtual.environment(virtual.gpu("a100-80gb"), gpus=2)
    variables["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def listed_uuids() -> list[str]:
    """In NVML's order."""
    return on_two_gpus("from sweep.nvml import Nvml\nfor d in Nvml().devices(): print(d.uuid)").split()


HELD_BY_RANK = """
    import sys, torch
    from sweep.measure.nvml import NvmlSampler, trace_of
    from sweep.nvml import Nvml
    first, second = (device.uuid for device in Nvml().devices())
    order = {"": [first, second], "1,0": [second, first]}.get(VISIBLE, [second, first])
    for rank in range(2):
        with NvmlSampler() as sampler:
            device = torch.device("cuda", rank)
            uuid = sampler.bind(str(torch.cuda.get_device_properties(device).uuid))
            held = torch.empty((rank + 1) << 30, dtype=torch.uint8, device=device)
            sampler.finish()
            print(order.index(uuid), sampler.result.used_peak_bytes >> 30, sampler.result.info_version)
            del held
            torch.cuda.empty_cache()
"""


@needs_virtual_gpu
@pytest.mark.parametrize("order", ["as they are", "reversed", "by UUID"])
def test_nvml_follows_the_device_that_the_rank_uses(order: str) -> None:
    listed = listed_uuids()
    visible = {"as they are": "", "reversed": "1,0", "by UUID": ",".join(reversed(listed))}[order]
    program = textwrap.dedent(HELD_BY_RANK).replace("VISIBLE", repr(visible))
    printed = on_two_gpus(program, visible or None)
    # Rank 0 holds 1 GiB on the first visible device, rank 1 holds 2 GiB on the second; the context is below 1 GiB.
    assert printed.splitlines() == ["0 1 2", "1 2 2"]


@needs_virtual_gpu
@pytest.mark.parametrize("order", ["1,0", "by UUID", "1", "7", "0,7,1", ""])
def test_visible_gpus_are_in_cudas_order(order: str) -> None:
    program = """
        from sweep import environment
        from sweep.nvml import Nvml
        everything = [device.uuid for device in Nvml().devices()]
        print([everything.index(gpu.uuid) for gpu in environment.visible_gpus()])
    """
    listed = listed_uuids()
    visible = f"{listed[1]},{listed[0]}" if order == "by UUID" else order
    wanted = {"1,0": [1, 0], "by UUID": [1, 0], "1": [1], "7": [], "0,7,1": [0], "": []}[order]
    assert on_two_gpus(program, visible).strip() == str(wanted)


@needs_virtual_gpu
def test_others_share_of_the_device_is_told_apart(make_spec: MakeSpec, tmp_path: Path) -> None:
    gpu = {"key": "a100-80gb", "other_processes_bytes": 3 << 30}
    record = run_cell(make_spec(device={"kind": "virtual", "gpu": gpu}), Store(tmp_path), [])
    assert record.status is Status.OK, record.reason
    nvml = record.ranks[0].nvml
    assert nvml is not None
    assert nvml.baseline_bytes == nvml.other_processes_bytes == 3 << 30
    assert nvml.process_bytes == nvml.used_peak_bytes
    assert nvml.samples > 0


@needs_virtual_gpu
def test_memory_over_time_is_kept_with_the_phases(make_spec: MakeSpec, tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = run_cell(make_spec(device=VIRTUAL), store, [])
    nvml = record.ranks[0].nvml
    assert nvml is not None
    assert nvml.trace is None, "a cell's record stays small"
    (trace,) = store.cell(record.cell_id).read_traces().values()
    assert trace.seconds[0] == 0
    assert trace.used_bytes[0] == nvml.baseline_bytes
    assert max(trace.used_bytes) == nvml.peak_bytes > nvml.baseline_bytes
    assert len(trace.seconds) == len(trace.used_bytes) > 2
    assert list(trace.seconds) == sorted(trace.seconds)
    assert trace.phases[0].phase is Phase.LOAD
    assert {start.phase for start in trace.phases} <= set(Phase)
    starts = [start.seconds for start in trace.phases]
    assert starts == sorted(starts)
    assert 0 < starts[0] <= starts[-1] <= trace.seconds[-1]


def test_a_thinned_trace_keeps_peaks_and_stays_small() -> None:
    samples = [(float(i), i % 97) for i in range(50_000)]
    samples[12_345] = (12_345.0, 10**12)
    phases = [(i / 10, list(Phase)[i % 5]) for i in range(500_000)]
    trace = trace_of(samples, phases, points=300)
    assert max(trace.used_bytes) == 10**12
    assert (trace.seconds[0], trace.seconds[-1]) == (0.0, 49_999.0)
    assert 100 < len(trace.phases) <= 300
    # Equal figures in a row are a line: its ends say it all.
    flat = trace_of([(i / 10, 5 if i < 500 else 8) for i in range(1000)], [], points=1000)
    assert list(zip(flat.seconds, flat.used_bytes, strict=True)) == [(0.0, 5), (49.9, 5), (50.0, 8), (99.9, 8)]
    assert trace_of([(0.0, 7)], []).used_bytes == (7,)


def test_what_nvml_does_not_show_is_unknown_and_not_zero() -> None:
    hidden = NvmlMemory(baseline_bytes=1, peak_bytes=5, samples=1, period_seconds=0.02)
    assert (hidden.process_bytes, hidden.other_processes_bytes) == (None, None)
    sampler = NvmlSampler(enabled=False)
    assert (sampler.bind("GPU-1"), sampler.free_bytes()) == (None, None)
    assert sampler.result is None


OLD_DRIVER = """
    from sweep import nvml
    from sweep.nvml import NvmlError
    newer = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3")
    call, has = nvml.Nvml.call, nvml.Nvml.has

    def refuse(self, function, *arguments):
        if function in newer:
            raise NvmlError(f"{function}: this driver does not have it", None)
        call(self, function, *arguments)

    if OLD:
        nvml.Nvml.call = refuse
        nvml.Nvml.has = lambda self, function: function not in newer and has(self, function)
    import os, torch
    from sweep.measure.nvml import NvmlSampler
    with NvmlSampler() as sampler:
        sampler.bind(str(torch.cuda.get_device_properties(0).uuid))
        held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
        sampler.finish()
    result = sampler.result
    print(result.info_version, result.baseline_bytes, result.used_peak_bytes, result.process_bytes)
    device = nvml.Nvml().devices()[0]
    print([process.pid for process in device.processes()] == [os.getpid()], device.total_bytes(), device.free_bytes())
"""


@needs_virtual_gpu
def test_an_older_driver_is_read_in_version_1_and_the_record_says_so() -> None:
    new, old = (
        [line.split() for line in on_two_gpus(textwrap.dedent(OLD_DRIVER).replace("OLD:", f"{is_old}:")).splitlines()]
        for is_old in (False, True)
    )
    profile = virtual.gpu("a100-80gb")
    reserved = (profile.nvml_total_bytes or 0) - profile.total_memory_bytes
    assert reserved > 0
    assert (new[0][0], new[0][1]) == ("2", "0")
    # The driver's own share is in the baseline: what the process added comes out the same.
    assert (old[0][0], old[0][1]) == ("1", str(reserved))
    assert old[0][2:] == new[0][2:]
    assert int(new[0][2]) > 1 << 30
    assert old[1] == new[1]
    assert new[1][0] == "True"


class PartitionedGpu:
    """NVML's answers for one GPU with an instance (MIG): the instance has its own UUID, memory and name."""

    used = 0

    def devices(self) -> list["InstanceOrGpu"]:
        return [InstanceOrGpu("GPU-whole", 33 << 30)]

    def device(self, uuid: str) -> "InstanceOrGpu":
        if uuid != "MIG-part":
            raise nvml.NvmlError(f"{uuid}: no such device", 6)
        return InstanceOrGpu(uuid, PartitionedGpu.used)


class InstanceOrGpu:
    name, memory_info_version = "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 2

    def __init__(self, uuid: str, used: int) -> None:
        self.uuid, self._used = uuid, used

    def used_bytes(self) -> int:
        return PartitionedGpu.used if self.uuid == "MIG-part" else self._used

    def processes(self) -> list[nvml.Process]:
        return []


def test_an_instance_of_a_gpu_is_followed_by_its_own_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "Nvml", PartitionedGpu)
    monkeypatch.setattr(environment, "Nvml", PartitionedGpu)
    monkeypatch.setattr(PartitionedGpu, "used", 1 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-part")
    assert [gpu.uuid for gpu in environment.visible_gpus()] == ["MIG-part"]
    with NvmlSampler(period_seconds=60) as sampler:
        PartitionedGpu.used = 3 << 30  # CUDA's context, before it tells which device it is
        assert sampler.bind("part") == "MIG-part"
        PartitionedGpu.used = 7 << 30
        sampler.finish()
    result = sampler.result
    assert result is not None
    assert (result.baseline_bytes, result.peak_bytes, result.process_bytes) == (1 << 30, 7 << 30, None)


EACH_ITS_OWN = """
    import torch
    from sweep.measure.memory import CudaCounters
    held = [torch.empty((rank + 1) << 20, dtype=torch.uint8, device=f"cuda:{rank}") for rank in range(2)]
    for rank in range(2):
        counters = CudaCounters(torch.device("cuda", rank))
        torch.cuda.set_device(1 - rank)  # which device is current does not matter
        peak = counters.read()
        print(peak.allocated_bytes >> 20, counters.reserved() >> 20, counters.segments())
        counters.reset()
    del held[1]
    print(CudaCounters(torch.device("cuda", 0)).read().allocated_bytes >> 20)
"""


@needs_virtual_gpu
def test_a_rank_reports_its_own_device_whichever_is_current() -> None:
    # Up to 1 MiB the allocator takes 2 MiB from the device, above 20 MiB.
    assert on_two_gpus(EACH_ITS_OWN).splitlines() == ["1 2 1", "2 20 1", "1"]
