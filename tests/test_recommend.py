"""The ranking, and the files that training libraries load."""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from test_analysis import CPU, VIRTUAL, grid, out_of_memory, spec, study, walk
from test_plots import store_of

from sweep import recommend
from sweep.analysis import series_of
from sweep.config_files import with_file
from sweep.emit import EmitError, Target, emit, training_arguments
from sweep.recommend import ESTIMATED, MEASURED, UNKNOWN, Candidate, NothingFitsError, candidates, describe, reasons
from sweep.record import CellRecord
from sweep.spec import CellSpec, EngineName, EngineSpec, LoraSpec, Optimizer, Precision, to_json
from sweep.store import Store

ROUNDS = 2
NOISE = 1.5
"""Two runs of one cell differ by less, as a ratio of medians, on a machine that does other work as well."""
DDP = EngineSpec(name=EngineName.DDP)


def ranked(records: list[CellRecord], effective: int, headroom: float = 0.05) -> list[Candidate]:
    return candidates(series_of(records), effective, headroom)


def test_the_fastest_that_reaches_the_effective_batch_wins() -> None:
    found = ranked(study(), 96)
    assert all(one.spec.effective_batch_size == 96 for one in found)
    speeds = [one.speed or 0 for one in found]
    assert speeds == sorted(speeds, reverse=True)
    assert describe(found[0]) == "no checkpointing, expandable segments, batch size 2, accumulation 6"
    assert found[0].speed == pytest.approx(16 * 2048 / 1.452)
    assert (found[0].basis, found[0].doubtful_memory) == (ESTIMATED, True)
    text = " ".join(reasons(found))
    assert re.search(r"it is \d+\.\d% faster than the next, checkpointing, .*, with 1\d\.\d\d GiB more reserved", text)
    assert "gradients that stay between passes may take more memory" in text


def test_headroom_and_thrashing_keep_cells_out() -> None:
    assert {one.spec.batch_size for one in ranked(study(), 112, 0.0)} == {1, 2, 7}, "14 runs, but thrashes"
    assert 12 in {one.spec.batch_size for one in ranked(study(), 96, 0.0)}
    assert 12 not in {one.spec.batch_size for one in ranked(study(), 96, 0.05)}
    with pytest.raises(NothingFitsError, match=r"every cell .* 96 leaves less than 90% of the device free"):
        ranked(study(), 96, 0.9)


def test_what_ran_with_the_same_accumulation_is_measured_and_preferred() -> None:
    records = [
        *walk({1: (10, 20, 1.0), 2: (10, 30, 1.9)}),
        *walk({1: (10, 25, 4.4), 2: (10, 35, 7.0)}, accumulation=4),
    ]
    found = {(one.spec.batch_size, one.spec.accumulation): one for one in ranked(records, 64)}
    assert found[2, 4].basis == MEASURED
    assert found[2, 4].seconds_per_iteration == 7.0
    assert found[1, 8].basis == ESTIMATED
    assert (found[1, 8].seconds_per_iteration, found[1, 8].doubtful_memory) == (8.8, False), "from 4 passes, not from 1"


def test_without_times_what_is_known_decides_and_that_is_said() -> None:
    found = ranked(grid(VIRTUAL), 32, 0.0)
    assert {one.basis for one in found} == {UNKNOWN}
    assert not found[0].spec.gradient_checkpointing
    assert found[0].spec.batch_size == max(one.spec.batch_size for one in found if not one.spec.gradient_checkpointing)
    assert "times were not measured" in reasons(found)[0]


def test_what_cannot_be_reached_is_one_sentence() -> None:
    with pytest.raises(
        NothingFitsError, match=r"no cell that ran reaches an effective batch of 7 exactly: .* 8, 16, 24"
    ):
        ranked(study(), 7)
    with pytest.raises(NothingFitsError, match="no cell ran to its end"):
        ranked([out_of_memory(spec())], 8)


