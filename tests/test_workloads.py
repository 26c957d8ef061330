"""Texts and users' own workloads, by hand and through the whole of `sweep`."""

import json
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sweep import virtual, workloads
from sweep.launch import run_cell
from sweep.record import CellRecord, Phase, Status
from sweep.spec import CellSpec, SpecError
from sweep.store import Store
from sweep.worker.text import TextBatches, encoded
from sweep.worker.workload import OwnBatches

MakeSpec = Callable[..., CellSpec]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
CPU = torch.device("cpu")
OWN = "workload._target_=mine.own_workload.build"
VIRTUAL = {"kind": "virtual", "gpu": {"key": "a100-80gb"}}
DOCUMENTS = ["a" * 5, "b" * 40, "c" * 9]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package that is the example of the documentation; the current folder, as where a user works."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").touch()
    shutil.copy(REPOSITORY / "examples/own_workload.py", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine/own_workload.py"


def own_model() -> dict[str, Any]:
    return {"name": "mine", "model_type": "own", "config": {}}


def own(target: str = "mine.own_workload.build", **arguments: Any) -> dict[str, Any]:
    return workloads.complete({"name": "own", "_target_": target, **arguments})


def text(path: Path, **changes: Any) -> dict[str, Any]:
    return workloads.complete({"name": "text", "path": str(path), "tokenizer": None, "lengths": "packed"} | changes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(DOCUMENTS))
    return path


def test_a_users_own_workload_runs_through_all_of_sweep(run_sweep: Run, mine: Path, tmp_path: Path) -> None:
    small = ("device=cpu", "grid=none", "seq_len=32", "warmup_iterations=1", "steps=2", "engine=ddp")
    done = run_sweep(OWN, "+workload.width=32", *small, "batch_size=1,2", "world_size=2", "sweep=own")
    assert done.returncode == 0, done.stderr
    records = [json.loads(path.read_text()) for path in tmp_path.glob("results/own/cells/*/record.json")]
    assert sorted(record["spec"]["batch_size"] for record in records) == [1, 2]
    model = runpy.run_path(str(mine))["Scorer"](1000, 32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for record in records:
        assert (record["status"], record["spec"]["workload"]["arguments"]) == ("ok", {"width": 32})
        assert record["ranks"][0]["parameters"] == parameters
        assert record["ranks"][0]["loss"] != record["ranks"][1]["loss"], "each rank has its own reviews"
    assert "mine.own_workload.build" in done.stdout
    assert list((tmp_path / "plots/own").glob("*.png"))

    report = run_sweep("report", "results/own", module="sweep.cli")
    assert report.returncode == 0, report.stderr
    assert "mine.own_workload.build" in (tmp_path / "results/own/report.html").read_text()
    advice = run_sweep("recommend", "results/own", "--effective-batch", "4", module="sweep.cli")
    assert advice.returncode == 0, advice.stderr
    assert "samples/s" in advice.stdout, "nobody knows how many tokens a private batch holds"
    assert OWN in advice.stdout


@pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))
@pytest.mark.parametrize("engine", [{"name": "ddp"}, {"name": "deepspeed", "zero_stage": 2}])
def test_it_runs_on_the_virtual_gpu(make_spec: MakeSpec, mine: Path, tmp_path: Path, engine: dict[str, Any]) -> None:
    spec = make_spec(
        model=own_model(), workload=own(width=32), device=VIRTUAL, world_size=2, engine=engine, precision="bf16"
    )
    record = run_cell(spec, Store(tmp_path / "results"), [])
    assert (record.status, record.reason) == (Status.OK, None)


