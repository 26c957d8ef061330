"""Real training on the CPU device, in real processes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from conftest import read_model

from sweep.launch import run_cell
from sweep.measure.memory import CpuCounters, PhaseMemory
from sweep.record import Phase, Status
from sweep.spec import CellSpec, to_json
from sweep.store import Store
from sweep.worker.engines import Engine
from sweep.worker.random_tokens import RandomBatches
from sweep.worker.train import Progress, iterate, train

MakeSpec = Callable[..., CellSpec]


def test_two_ranks_train_and_report(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(world_size=2, batch_size=2, accumulation=2, gradient_checkpointing=True)
    record = run_cell(spec, Store(tmp_path), ["batch_size=2"])
    assert (record.status, record.reason) == (Status.OK, None)
    assert [rank.rank for rank in record.ranks] == [0, 1]
    for rank in record.ranks:
        assert set(rank.peaks) == set(Phase)
        assert rank.optimizer_steps == spec.warmup_iterations + spec.measured_iterations
        assert rank.parameters == spec.model.parameters
        assert rank.seconds_per_iteration is not None
        assert len(rank.seconds_per_iteration) == spec.measured_iterations
        assert rank.loss == pytest.approx(torch.log(torch.tensor(4096.0)).item(), abs=0.5)
        assert rank.nvml is None
        # fp32 weights, gradients and AdamW's two moments, 4 bytes each, are all alive in the optimizer step.
        assert rank.peaks[Phase.OPTIMIZER].allocated_bytes > 16 * read_model("tiny")["parameters"]
        assert rank.reserved_peak_bytes is not None
        assert rank.reserved_peak_bytes < rank.capacity_bytes
        # What is resident is also mapped; a few pages were mapped before and are touched now, stacks for instance.
        assert all(peak.allocated_bytes < peak.reserved_bytes + (4 << 20) for peak in rank.peaks.values())
    assert record.ranks[0].loss != record.ranks[1].loss, "ranks see different data"
    assert record.command == "python -m sweep.run batch_size=2"
    assert record.environment["torch"]

    assert run_cell(spec, Store(tmp_path), []) == record, "what is stored is not measured again"
    again = run_cell(spec, Store(tmp_path), [], force=True)
    assert again.started_at != record.started_at
    history = Store(tmp_path).cell(record.cell_id).history_path
    assert json.loads((history / "001.json").read_text()) == json.loads(json.dumps(to_json(record)))


def test_the_memory_limit_is_a_real_allocation_failure(make_spec: MakeSpec, tmp_path: Path) -> None:
    record = run_cell(make_spec(world_size=2, batch_size=256, seq_len=128), Store(tmp_path), [])
    assert record.status is Status.OOM
    assert record.failure is not None
    assert record.failure.phase is Phase.FORWARD
    assert record.failure.requested_bytes


def test_a_model_larger_than_the_limit_runs_out_while_loading(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(device={"kind": "cpu", "memory_limit_bytes": 2**20})
    record = run_cell(spec, Store(tmp_path), [])
    assert (record.status, record.failure.phase if record.failure else None) == (Status.OOM, Phase.LOAD)


def test_what_makes_no_sense_is_not_started(make_spec: MakeSpec, tmp_path: Path) -> None:
    record = run_cell(make_spec(expandable_segments=True), Store(tmp_path), [])
    assert record.status is Status.UNSUPPORTED
    assert not Store(tmp_path).cell(record.cell_id).stderr_path.exists()


def test_a_bug_in_the_worker_is_a_failure_with_its_words(make_spec: MakeSpec, tmp_path: Path) -> None:
    model = read_model("tiny")
    model["config"] = model["config"] | {"num_attention_heads": 7}
    record = run_cell(make_spec(model=model), Store(tmp_path), [])
    assert record.status is Status.FAILED
    assert record.failure is not None
    assert record.failure.stderr_tail
    assert not record.status.final, "it runs again when asked again"


def test_a_batch_that_is_smaller_than_claimed_is_noticed(
    make_spec: MakeSpec,
) -> None:
    spec = make_spec(batch_size=4)
    short = RandomBatches(make_spec(batch_size=3), 0, torch.device("cpu"))
    progress = Progress(PhaseMemory(CpuCounters()), iteration=0)
    with pytest.raises(AssertionError, match="a batch of shape"):
        iterate(spec, cast(Engine, None), short, progress)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_trains_on_the_cpu(make_spec: MakeSpec, tmp_path: Path, stage: int) -> None:
    spec = make_spec(
        engine={"name": "deepspeed", "zero_stage": stage},
        device={"kind": "cpu", "memory_limit_bytes": 8 * 2**30},
        world_size=2,
    )
    record = run_cell(spec, Store(tmp_path), [])
    assert (record.status, record.reason) == (Status.OK, None)
    assert record.ranks[0].loss == pytest.approx(8.3, abs=0.5)
    assert os.environ.get("DS_ACCELERATOR") is None


def test_accumulated_and_real_batches_train_alike(make_spec: MakeSpec) -> None:
    model = read_model("tiny") | {"task": "sequence-classification"}

    def curve(**changes: int) -> list[float]:
        progress = Progress(PhaseMemory(CpuCounters()))
        train(make_spec(model=model, measured_iterations=4, **changes), 0, torch.device("cpu"), progress)
        return progress.losses

    torch.manual_seed(0)
    real = curve(batch_size=4)
    assert len(real) == 5, "the warm-up as well"
    torch.manual_seed(0)
    assert curve(batch_size=1, accumulation=4) == pytest.approx(real, rel=1e-4)
    torch.manual_seed(0)
    assert curve(batch_size=4, seed=1) != pytest.approx(real, rel=1e-3)
