"""What a rank measures and checks of itself: times, NVML, and whether the configuration is in effect."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, read_model
from torch import nn

from sweep import virtual
from sweep.launch import run_cell
from sweep.measure.memory import CpuCounters, PhaseMemory
from sweep.measure.timing import CpuTimer, Mark, Part, times
from sweep.record import InEffect, MemoryPeak, Phase, RankRecord, Status
from sweep.spec import CellSpec, EngineName, EngineSpec, Precision
from sweep.store import Store
from sweep.worker.engines import make_engine
from sweep.worker.failure import NotInEffectError
from sweep.worker.in_effect import Witness, check, check_steps
from sweep.worker.model import build_model
from sweep.worker.random_tokens import RandomBatches
from sweep.worker.savers import apply_savers
from sweep.worker.train import Progress, measure, warm_up

MakeSpec = Callable[..., CellSpec]
VIRTUAL = {"kind": "virtual", "gpu": {"key": "a100-80gb"}}
needs_virtual_gpu = pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))


def test_times_are_added_up_by_iteration() -> None:
    order = [None, Part.DATA, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER]
    second = [Part.DATA, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, None]
    # Two iterations of two micro-batches; mark n is made at n squared seconds.
    parts = [*order, *second, *order[1:], *second]
    measured = times([Mark(part, float(i * i)) for i, part in enumerate(parts)], lambda a, b: b.host - a.host)
    assert list(measured.seconds_per_iteration) == [81.0, 18.0**2 - 81.0]
    assert list(measured.parts.data_seconds) == [4 - 1 + 36 - 25, 121 - 100 + 225 - 196]
    assert list(measured.parts.forward_seconds) == [9 - 4 + 49 - 36, 144 - 121 + 256 - 225]
    assert list(measured.parts.optimizer_seconds) == [25 - 16 + 81 - 64, 196 - 169 + 324 - 289]


def test_a_record_holds_everything_about_its_iterations(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec(accumulation=2, measured_iterations=5)
    record = run_cell(spec, Store(tmp_path), [])
    assert record.status is Status.OK, record.reason
    (rank,) = record.ranks
    assert rank.iterations == rank.optimizer_steps == spec.warmup_iterations + 5
    assert rank.seconds_per_iteration is not None
    assert rank.parts is not None
    parts = rank.parts
    for whole, *each in zip(
        rank.seconds_per_iteration,
        parts.data_seconds,
        parts.forward_seconds,
        parts.backward_seconds,
        parts.optimizer_seconds,
        strict=True,
    ):
        assert all(part > 0 for part in each)
        assert sum(each) <= whole * 1.0001
    assert rank.in_effect == InEffect(
        layer_forwards=1,
        compute_dtypes=("float32",),
        parameter_dtypes=("float32",),
        gradient_dtypes=("float32",),
        optimizer_state_dtypes=("float32",),
    )


@needs_virtual_gpu
@pytest.mark.parametrize(
    ("precision", "engine", "stored", "compute", "state"),
    [
        ("fp32", {"name": "ddp"}, "float32", "float32", "float32"),
        ("bf16", {"name": "ddp"}, "float32", "bfloat16", "float32"),
        ("fp16", {"name": "ddp"}, "float32", "float16", "float32"),
        ("bf16_pure", {"name": "ddp"}, "bfloat16", "bfloat16", "bfloat16"),
        ("bf16", {"name": "deepspeed", "zero_stage": 0}, "bfloat16", "bfloat16", "float32"),
        ("bf16", {"name": "deepspeed", "zero_stage": 3}, "bfloat16", "bfloat16", "float32"),
        ("fp16", {"name": "deepspeed", "zero_stage": 2}, "float16", "float16", "float32"),
    ],
)
def test_precision_and_checkpointing_are_seen_in_effect(
    make_spec: MakeSpec,
    tmp_path: Path,
    precision: str,
    engine: dict[str, object],
    stored: str,
    compute: str,
    state: str,
) -> None:
    spec = make_spec(device=VIRTUAL, precision=precision, engine=engine, gradient_checkpointing=True)
    record = run_cell(spec, Store(tmp_path), [])
    assert record.status is Status.OK, record.reason
    (rank,) = record.ranks
    assert rank.in_effect == InEffect(
        layer_forwards=2,
        compute_dtypes=(compute,),
        parameter_dtypes=(stored,),
        gradient_dtypes=(stored,),
        optimizer_state_dtypes=(state,),
    )
    assert rank.segments is not None
    assert rank.segments > 0
    for peak in rank.peaks.values():
        assert peak.fragmentation_bytes is not None
        assert peak.fragmentation_bytes >= 0
    assert rank.reserved_by_iteration_bytes is not None
    assert len(rank.reserved_by_iteration_bytes) == spec.measured_iterations + 1


@pytest.mark.parametrize("way", ["eval mode", "never enabled"])
def test_checkpointing_that_does_nothing_is_noticed(make_spec: MakeSpec, way: str) -> None:
    spec = make_spec(gradient_checkpointing=True)
    model = model_of(make_spec(gradient_checkpointing=way == "eval mode"))
    if way == "eval mode":
        model.eval()
    with pytest.raises(NotInEffectError, match="gradient_checkpointing=true is not in effect: a layer ran 1 times"):
        one_iteration(spec, model)


def model_of(spec: CellSpec) -> nn.Module:
    return apply_savers(spec, build_model(spec, torch.float32))


def one_iteration(spec: CellSpec, model: nn.Module) -> InEffect:
    witness, optimizer = Witness(spec, model), torch.optim.AdamW(model.parameters())
    with witness.watching():
        model(**RandomBatches(spec, 0, torch.device("cpu")).next()).loss.backward()
    optimizer.step()
    return witness.testimony(optimizer)


def test_the_witness_leaves_no_hook(make_spec: MakeSpec) -> None:
    model = model_of(make_spec())
    assert one_iteration(make_spec(), model).layer_forwards == 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_a_precision_that_is_not_in_effect_is_noticed(make_spec: MakeSpec) -> None:
    with pytest.raises(NotInEffectError, match="precision=bf16 is not in effect: compute are float32, not bfloat16"):
        one_iteration(make_spec(precision="bf16"), build_model(make_spec(), torch.float32))


def test_states_in_half_precision_under_mixed_precision_are_noticed(make_spec: MakeSpec) -> None:
    engine = EngineSpec(name=EngineName.DEEPSPEED, zero_stage=2)
    seen = InEffect(
        layer_forwards=1,
        compute_dtypes=("bfloat16",),
        parameter_dtypes=("bfloat16",),
        gradient_dtypes=("bfloat16",),
        optimizer_state_dtypes=("bfloat16", "float32"),
    )
    spec = make_spec(precision="bf16", engine={"name": engine.name.value, "zero_stage": engine.zero_stage})
    with pytest.raises(NotInEffectError, match="optimizer states are bfloat16, float32, not float32"):
        check(spec, seen)


def test_every_iteration_is_one_optimizer_step(make_spec: MakeSpec) -> None:
    check_steps(make_spec(), 3, 3)
    with pytest.raises(NotInEffectError, match="accumulation=4 is not in effect: 8 iterations made 2"):
        check_steps(make_spec(accumulation=4), 8, 2)
    with pytest.raises(NotInEffectError):
        check_steps(make_spec(precision="fp16", device=VIRTUAL), 2, 8)
    check_steps(make_spec(precision="fp16", device=VIRTUAL), 8, 6)


def test_growth_is_told() -> None:
    def rank(*reserved: int) -> RankRecord:
        return RankRecord(rank=0, device_name="", capacity_bytes=1, reserved_by_iteration_bytes=reserved or None)

    assert rank(5, 5, 7).reserved_growth_bytes == 2
    assert rank(5, 5, 5).reserved_growth_bytes == 0
    assert rank().reserved_growth_bytes is None


@pytest.fixture
def single_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def gradients(spec: CellSpec, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What the optimizer would see after one iteration of `accumulation` micro-batches of these sequences."""
    torch.manual_seed(0)
    engine = make_engine(spec, torch.device("cpu"))
    engine.load(lambda dtype: build_model(spec, dtype))
    engine.prepare()
    for batch in torch.split(tokens, spec.batch_size):
        with engine.micro_batch():
            engine.backward(engine.forward({"input_ids": batch, "labels": batch}))
    return [parameter.grad.clone() for parameter in engine.model.parameters() if parameter.grad is not None]


