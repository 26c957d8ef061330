"""Every engine with every precision, and what each holds in memory; on the CPU, that all of them train alike."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, read_model

from sweep import virtual
from sweep.launch import run_cell
from sweep.record import CellRecord, Phase, Status
from sweep.spec import CellSpec, Precision
from sweep.store import Store

MakeSpec = Callable[..., CellSpec]
ZERO = [{"name": "deepspeed", "zero_stage": stage} for stage in range(4)]
ENGINES: list[tuple[dict[str, Any], int]] = [
    ({"name": "single"}, 1),
    ({"name": "ddp"}, 2),
    ({"name": "fsdp2"}, 2),
    ({"name": "device_map"}, 2),
    *[(engine, 2) for engine in ZERO],
]
WORKSPACES = 2 * (2 * 4096 + 8 * 16) * 1024
"""cuBLAS', one for the thread of the forward pass and one for the backward pass's (parseChosenWorkspaceSize)."""
PARAMETERS = read_model("tiny")["parameters"]
needs_virtual_gpu = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))


def on(gpu: str) -> dict[str, Any]:
    return {"kind": "virtual", "gpu": {"key": gpu}}


def ran(spec: CellSpec, folder: Path) -> CellRecord:
    record = run_cell(spec, Store(folder), [])
    assert record.status is Status.OK, (record.reason, record.failure)
    return record


@pytest.mark.slow
@needs_virtual_gpu
@pytest.mark.parametrize(("engine", "world"), ENGINES, ids=lambda value: str(value))
def test_every_precision_with_and_without_checkpointing_and_accumulation(
    make_spec: MakeSpec, tmp_path: Path, engine: dict[str, Any], world: int
) -> None:
    """Three steps each; what the first of them saw of the configuration is checked in the training process."""
    for precision, checkpointing, accumulation in itertools.product(Precision, (False, True), (1, 2)):
        spec = make_spec(
            engine=engine,
            device=on("a100-80gb"),
            world_size=world,
            precision=precision.value,
            gradient_checkpointing=checkpointing,
            accumulation=accumulation,
        )
        record = run_cell(spec, Store(tmp_path), [])
        if engine == ZERO[0] and precision is Precision.BF16_PURE:
            assert record.status is Status.UNSUPPORTED
            assert "stages 1, 2 and 3 alone" in str(record.reason)
            continue
        assert record.status is Status.OK, (precision, checkpointing, accumulation, record.reason, record.failure)
        assert record.ranks[0].optimizer_steps == 3


@needs_virtual_gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"name": "fsdp2"}, "world_size": 2, "accumulation": 2},
        {"engine": {"name": "device_map"}, "world_size": 2, "lora": {"rank": 4}, "gradient_checkpointing": True},
        {"engine": ZERO[3] | {"zero_init": False, "optimizer_offload": True}, "world_size": 2, "precision": "bf16"},
        {"engine": {"name": "single"}, "attention": "eager", "optimizer": "adafactor"},
    ],
    ids=lambda changes: changes["engine"]["name"],
)
def test_an_engine_runs(make_spec: MakeSpec, tmp_path: Path, changes: dict[str, Any]) -> None:
    record = ran(make_spec(device=on("a100-80gb"), **changes), tmp_path)
    assert record.ranks[0].optimizer_steps == 3


@pytest.mark.slow
@needs_virtual_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize(
    ("engine", "world"),
    [({"name": "single"}, 1), ({"name": "ddp"}, 2), ({"name": "fsdp2"}, 2), ({"name": "fsdp2"}, 4)],
    ids=lambda value: str(value),
)
def test_the_optimizer_step_holds_what_the_formula_says(
    make_spec: MakeSpec, tmp_path: Path, engine: dict[str, Any], world: int, precision: str
) -> None:
    """Parameters, gradients and AdamW's two moments, in the dtype that is stored: 4 x 4 or 4 x 2 bytes a parameter.

    FSDP2 shards all four by the world size (docs.pytorch.org, `fully_shard`); DistributedDataParallel keeps its
    all-reduce buckets beside the gradients (its documentation, `gradient_as_bucket_view`). The residue beside cuBLAS'
    workspaces is the batch, the step counters, rounding to 512 bytes and NCCL's tensors: below 1 MiB.
    """
    spec = make_spec(
        engine=engine,
        device=on("a100-80gb"),
        world_size=world,
        precision=precision,
        seq_len=8,
        gradient_clipping=None,
    )
    (rank,) = ran(spec, tmp_path).ranks
    size = 2 if precision == "bf16_pure" else 4
    copies = 5 if engine["name"] == "ddp" else 4
    formula = copies * size * PARAMETERS // (world if engine["name"] == "fsdp2" else 1)
    residue = rank.peaks[Phase.OPTIMIZER].allocated_bytes - formula - WORKSPACES
    assert 0 <= residue < 2**20


@pytest.mark.slow
@needs_virtual_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_holds_what_the_paper_says(
    make_spec: MakeSpec, tmp_path: Path, stage: int, world: int, precision: str
) -> None:
    """ZeRO (arXiv:1910.02054), figure 1: sharded by stage 1 the master weights, two moments, and the gradients in their
    dtype as the optimizer takes them; by stage 2 the gradients; by stage 3 the weights.

    The residue is DeepSpeed's: flat copies while shards are gathered and gradients averaged, buckets, and with stage 3
    small parameters that stay whole. It is not taken apart further than 2.5 bytes a parameter.
    """
    weight, state = {"fp32": (4, 4), "bf16": (2, 4), "bf16_pure": (2, 2)}[precision]
    spec = make_spec(
        engine={"name": "deepspeed", "zero_stage": stage, "reduce_bucket_size": 100_000},
        device=on("a100-80gb"),
        world_size=world,
        precision=precision,
        seq_len=8,
        gradient_clipping=None,
    )
    (rank,) = ran(spec, tmp_path).ranks
    sharded = 3 * state + (state + weight if precision == "bf16" else weight)
    formula = PARAMETERS * ((weight / world if stage == 3 else weight) + sharded / world)
    residue = rank.peaks[Phase.OPTIMIZER].allocated_bytes - WORKSPACES - formula
    assert 0 <= residue < 2.5 * PARAMETERS


@pytest.mark.slow
@needs_virtual_gpu
def test_what_zero_init_and_gathered_linear_weights_cost(make_spec: MakeSpec, tmp_path: Path) -> None:
    """Llama-3-8B, ZeRO-3 on eight devices, no checkpointing.

    Without `zero.Init` the whole model is built first: 2 bytes a parameter instead of a shard and the largest weight,
    which is gathered to be sharded. Where linear layers then keep their gathered weights for the backward pass, as
    DeepSpeed did outside of `zero.Init`, all layers but the two that are gathered anyway at the peak are added.
    """
    model = read_model("llama3-8b")
    size, world = model["config"], 8

    def peaks(**options: Any) -> dict[Phase, int]:
        engine = {"name": "deepspeed", "zero_stage": 3, **options}
        spec = make_spec(
            model=model, engine=engine, device=on("a100-80gb"), world_size=world, precision="bf16", seq_len=2048
        )
        (rank,) = ran(spec, tmp_path).ranks
        return {phase: peak.allocated_bytes for phase, peak in rank.peaks.items()}

    inside, outside = peaks(), peaks(zero_init=False)
    kept = peaks(zero_init=False, memory_efficient_linear=False)
    whole, largest = 2 * model["parameters"], 2 * size["vocab_size"] * size["hidden_size"]
    expected = whole - (whole / world + largest)
    assert outside[Phase.LOAD] - inside[Phase.LOAD] == pytest.approx(expected, rel=0.001)
    assert outside[Phase.FORWARD] == inside[Phase.FORWARD]
    hidden, heads = size["hidden_size"], size["num_key_value_heads"] / size["num_attention_heads"]
    layer = 2 * (2 * hidden**2 + 2 * hidden**2 * heads + 3 * hidden * size["intermediate_size"])
    assert kept[Phase.FORWARD] - outside[Phase.FORWARD] == (size["num_hidden_layers"] - 2) * layer


@pytest.mark.slow
@needs_virtual_gpu
def test_adapters_of_an_8b_model_fit_on_24_gb(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(
        model=read_model("llama3-8b"),
        engine={"name": "single"},
        device=on("l4"),
        precision="bf16",
        seq_len=2048,
        gradient_checkpointing=True,
        lora={"rank": 8},
    )
    (rank,) = ran(spec, tmp_path).ranks
    weights = 2 * spec.model.parameters if spec.model.parameters else 0
    assert weights < (rank.allocated_peak_bytes or 0) < rank.capacity_bytes
    assert rank.in_effect is not None
    assert rank.in_effect.parameter_dtypes == ("float32",), "the adapters; what is frozen is in bf16"


@needs_virtual_gpu
def test_a_process_with_several_devices_reports_each(make_spec: MakeSpec, tmp_path: Path) -> None:
    record = ran(make_spec(engine={"name": "device_map"}, device=on("a100-80gb"), world_size=2, batch_size=2), tmp_path)
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert len({rank.device_uuid for rank in record.ranks}) == 2
    assert all((rank.allocated_peak_bytes or 0) > 2 * PARAMETERS for rank in record.ranks)
    assert record.largest_rank is not None
    assert record.largest_rank.reserved_peak_bytes == max(rank.reserved_peak_bytes or 0 for rank in record.ranks)
    assert record.spec.effective_batch_size == 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_all_engines_train_as_plain_pytorch_does(world: int) -> None:
    """Batch 4 in one pass and in four passes of 1: gradients and parameters of two steps, to fp32's tolerance."""
    engines = [
        *([{"name": "single"}] if world == 1 else []),
        {"name": "ddp"},
        {"name": "fsdp2"},
        {"name": "fsdp2", "sync_each_micro_batch": True, "reshard_after_forward": False},
        *ZERO,
        ZERO[3] | {"zero_init": False},
    ]
    script = str(Path(__file__).with_name("accumulation_script.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, script, json.dumps(engines), str(world)],
        env=os.environ
        | {
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("answer: ")[2].splitlines()[0])
    assert len(found) == len(engines)
    for engine, by_accumulation in zip(engines, found, strict=True):
        for accumulation, apart in by_accumulation.items():
            assert apart["moved"] > 0.01, "a step that changes nothing would compare equal"
            assert apart["gradients"] < 5e-7, (engine, accumulation, apart)
            assert apart["parameters"] < 5e-7, (engine, accumulation, apart)
