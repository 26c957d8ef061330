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
import torch
from conftest import REPOSITORY, read_model
from transformers import LlamaConfig, LlamaForCausalLM

from sweep import models, virtual
from sweep.launch import run_cell
from sweep.record import CellRecord, Phase, Status
from sweep.spec import CellSpec, Precision, to_json
from sweep.store import Store
from sweep.worker.model import build_from, configuration_of

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
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
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
        {"engine": {"name": "fsdp2"}, "world_size": 2, "accumulation": 2, "precision": "bf16"},
        {"engine": {"name": "device_map"}, "world_size": 2, "lora": {"rank": 4}, "gradient_checkpointing": True},
        {"engine": ZERO[3] | {"zero_init": False, "optimizer_offload": True}, "world_size": 2, "precision": "bf16"},
        {"engine": {"name": "single"}, "attention": "eager", "optimizer": "adafactor"},
    ],
    ids=lambda changes: changes["engine"]["name"],
)
def test_an_engine_runs(make_spec: MakeSpec, tmp_path: Path, changes: dict[str, Any]) -> None:
    (rank, *_) = ran(make_spec(device=on("a100-80gb"), **changes), tmp_path).ranks
    assert rank.optimizer_steps == 3
    assert rank.in_effect is not None
    assert rank.in_effect.gradient_dtypes == ("bfloat16" if changes["engine"]["name"] == "deepspeed" else "float32",)


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
@pytest.mark.parametrize(("precision", "bytes_each"), [("fp32", 16), ("bf16", 20), ("fp16", 20)])
def test_zero_0_holds_gradients_twice(make_spec: MakeSpec, tmp_path: Path, precision: str, bytes_each: int) -> None:
    """Nothing is sharded. In mixed precision DeepSpeed (`runtime/fp16/unfused_optimizer.py`) casts the gradients for
    its step and keeps the half ones: 2 + 2 bytes beside masters, their gradients and two moments of 4 each."""
    spec = make_spec(
        engine=ZERO[0], device=on("a100-80gb"), world_size=2, precision=precision, seq_len=8, gradient_clipping=None
    )
    (rank,) = ran(spec, tmp_path).ranks
    residue = rank.peaks[Phase.OPTIMIZER].allocated_bytes - WORKSPACES - bytes_each * PARAMETERS
    assert 0 <= residue < 2**20