def test_a_changed_source_is_another_cell(make_spec: MakeSpec, mine: Path) -> None:
    before = make_spec(model=own_model(), workload=own(width=32))
    assert make_spec(model=own_model(), workload=own(width=64)).series_id != before.series_id
    mine.with_name("collator.py").write_text("LONGEST = 7\n")
    changed = make_spec(model=own_model(), workload=own(width=32))
    assert changed.series_id != before.series_id, "the whole package counts"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("mine.nothing.build", "no module mine.nothing is found from"),
        ("nobody.build", "no module nobody is found from"),
        ("mine.own_workload.biuld", "mine.own_workload defines no biuld"),
        ("build", "give package.module.function"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence(mine: Path, target: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        own(target)


def test_a_function_may_take_the_model_of_the_catalogue(make_spec: MakeSpec, mine: Path, tmp_path: Path) -> None:
    mine.write_text(
        "import torch\n"
        "def build(model, batch_size, seq_len):\n"
        "    ids = torch.ones(batch_size, seq_len, dtype=torch.long)\n"
        "    return model, [{'params': list(model.parameters()), 'lr': 1e-3}], [{'input_ids': ids, 'labels': ids}]\n"
    )
    assert not workloads.brings_its_model("mine.own_workload.build")
    record = run_cell(make_spec(workload=own()), Store(tmp_path / "results"), [])
    assert (record.status, record.reason) == (Status.OK, None)
    assert record.tokens_per_second is not None, "these batches have input_ids to count"
    assert record.spec.model.name == "tiny"


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ("return 1", Status.FAILED, "gave int: it must return a torch.nn.Module, an optimizer"),
        ("raise ValueError('no data today')", Status.FAILED, "rank 0: ValueError: no data today"),
        ("return nn.Linear(4, 1), None, [torch.ones(3, 4)]", Status.UNSUPPORTED, "batch_size=1 is not in effect"),
        ("return nn.Linear(4, 1), None, iter([torch.ones(1, 4)])", Status.FAILED, "gave no more batches"),
        ("return nn.Linear(4, 2), None, [torch.ones(1, 4)]", Status.FAILED, "gave Tensor, which holds no loss"),
    ],
)
def test_what_a_workload_does_wrong_is_said(
    make_spec: MakeSpec, mine: Path, tmp_path: Path, body: str, status: Status, sentence: str
) -> None:
    mine.write_text(f"import torch\nfrom torch import nn\ndef build():\n    {body}\n")
    record = run_cell(make_spec(model=own_model(), workload=own()), Store(tmp_path / "results"), [])
    assert record.status is status
    assert sentence in (record.reason or "")


def test_batches_start_again_and_count_what_is_no_padding(make_spec: MakeSpec, mine: Path) -> None:
    spec = make_spec(model=own_model(), workload=own(), batch_size=2)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batches = OwnBatches(spec, [{"input_ids": torch.ones(2, 3), "attention_mask": mask}], CPU)
    for _ in range(3):
        assert set(batches.next()) == {"input_ids", "attention_mask"}
    assert batches.tokens == 9
    unknown = OwnBatches(spec, [[torch.ones(2, 3), torch.ones(2)]], CPU)
    assert len(unknown.next()) == 2, "what a DataLoader gives of a TensorDataset are positional arguments"
    assert unknown.tokens is None


def test_packed_text_is_the_text_without_gaps(make_spec: MakeSpec, file: Path) -> None:
    spec = make_spec(workload=text(file), seq_len=9, batch_size=6)
    batches = TextBatches(spec, 0, CPU)
    batch = batches.next()
    assert set(batch) == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])
    read = sorted(bytes(token - 1 for token in row) for row in batch["input_ids"].tolist())
    joined = "".join(DOCUMENTS).encode()
    assert read == sorted(joined[i : i + 9] for i in range(0, 54, 9))
    assert batches.tokens == 54


@pytest.mark.parametrize(("lengths", "longest"), [("maximum", 64), ("own", 40)])
def test_padded_text_marks_its_padding(make_spec: MakeSpec, file: Path, lengths: str, longest: int) -> None:
    spec = make_spec(workload=text(file, lengths=lengths), seq_len=64, batch_size=3)
    batches = TextBatches(spec, 0, CPU)
    batch = batches.next()
    assert batch["input_ids"].shape == (3, longest)
    assert sorted(batch["attention_mask"].sum(1).tolist()) == [5, 9, 40]
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    assert batches.tokens == 54


