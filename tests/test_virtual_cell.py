"""Whole cells on the virtual GPU, against a script written by hand and against arithmetic."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, read_model
from transformers import AutoConfig, AutoModelForCausalLM

from sweep import virtual
from sweep.launch import run_cell
from sweep.plan import Outcome, Search, SearchMethod, limits, next_batch_size, outcome_of
from sweep.record import CellRecord, Phase, RankRecord, Status
from sweep.spec import CellSpec
from sweep.store import Store

MakeSpec = Callable[..., CellSpec]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
VIRTUAL = {"kind": "virtual", "gpu": {"key": "a100-80gb"}}
BLOCK = 512
"""PyTorch's CUDA allocator rounds allocations up to a multiple of it (kMinBlockSize, CUDACachingAllocator.cpp)."""

pytestmark = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))


def rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def run(spec: CellSpec, folder: Path) -> tuple[CellRecord, RankRecord]:
    record = run_cell(spec, Store(folder), [])
    assert record.status is Status.OK, (record.reason, record.failure)
    (rank,) = record.ranks
    return record, rank


def tiny_parameter_sizes() -> list[int]:
    content = read_model("tiny")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(content["model_type"], **content["config"]))
    return [parameter.numel() for parameter in model.parameters()]


def test_the_optimizer_step_holds_weights_gradients_and_moments_to_the_byte(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    spec = make_spec(device=VIRTUAL, seq_len=64, gradient_clipping=None)
    _, rank = run(spec, tmp_path)
    sizes = tiny_parameter_sizes()
    weights_gradients_and_two_moments = 4 * sum(rounded(4 * size) for size in sizes)
    step_counters = len(sizes) * BLOCK  # torch.optim.AdamW(fused=True) keeps each `step` on the device
    rotary_frequencies = BLOCK  # a buffer: half a head's dimension in fp32
    tokens = rounded(8 * spec.seq_len)
    loss_and_its_gradient = 2 * BLOCK
    # One cuBLAS workspace for the thread of the forward pass and one for that of the backward pass, each of two
    # buffers of 4096 KiB and eight of 16 KiB (parseChosenWorkspaceSize in torch's CUDABlas.cpp).
    workspaces = 2 * (2 * 4096 + 8 * 16) * 1024
    assert rank.peaks[Phase.OPTIMIZER].allocated_bytes == (
        weights_gradients_and_two_moments
        + step_counters
        + rotary_frequencies
        + tokens
        + loss_and_its_gradient
        + workspaces
    )


SCRIPT = """
    import json, sys
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    content, checkpointing, accumulation = json.loads(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
    config = AutoConfig.for_model(content["model_type"], use_cache=False, **content["config"])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(3):
        for _ in range(accumulation):
            tokens = torch.randint(1, 4096, (4, 64)).cuda()
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(torch.cuda.memory_stats()["allocated_bytes.all.peak"], torch.cuda.memory_stats()["reserved_bytes.all.peak"])
"""


@pytest.mark.parametrize(("checkpointing", "accumulation"), [(False, 1), (True, 1), (False, 2)])
def test_the_peak_is_that_of_a_script_written_by_hand(
    make_spec: MakeSpec, tmp_path: Path, checkpointing: bool, accumulation: int
) -> None:
    spec = make_spec(
        device=VIRTUAL, seq_len=64, batch_size=4, gradient_checkpointing=checkpointing, accumulation=accumulation
    )
    _, rank = run(spec, tmp_path)
    arguments = [json.dumps(read_model("tiny")), str(checkpointing), str(accumulation)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments],
        env=os.environ | virtual.environment(virtual.gpus()["a100-80gb"]),
        capture_output=True,
        text=True,
        check=True,
    )
    allocated, reserved = map(int, done.stdout.split())
    assert rank.allocated_peak_bytes == allocated
    assert rank.reserved_peak_bytes == reserved


def zero_states(stage: int, world: int, parameters: int) -> int:
    """Bytes that a rank holds between two steps under mixed precision with Adam: ZeRO (arXiv:1910.02054), figure 1.

    Half-precision weights 2, gradients 2, and fp32 weights and two moments 12 bytes a parameter; stage 1 shards the
    last, stage 2 also the gradients, stage 3 also the weights. Between steps no gradient is left.
    """
    weights = 2 / world if stage == 3 else 2
    return round(parameters * (weights + 12 / world))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_shard_what_the_paper_says(make_spec: MakeSpec, tmp_path: Path, stage: int) -> None:
    model = read_model("llama3.2-1b")
    spec = make_spec(
        model=model,
        device=VIRTUAL,
        engine={"name": "deepspeed", "zero_stage": stage},
        world_size=8,
        precision="bf16",
        seq_len=128,
    )
    _, rank = run(spec, tmp_path)
    assert rank.parameters == model["parameters"]
    states = zero_states(stage, 8, model["parameters"])
    held = rank.peaks[Phase.FORWARD].allocated_bytes
    # The forward pass adds its activations, and DeepSpeed its buckets: stage 3 keeps a flat gradient shard too.
    assert states < held < states + 6 * 2**30


