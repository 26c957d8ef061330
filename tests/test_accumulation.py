"""Accumulation on every engine: what is kept between micro-batches, and what the engine does not allow."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import read_model
from test_nvml import needs_virtual_gpu, on_two_gpus

from sweep.launch import run_cell
from sweep.record import CellRecord, Phase, Status
from sweep.spec import CellSpec
from sweep.store import Store

MakeSpec = Callable[..., CellSpec]
VIRTUAL = {"kind": "virtual", "gpu": {"key": "a100-80gb"}}
WORLD = 8

pytestmark = needs_virtual_gpu


@pytest.fixture
def run(make_spec: MakeSpec, tmp_path: Path) -> Callable[..., CellRecord]:
    def run(**changes: object) -> CellRecord:
        record = run_cell(make_spec(device=VIRTUAL, accumulation=2, **changes), Store(tmp_path), [])
        assert record.status is Status.OK, record.reason
        (rank,) = record.ranks
        assert rank.optimizer_steps == rank.iterations == 3
        return record

    return run


def backward_peak(record: CellRecord) -> int:
    return record.ranks[0].peaks[Phase.BACKWARD].allocated_bytes


def test_fsdp_keeps_whole_gradients_unless_every_pass_reduces_them(run: Callable[..., CellRecord]) -> None:
    kept = run(engine={"name": "fsdp2"}, world_size=WORLD)
    reduced = run(engine={"name": "fsdp2", "sync_each_micro_batch": True}, world_size=WORLD)
    assert kept.series_id != reduced.series_id, "a policy that changes the figure is part of what a cell is"
    whole_gradients = 4 * read_model("tiny")["parameters"]
    more = backward_peak(kept) - backward_peak(reduced)
    assert 0.3 * whole_gradients < more < 1.1 * whole_gradients


REFUSES = """
    import torch
    from conftest import read_model
    from sweep.spec import CellSpec, from_json
    from sweep.worker.engines import make_engine
    from sweep.worker.train import join_world, make_workload
    content = {"model": read_model("tiny"), "device": {"kind": "cuda"}, "world_size": 1, "batch_size": 1, "seq_len": 32}
    spec = from_json(CellSpec, content | {"engine": {"name": "deepspeed", "zero_stage": 2}, "accumulation": 2})
    device = torch.device("cuda", 0)
    join_world(spec, device)
    engine = make_engine(spec, device)
    engine.load(make_workload(spec, 0, device).build)
    engine.prepare()
    try:
        with engine._engine.no_sync():
            pass
    except AssertionError as error:
        print("refused:", error)
"""


def test_zero_2_accumulates_without_the_no_sync_that_deepspeed_refuses(run: Callable[..., CellRecord]) -> None:
    assert "refused: no_sync context manager is incompatible with gradient partitioning" in on_two_gpus(REFUSES)
    run(engine={"name": "deepspeed", "zero_stage": 2}, world_size=WORLD, precision="bf16")


def test_deepspeeds_own_block_for_checkpointing_does_nothing_and_the_record_shows_it(
    run: Callable[..., CellRecord],
) -> None:
    engine = {"name": "deepspeed", "zero_stage": 2}
    block = {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 2}}
    without = run(engine=engine, world_size=WORLD, precision="bf16")
    with_it = run(engine=engine | {"config": block}, world_size=WORLD, precision="bf16")
    (rank,) = with_it.ranks
    assert rank.in_effect is not None
    assert rank.in_effect.layer_forwards == 1, "no layer is run again"
    assert rank.peaks == without.ranks[0].peaks