def test_ranks_read_different_documents_in_the_same_order(make_spec: MakeSpec, file: Path) -> None:
    two = make_spec(workload=text(file), seq_len=9, batch_size=1, world_size=2)
    first, second = TextBatches(two, 0, CPU), TextBatches(two, 1, CPU)
    alone = TextBatches(make_spec(workload=text(file), seq_len=9, batch_size=2), 0, CPU)
    for _ in range(3):
        both = torch.cat([first.next()["input_ids"], second.next()["input_ids"]])
        assert torch.equal(both, alone.next()["input_ids"])


def test_a_tokenizer_of_a_folder(make_spec: MakeSpec, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[end]": 0, "one": 1, "two": 2, "[?]": 3}, unk_token="[?]"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[end]").save_pretrained(tmp_path / "words")  # noqa: S106
    assert encoded(["one two", "two three"], str(tmp_path / "words")) == [[1, 2, 0], [2, 3, 0]]


def test_a_text_is_trained_on_and_only_its_tokens_are_counted(make_spec: MakeSpec, file: Path, tmp_path: Path) -> None:
    spec = make_spec(workload=text(file, lengths="own"), seq_len=64, batch_size=3)
    record = run_cell(spec, Store(tmp_path / "results"), [])
    assert (record.status, record.reason) == (Status.OK, None)
    assert record.ranks[0].measured_tokens == 2 * 54
    assert record.iteration_seconds is not None
    assert record.tokens_per_second == pytest.approx(108 / sum(record.iteration_seconds))


def test_a_text_that_cannot_serve_is_one_sentence(make_spec: MakeSpec, file: Path) -> None:
    with pytest.raises(SpecError, match="there is no such text file"):
        text(file.with_name("none.txt"))
    with pytest.raises(SpecError, match="it has not one sequence of seq_len=64 tokens"):
        TextBatches(make_spec(workload=text(file), seq_len=64), 0, CPU)
    model = make_spec().model
    small = {"name": "small", "model_type": "llama", "config": {**model.config, "vocab_size": 64}}
    with pytest.raises(SpecError, match="its tokens go up to 100, and model=small has a vocabulary of 64"):
        TextBatches(make_spec(workload=text(file), model=small, seq_len=8), 0, CPU)
    before = text(file)["digest"]
    file.write_text("another text")
    assert text(file)["digest"] != before


LEAK = """
import torch
from torch import nn

class Leak(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), []

    def forward(self, x):
        self.kept.append(torch.empty(1 << 30, dtype=torch.uint8, device=x.device))
        return self.linear(x).sum()

def build(batch_size):
    return Leak(), None, [{"x": torch.zeros(batch_size, 8)}]
"""


@pytest.mark.skipif(virtual.check() is not None, reason=str(virtual.check()))
def test_out_of_memory_after_iterations_that_fitted(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leak.py").write_text(LEAK)
    monkeypatch.chdir(tmp_path)
    device = {"kind": "virtual", "gpu": {"key": "a100-80gb", "total_memory_bytes": 28 << 30}}

    def of(iterations: int) -> CellRecord:
        spec = make_spec(model=own_model(), workload=own("leak.build"), device=device, measured_iterations=iterations)
        return run_cell(spec, Store(tmp_path / "results"), [])

    many = of(40)
    assert many.status is Status.OOM
    assert many.failure is not None
    assert many.failure.phase is Phase.FORWARD
    # One GiB more in every iteration: what the device has besides the leak is less than three.
    assert many.failure.iteration in (25, 26, 27)
    assert many.failure.requested_bytes == 1 << 30
    few = of(5)
    assert (few.status, few.reason) == (
        Status.OK,
        "still growing: reserved memory rose by 5120 MiB while it was measured",
    )