def test_memory_does_not_depend_on_the_run(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(device=VIRTUAL, engine={"name": "deepspeed", "zero_stage": 3}, world_size=8, precision="bf16")
    _, first = run(spec, tmp_path / "a")
    _, second = run(spec, tmp_path / "b")
    assert first.peaks == second.peaks
    assert first.nvml is not None
    assert second.nvml is not None
    assert first.nvml.used_peak_bytes == second.nvml.used_peak_bytes


def test_a_virtual_record_holds_no_time_and_says_who_played(make_spec: MakeSpec, tmp_path: Path) -> None:
    record, rank = run(make_spec(device=VIRTUAL, world_size=8), tmp_path)
    assert record.seconds_per_iteration is None
    assert record.tokens_per_second is None
    assert (rank.rank, rank.device_name, rank.loss) == (0, "NVIDIA A100-SXM4-80GB", None)
    assert rank.capacity_bytes == virtual.gpus()["a100-80gb"].total_memory_bytes
    assert rank.nvml is not None
    assert rank.nvml.used_peak_bytes > (rank.reserved_peak_bytes or 0)


@pytest.mark.parametrize("expandable", [False, True])
def test_the_allocator_runs_as_asked(make_spec: MakeSpec, tmp_path: Path, expandable: bool) -> None:
    _, rank = run(make_spec(device=VIRTUAL, expandable_segments=expandable), tmp_path)
    assert rank.allocator_settings is not None
    assert rank.allocator_settings["expandable_segments"] is expandable


def test_a_full_device_is_an_oom_with_pytorchs_own_figures(make_spec: MakeSpec, tmp_path: Path) -> None:
    gpu = {"key": "a100-80gb", "total_memory_bytes": 2 * 2**30}
    record = run_cell(make_spec(device={"kind": "virtual", "gpu": gpu}, batch_size=512), Store(tmp_path), [])
    assert record.status is Status.OOM
    failure = record.failure
    assert failure is not None
    assert failure.kind == "OutOfMemoryError"
    assert failure.message.startswith("CUDA out of memory. Tried to allocate")
    assert failure.requested_bytes is not None
    assert failure.free_bytes is not None
    assert failure.requested_bytes > failure.free_bytes
    assert failure.phase in (Phase.FORWARD, Phase.BACKWARD)


@pytest.mark.slow
def test_a_sweep_on_the_virtual_gpu_until_out_of_memory(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep("model=llama3.2-1b", "device=virtual", "gpu=rtx5090", "engine=ddp", "world_size=1", "grid=quick")
    assert done.returncode == 0, done.stderr
    records: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in tmp_path.glob("results/llama3.2-1b-virtual/cells/*/record.json")
    ]
    for checkpointing in (False, True):
        outcomes = {
            record["spec"]["batch_size"]: record["status"]
            for record in records
            if record["spec"]["gradient_checkpointing"] is checkpointing
        }
        largest = max((size for size, status in outcomes.items() if status == "ok"), default=0)
        assert outcomes[largest + 1] in ("oom", "thrashing")
    assert "time is not measured" in done.stdout
    assert str(REPOSITORY) not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_searches_find_the_same_limit(make_spec: MakeSpec, tmp_path: Path, checkpointing: bool) -> None:
    gpu = {"key": "a100-80gb", "total_memory_bytes": 2 * 2**30}
    spec = make_spec(
        device={"kind": "virtual", "gpu": gpu},
        seq_len=512,
        gradient_checkpointing=checkpointing,
        expandable_segments=True,
        measured_iterations=1,
    )
    found, cells = set(), {}
    for method in SearchMethod:
        outcomes: dict[int, Outcome] = {}
        while (size := next_batch_size(outcomes, Search(method=method, points=0))) is not None:
            outcomes[size] = outcome_of(run_cell(replace(spec, batch_size=size), Store(tmp_path), []))
        assert limits(outcomes).settled
        found.add(limits(outcomes))
        cells[method] = len(outcomes)
    # With checkpointing memory is cut so that 53 fails for fragmentation and 54 fits: both limits are true there.
    assert len(found) == 1 or checkpointing
    assert cells[SearchMethod.FIT] < cells[SearchMethod.ASCEND]
