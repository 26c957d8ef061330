"""``python -m sweep.virtual``, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sweep.virtual.__main__ import main

pytestmark = pytest.mark.usefixtures("needs_virtual_gpu")

TRAIN = """
import sys
import torch
if torch.cuda.device_count() > 1:
    torch.distributed.init_process_group()
held = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda")
del held
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
torch.empty(1 << 20, device="cuda")
"""


def _virtual(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "sweep.virtual", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_script_is_run_and_reported(tmp_path: Path) -> None:
    script, report_file = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(TRAIN, encoding="utf-8")
    options = ["--gpu", "t4", "--gpus", "2", "--json", str(report_file)]
    done = _virtual("run", *options, "--", sys.executable, str(script), "9")
    assert done.returncode == 0, done.stderr
    assert "It fits." in done.stderr
    assert "Tesla T4" in done.stderr
    report = json.loads(report_file.read_text(encoding="utf-8"))
    (device,) = report["devices"]
    assert report["fits"] == "yes"
    assert report["world_size"] == 2
    assert device["reserved_peak_bytes"] == device["allocated_peak_bytes"] == 9 << 30, "a reset loses no peak"
    assert device["peak_used_bytes"] == (9 << 30) + device["context_bytes"]


def test_a_script_that_does_not_fit(tmp_path: Path) -> None:
    script, report_file = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(TRAIN, encoding="utf-8")
    options = ["--gpu", "t4", "--total-memory", "8GiB", "--json", str(report_file)]
    done = _virtual("run", *options, "--", sys.executable, str(script), "9")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB" in done.stderr
    assert "It does not fit" in done.stderr
    assert json.loads(report_file.read_text(encoding="utf-8"))["fits"] == "no"


def test_a_failure_of_another_kind_is_not_called_a_fit() -> None:
    code = "import torch; torch.ones(1, device='cuda'); raise SystemExit(3)"
    done = _virtual("run", "--", sys.executable, "-c", code)
    assert done.returncode == 3
    assert "failed with exit code 3, and not for want of GPU memory" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--gpu", "a1000", "--", "true"], "There is no GPU profile 'a1000'"),
        (["run"], "Say what to run after '--'"),
        (["run", "--", "no-such-command"], "There is no command 'no-such-command'"),
        (["run", "--", "torchrun", "train.py"], "torchrun would start one process a GPU; give the training command"),
        (["run", "--gpus", "99", "--", "true"], "gpus is 99"),
    ],
)
def test_what_the_user_can_change_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_command_without_a_gpu_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--", "true"]) == 0
    assert "the command used no GPU" in capfd.readouterr().err


def test_doctor_and_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus"]) == 0
    assert "NVIDIA A100-SXM4-80GB" in capfd.readouterr().out
    assert main(["doctor"]) == 0
    assert "This machine can have virtual GPUs." in capfd.readouterr().out


def test_doctor_says_why_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["doctor"]) == 1
    assert "machine  no    The virtual GPU needs Linux" in capsys.readouterr().out