def test_accumulated_gradients_are_those_of_one_large_batch(make_spec: MakeSpec, single_process: None) -> None:
    tokens = torch.randint(1, read_model("tiny")["config"]["vocab_size"], (6, 32))
    small = gradients(make_spec(batch_size=2, accumulation=3), tokens)
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    large = gradients(make_spec(batch_size=6, accumulation=1), tokens)
    assert len(small) == len(large) > 0
    for one, other in zip(small, large, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert make_spec().precision is Precision.FP32


class SkippingEngine:
    """Steps happen or are skipped as fp16 scaling would have it."""

    def __init__(self, happen: str) -> None:
        self._happen = iter(happen)
        self.optimizer_steps = 0
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters())

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        yield

    def forward(self, _batch: object) -> torch.Tensor:
        return torch.zeros(())

    def backward(self, _loss: torch.Tensor) -> None:
        pass

    def step(self) -> None:
        self.optimizer_steps += next(self._happen) == "x"


def fp16_progress(make_spec: MakeSpec, happen: str) -> tuple[CellSpec, Any, RandomBatches, Progress]:
    spec = make_spec(precision="fp16", warmup_iterations=1, measured_iterations=2)
    batches = RandomBatches(spec, 0, torch.device("cpu"))
    return spec, SkippingEngine(happen), batches, Progress(PhaseMemory(CpuCounters()), iteration=0)


