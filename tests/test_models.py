"""The catalogue, and models of the Hub or of a folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import read_model
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import LlamaConfig, LlamaForCausalLM

from sweep import models
from sweep.launch import run_cell
from sweep.record import Status
from sweep.spec import CellSpec, ModelSpec, SpecError, Weights, from_json, unsupported_reason
from sweep.store import Store
from sweep.worker import describe
from sweep.worker.model import build_model

MakeSpec = Callable[..., CellSpec]

PUBLISHED = {
    "bert-base": 109_483_778,  # with the head of two classes
    "bloom-560m": 559_214_592,
    "gemma-2b": 2_506_172_416,
    "gemma2-2b": 2_614_341_888,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-2": 2_779_683_840,
    "pythia-12b": 11_846_072_320,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
}
"""What the files of weights on the Hub hold, as their model cards say."""


def test_the_table_is_what_the_meta_device_counts() -> None:
    counted = models.counted()
    by_name = {name: counted.get(models._digest(models.published(name))) for name in models.names()}
    assert by_name == models.count(), "python -m sweep.models --count"
    assert len(counted) == len(by_name)
    for name, parameters in PUBLISHED.items():
        assert read_model(name)["parameters"] == parameters, name


def test_every_entry_names_itself_and_its_source() -> None:
    for name in models.names():
        content = models.published(name)
        assert content["name"] == name
        assert "parameters" not in content
        assert content["source"] is None or content["source"].startswith("https://")


def test_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("llama2-7b")]
    assert line.split()[:7] == ["llama2-7b", "llama", "6,738,415,616", "32", "4,096", "32,000", "4,096"]
    assert line.split()[7] == "huggingface.co/meta-llama/Llama-2-7b-hf"


def by_path(path: object, **changes: Any) -> dict[str, Any]:
    return models.published("path") | {"path": str(path), "name": "mine"} | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as `save_pretrained` leaves it."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


def test_a_folder_gives_its_architecture(folder: Path) -> None:
    content = models.complete(by_path(folder))
    model = from_json(ModelSpec, content)
    assert (model.name, model.model_type, model.context, model.path) == ("mine", "llama", 128, None)
    assert model.parameters == sum(p.numel() for p in LlamaForCausalLM.from_pretrained(folder).parameters())

    fewer = models.complete(by_path(folder, config={"num_hidden_layers": 1}))
    assert fewer["config"]["num_hidden_layers"] == 1
    assert fewer["parameters"] < content["parameters"]


def test_pretrained_weights_are_those_of_the_folder(make_spec: MakeSpec, folder: Path, tmp_path: Path) -> None:
    model = models.complete(by_path(folder, weights="pretrained"))
    spec = make_spec(model=model)
    assert (spec.model.weights, spec.model.path) == (Weights.PRETRAINED, str(folder))
    loaded, saved = build_model(spec, torch.float32), LlamaForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), saved.parameters(), strict=True))
    record = run_cell(spec, Store(tmp_path / "results"), [])
    assert (record.status, record.reason) == (Status.OK, None)

    sharded = make_spec(model=model, engine={"name": "deepspeed", "zero_stage": 3})
    assert "choose engine.zero_init=false" in str(unsupported_reason(sharded))

    on_gpu = make_spec(model=model, engine={"name": "fsdp2"}, device={"kind": "cuda"})
    assert "choose model.weights=random" in str(unsupported_reason(on_gpu))

    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    models._described.cache_clear()
    assert models.complete(by_path(folder, weights="pretrained"))["revision"] != model["revision"]


def test_a_classifier_of_a_folder(make_spec: MakeSpec, folder: Path) -> None:
    content = models.complete(by_path(folder, task="sequence-classification"))
    built = build_model(make_spec(model=content), torch.float32)
    assert content["parameters"] == sum(parameter.numel() for parameter in built.parameters())


def described(**content: Any) -> str:
    with pytest.raises(describe.NoSuchModelError) as error:
        describe.describe(by_path(**content))
    field, value, valid = error.value.args
    return str(SpecError(field, value, valid))


def test_what_is_no_model_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the folder has no config.json" in described(path=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "news"}))
    assert "transformers knows no architecture model_type=news" in described(path=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "news", "auto_map": {"AutoConfig": "a.B"}}))
    assert "model.remote_code=true runs the code that comes with it" in described(path=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "model.config.foo=1 is not valid" in described(path=tmp_path, config={"foo": 1})

    response: Any = Mock()
    monkeypatch.setattr(describe, "hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for refusal, sentence in (
        (GatedRepoError("gated", response=response), "its owner grants access on request"),
        (RepositoryNotFoundError("none", response=response), "the Hub has no model of that name"),
    ):

        def refuse(*_: object, refusal: Exception = refusal, **__: object) -> None:
            raise refusal

        monkeypatch.setattr(describe, "hf_hub_download", refuse)
        assert sentence in described(path="a/b")


def test_weights_need_a_place_to_come_from() -> None:
    with pytest.raises(SpecError, match=r"only model.path=\.\.\. has weights to load"):
        models.complete(models.published("tiny") | {"weights": "pretrained"})