def test_the_command_writes_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path / "study", study())
    arguments = [str(tmp_path / "study"), "--effective-batch", "64", "--out", str(tmp_path / "out")]
    assert recommend.main([*arguments, *(f"--emit={target.value}" for target in Target)]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {target.file_name for target in Target}
    assert "wins with" in capsys.readouterr().out
    assert recommend.main([*arguments, "--where", "precision=fp32"]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'study'} holds no cell with these values\n"
    for bad in (["--effective-batch", "0"], ["--effective-batch", "8", "--headroom", "200%"]):
        with pytest.raises(SystemExit):
            recommend.main([str(tmp_path), *bad])


def test_a_winner_without_deepspeed_has_no_deepspeed_file() -> None:
    with pytest.raises(EmitError, match="the winner runs without DeepSpeed; choose --emit accelerate"):
        emit(spec(engine=DDP), Target.DEEPSPEED)


CONFIGURATIONS = {
    "ddp": {"engine": DDP, "precision": Precision.BF16, "gradient_checkpointing": True, "accumulation": 2},
    "zero-2": {"engine": EngineSpec(name=EngineName.DEEPSPEED, zero_stage=2), "optimizer": Optimizer.SGD},
    "pure": {"engine": DDP, "precision": Precision.BF16_PURE, "gradient_clipping": None},
}


def on_cpu(name: str) -> CellSpec:
    return spec(**({"device": CPU, "world_size": 1, "batch_size": 4, "seq_len": 32} | CONFIGURATIONS[name]))


def loaded(tmp_path: Path, program: str, *arguments: str) -> Any:
    """What a program that prints JSON in its last line says of the file `config`."""
    (tmp_path / "program.py").write_text(program)
    variables = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *(arguments or ["program.py"])],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_accelerate_launches_with_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "config").write_text(text := emit(on_cpu(name), Target.ACCELERATE))
    assert f"Accelerator(gradient_accumulation_steps={on_cpu(name).accumulation})" in text
    program = (
        "import json; from accelerate import Accelerator; made = Accelerator()\n"
        "print(json.dumps([made.mixed_precision, made.num_processes, str(made.device), made.distributed_type.value,"
        " made.gradient_accumulation_steps]))"
    )
    arguments = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "config", "program.py")
    made = loaded(tmp_path, program, *arguments)
    assert made[:3] == ["bf16" if name != "pure" else "no", 1, "cpu"]
    assert made[3] == ("DEEPSPEED" if name == "zero-2" else "NO")