def test_fp16_warms_up_until_a_step_happens(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweep.worker.train.make_timer", lambda _spec: CpuTimer())
    spec, engine, batches, progress = fp16_progress(make_spec, "...xx-xx")
    warm_up(spec, engine, batches, progress)
    assert (progress.iteration, engine.optimizer_steps) == (4, 1)
    assert measure(spec, engine, batches, progress) == 1, "a step was skipped: this window does not count"
    assert measure(spec, engine, batches, progress) == 2
    assert progress.times is not None
    assert len(progress.times.seconds_per_iteration) == 2


def test_fp16_that_never_settles_is_a_failure(make_spec: MakeSpec) -> None:
    spec, engine, batches, progress = fp16_progress(make_spec, "." * 100)
    with pytest.raises(RuntimeError, match="the optimizer made no step in 21 iterations: every one was skipped"):
        warm_up(spec, engine, batches, progress)


def test_a_loss_that_is_not_finite_is_a_failure(make_spec: MakeSpec, tmp_path: Path) -> None:
    model = read_model("tiny")
    model["config"] = model["config"] | {"rms_norm_eps": -1e9}
    record = run_cell(make_spec(model=model, gradient_clipping=None), Store(tmp_path), [])
    assert record.status is Status.FAILED
    assert record.reason == "rank 0: RuntimeError: the loss is not finite after 3 iterations"


def test_frozen_embeddings_get_gradients_behind_a_checkpoint(make_spec: MakeSpec) -> None:
    spec = make_spec(gradient_checkpointing=True)
    model: Any = model_of(spec)
    model.get_input_embeddings().requires_grad_(False)
    assert one_iteration(spec, model).layer_forwards == 2
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_a_cache_that_was_left_on_does_not_switch_checkpointing_off(make_spec: MakeSpec) -> None:
    model = read_model("tiny")
    model["config"] = model["config"] | {"use_cache": True}
    spec = make_spec(model=model, gradient_checkpointing=True)
    built: Any = model_of(spec)
    assert built.config.use_cache
    assert one_iteration(spec, built).layer_forwards == 2
    assert built(**RandomBatches(spec, 0, torch.device("cpu")).next()).past_key_values is None


def test_peaks_belong_to_their_phase_alone() -> None:
    class Steps:
        """The peak since the last reset, of a device on which each phase holds something else."""

        def __init__(self) -> None:
            self.peak = 0

        def reset(self) -> None:
            self.peak = 0

        def read(self) -> MemoryPeak:
            return MemoryPeak(allocated_bytes=self.peak, active_bytes=self.peak, reserved_bytes=self.peak)

    counters = Steps()
    memory = PhaseMemory(counters)
    for phase, peak in ((Phase.LOAD, 9), (Phase.FORWARD, 3), (Phase.BACKWARD, 5), (Phase.FORWARD, 4)):
        memory.enter(phase)
        counters.peak = peak
    memory.fold()
    assert {phase: peak.allocated_bytes for phase, peak in memory.peaks.items()} == {
        Phase.LOAD: 9,
        Phase.FORWARD: 4,
        Phase.BACKWARD: 5,
    }


PAGES_OF_A_LIBRARY = """
    import mmap, sys
    from pathlib import Path
    from sweep.measure.memory import CpuCounters
    file = Path(sys.argv[1])
    file.write_bytes(bytes(64 << 20))
    bytes(256 << 20)  # a high point of what is mapped, before anything is counted
    opened = file.open("rb")
    library = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    counters = CpuCounters()
    sum(library[at] for at in range(0, len(library), mmap.PAGESIZE))  # mapped before, resident from now on
    print(*(figure >> 20 for figure in (counters.read().allocated_bytes, counters.read().reserved_bytes)))
    held = bytearray(b"x") * (96 << 20)
    print(*(figure >> 20 for figure in (counters.read().allocated_bytes, counters.read().reserved_bytes)))
"""


def test_resident_and_mapped_memory_are_counted_from_the_same_moment(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PAGES_OF_A_LIBRARY), str(tmp_path / "library")],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = ([int(figure) for figure in line.split()] for line in done.stdout.splitlines())
    assert max(before) <= 4
    assert 96 <= after[0] <= 104
    assert 96 <= after[1] <= 104