def zero_bytes(spec: CellSpec) -> int:
    """Rank 0 at the highest moment of DeepSpeed's step, without cuBLAS: what ZeRO shards, and what DeepSpeed adds.

    ZeRO (arXiv:1910.02054), figure 1: the master weights and two moments are sharded by stages 1 and 2, the weights by
    stage 3. The rest is from DeepSpeed 0.19, `runtime/zero/stage_1_and_2.py` and `stage3.py`:

    - master weights exist in fp32 as well (`single_partition_of_fp32_groups`, `fp32_partitioned_groups_flat`);
    - reduced gradients stay in the weights' dtype. Stages 1 and 2 copy those of every parameter that reaches into the
      rank's partition, whole (`grads_in_partition`); stage 3 has one buffer of the partition's size
      (`grad_partitions_flat_buffer`);
    - stage 3 keeps its reduction bucket (`ipg_buckets`); stages 1 and 2 let theirs go after the backward pass;
    - for the norm one gradient after the other is copied to fp64 (`get_norm_dtype`), which with large embeddings is
      more than the step itself needs: gradients flattened, and those cast to the masters' dtype where it differs.
    """
    with torch.device("meta"):
        sizes = [p.numel() for p in build_from(configuration_of(spec.model), spec.model, torch.float32).parameters()]
    weight, state = {"fp32": (4, 4), "bf16": (2, 4), "bf16_pure": (2, 2)}[spec.precision.value]
    world = spec.world_size
    if spec.engine.zero_stage == 3:
        shards = [-(-size // world) for size in sizes]  # each parameter is cut, and padded
        partition, largest = sum(shards), max(shards)
        weights, gradients = weight * partition, weight * partition
        bucket = weight * (spec.engine.reduce_bucket_size or 0)
    else:
        partition = 2 * -(-sum(sizes) // (2 * world))  # all of them flat, cut once: `nccl_start_alignment_factor`
        starts = list(itertools.accumulate(sizes, initial=0))[:-1]
        owned = [size for start, size in zip(starts, sizes, strict=True) if start < partition]
        weights, gradients, largest, bucket = weight * partition * world, weight * sum(owned), max(owned), 0
    cast = state if state != weight else 0
    return weights + 3 * state * partition + gradients + bucket + max(8 * largest, (weight + cast) * partition)


@pytest.mark.slow
@needs_virtual_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_holds_what_the_paper_and_deepspeeds_source_say(
    make_spec: MakeSpec, tmp_path: Path, stage: int, world: int, precision: str
) -> None:
    """SmolLM2-135M, to 4 MiB of 400 to 1,900. That residue are the batch, norms and small tensors, and what the
    allocator does not split off: up to 1 MiB of each of the few large blocks."""
    spec = make_spec(
        model=read_model("smollm2-135m"),
        engine={"name": "deepspeed", "zero_stage": stage, "reduce_bucket_size": 1_000_000},
        device=on("a100-80gb"),
        world_size=world,
        precision=precision,
        seq_len=8,
        gradient_clipping=None,
    )
    (rank,) = ran(spec, tmp_path).ranks
    residue = rank.peaks[Phase.OPTIMIZER].allocated_bytes - WORKSPACES - zero_bytes(spec)
    assert 0 <= residue < 4 * 2**20


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
def test_eager_attention_keeps_every_score(make_spec: MakeSpec, tmp_path: Path) -> None:
    """Per layer, head and pair of tokens: the softmax in fp32, kept for its own backward pass, and its rounded copy,
    kept for the product with the values (transformers' `eager_attention_forward`). SDPA's kernels keep neither."""
    length = 2048

    def peak(attention: str) -> int:
        spec = make_spec(
            engine={"name": "single"}, device=on("a100-80gb"), precision="bf16", seq_len=length, attention=attention
        )
        return ran(spec, tmp_path).ranks[0].peaks[Phase.FORWARD].allocated_bytes

    config = read_model("tiny")["config"]
    scores = config["num_hidden_layers"] * config["num_attention_heads"] * length**2
    assert peak("eager") - peak("sdpa") == pytest.approx((4 + 2) * scores, rel=0.05)


@needs_virtual_gpu
def test_a_process_with_several_devices_reports_each(make_spec: MakeSpec, tmp_path: Path) -> None:
    record = ran(make_spec(engine={"name": "device_map"}, device=on("a100-80gb"), world_size=2, batch_size=2), tmp_path)
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert len({rank.device_uuid for rank in record.ranks}) == 2
    assert all((rank.allocated_peak_bytes or 0) > 2 * PARAMETERS for rank in record.ranks)
    assert record.largest_rank is not None
    assert record.largest_rank.reserved_peak_bytes == max(rank.reserved_peak_bytes or 0 for rank in record.ranks)
    assert record.spec.effective_batch_size == 2


@needs_virtual_gpu
def test_what_fsdp2_shards_on_its_own(make_spec: MakeSpec, tmp_path: Path) -> None:
    """What is in no such module is gathered with the model itself, and stays so until the backward pass: the attention
    of four layers, of which two are gathered anyway at the peak."""

    def record(wrap_layers: str | None, model: str = "tiny") -> CellRecord:
        engine = {"name": "fsdp2", "wrap_layers": wrap_layers}
        spec = make_spec(model=read_model(model), engine=engine, device=on("a100-80gb"), world_size=2)
        return run_cell(spec, Store(tmp_path), [])

    layers, parts, unknown = (record(name) for name in (None, "LlamaMLP,LlamaRMSNorm", "GPT2Block"))
    held = [each.ranks[0].peaks[Phase.FORWARD].allocated_bytes for each in (layers, parts)]
    attention = 4 * 3 * read_model("tiny")["config"]["hidden_size"] ** 2  # bytes of a layer: q, o, and half of k and v
    assert attention < held[1] - held[0] <= 2 * attention
    assert unknown.status is Status.UNSUPPORTED
    assert "engine.wrap_layers=GPT2Block is not in effect: the model has no such module" in str(unknown.reason)
    twice = record(None, "bert-base")
    assert twice.status is Status.UNSUPPORTED
    assert "choose engine.wrap_layers=BertLayer" in str(twice.reason)
    assert record("BertLayer", "bert-base").status is Status.OK


@pytest.mark.slow
@needs_virtual_gpu
@pytest.mark.parametrize(("name", "world"), [("fsdp2", 1), ("device_map", 2)])
def test_pretrained_weights_reach_the_devices(make_spec: MakeSpec, tmp_path: Path, name: str, world: int) -> None:
    """Engines that make random parameters where they belong load those of a folder instead."""
    folder = str(tmp_path / "mine")
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    model = models.complete(models.published("path") | {"path": folder, "name": "mine", "weights": "pretrained"})
    spec = make_spec(model=model, engine={"name": name}, device=on("a100-80gb"), world_size=world)
    command = [sys.executable, str(Path(__file__).with_name("pretrained_script.py")), json.dumps(to_json(spec))]
    done = subprocess.run(
        [sys.executable, "-m", "sweep.virtual", "run", "--gpu=a100-80gb", f"--gpus={world}", "--", *command],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "answer: true" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]


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