@pytest.mark.slow
def test_deepspeed_initializes_with_the_file(tmp_path: Path) -> None:
    cell_spec = replace(on_cpu("zero-2"), accumulation=2)
    (tmp_path / "config").write_text(emit(cell_spec, Target.DEEPSPEED))
    program = (
        "import json, os, torch, deepspeed\n"
        "os.environ |= {'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': '1'}\n"
        "store = torch._C._distributed_c10d.HashStore()\n"
        "torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config='config')\n"
        "print(json.dumps([engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(),"
        " engine.gradient_accumulation_steps(), engine.zero_optimization_stage(), engine.gradient_clipping()]))"
    )
    assert loaded(tmp_path, program) == [8, 4, 2, 2, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_arguments_take_the_file_and_the_command_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "config").write_text(emit(on_cpu(name), Target.TRAINER))
    script = emit(on_cpu(name), Target.COMMAND)
    (tmp_path / "launch.sh").write_text(script.replace("torchrun --standalone --nproc-per-node=1", sys.executable))
    program = (
        "import json, sys; from transformers import HfArgumentParser, TrainingArguments\n"
        "fields = ['per_device_train_batch_size', 'gradient_accumulation_steps', 'gradient_checkpointing', 'bf16',"
        " 'fp16', 'max_grad_norm', 'use_cpu']\n"
        "if len(sys.argv) > 1: (made,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        "else: made = TrainingArguments(output_dir='out', **json.load(open('config')))\n"
        "values = [getattr(made, f) for f in fields] + [str(made.optim.value), bool(made.deepspeed)]\n"
        "print(json.dumps(values))"
    )
    expected = training_arguments(on_cpu(name))
    from_file = loaded(tmp_path, program)
    assert from_file[:4] == [4, expected["gradient_accumulation_steps"], name == "ddp", name != "pure"]
    assert from_file[-2:] == ["sgd" if name == "zero-2" else "adamw_torch_fused", name == "zero-2"]
    done = subprocess.run(
        ["sh", "launch.sh", "--output_dir=out"],
        cwd=tmp_path,
        env=os.environ | {"SCRIPT": "program.py"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == from_file


def test_the_yaml_is_plain() -> None:
    content = yaml.safe_load(emit(spec(), Target.ACCELERATE))
    assert (content["distributed_type"], content["num_processes"]) == ("DEEPSPEED", 8)
    assert content["deepspeed_config"]["zero_stage"] == 3


def test_what_no_file_can_say_is_said_for_the_script() -> None:
    plain = emit(spec(), Target.COMMAND)
    adapted = emit(replace(spec(), lora=LoraSpec(rank=4), liger=True), Target.COMMAND)
    assert "only the script" not in plain
    assert "#   peft.LoraConfig(r=4, target_modules='all-linear')\n#   Liger's kernels: on\n" in adapted


@pytest.mark.slow
@pytest.mark.alone
def test_a_recommendation_run_again_is_as_fast_as_claimed(
    tmp_path: Path, run_sweep: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    axes = [
        "model=tiny",
        "device=cpu",
        "engine=ddp",
        "world_size=1",
        "grid=none",
        "sweep=s",
        "precision=fp32",
        "seq_len=32",
    ]
    done = run_sweep("-m", *axes, "batch_size=2,4", "accumulation=2,4")
    assert done.returncode == 0, done.stderr
    told = run_sweep(str(tmp_path / "results" / "s"), "--effective-batch", "8", module="sweep.recommend")
    assert told.returncode == 0, told.stderr
    winner = ranked(Store(tmp_path / "results" / "s").records(), 8)[0]
    assert winner.basis == MEASURED
    assert winner.seconds_per_iteration is not None
    # Whatever else this machine does slows both alike: the cell of the claim and the recommended command take turns.
    turns: dict[str, list[float]] = {"claimed": [], "recommended": []}
    for _ in range(ROUNDS):
        for name, command in (("claimed", winner.record.command), ("recommended", recommend.command(winner))):
            done = run_sweep(*shlex.split(command)[3:], "force=true")
            assert done.returncode == 0, done.stderr
            record = Store(tmp_path / "results" / "s").cell(winner.record.cell_id).read_record()
            assert record is not None
            turns[name] += record.iteration_seconds or ()
    history = Store(tmp_path / "results" / "s").cell(winner.record.cell_id).history_path
    assert len(list(history.iterdir())) == 2 * ROUNDS, "every turn measured the very cell that the claim is about"
    ratios = [b / a for a, b in zip(*map(sorted, turns.values()), strict=True)]
    print(f"recommended over claimed: {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    assert 1 / NOISE < statistics.median(ratios) < NOISE


def test_an_fsdp2_winner_is_an_accelerate_file_that_the_sweep_itself_takes(tmp_path: Path) -> None:
    engine = EngineSpec(name=EngineName.FSDP2, reshard_after_forward=False, wrap_layers="LlamaDecoderLayer")
    winner = replace(spec(), engine=engine)
    path = tmp_path / "accelerate.yaml"
    path.write_text(emit(winner, Target.ACCELERATE))
    values = to_json(winner)
    found = with_file({"name": "fsdp2", "config_file": str(path)}, values)
    assert (found["reshard_after_forward"], found["wrap_layers"]) == (False, "LlamaDecoderLayer")
    assert "sync_each_batch=True" in emit(
        replace(winner, engine=replace(engine, sync_each_micro_batch=True)), Target.ACCELERATE
    )
    buckets = replace(spec().engine, reduce_bucket_size=1000)
    with pytest.raises(EmitError, match=r"no place for engine.reduce_bucket_size; choose --emit deepspeed"):
        emit(replace(spec(), engine=buckets), Target.ACCELERATE)
    with pytest.raises(EmitError, match="choose --emit accelerate"):
        emit(winner, Target.TRAINER)
    with pytest.raises(EmitError, match="device_map"):
        emit(replace(winner, engine=EngineSpec(name=EngineName.DEVICE_MAP)), Target.ACCELERATE)
