"""Which models there are, and what is computed of each: `sweep models` lists them.

The numbers of `conf/model/` describe architectures; how many parameters one has is what the model itself counts, built
on PyTorch's meta device, which takes no memory. That needs torch, so that a child process does it
(`sweep.worker.describe`). `models.csv` keeps what it said of the catalogue (`sweep models --count` writes it anew);
any other architecture is asked for once per process.
"""

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sweep.spec import SpecError, Weights

CATALOGUE = Path(__file__).resolve().parent.parent / "conf" / "model"
TABLE = Path(__file__).with_suffix(".csv")
BY_PATH = "path"
"""The entry of `conf/model/` that stands for any model of the Hub or of a folder."""
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the model itself says, built on the meta device. None where its architecture has no such number."""

    parameters: int
    """Tied weights counted once; with the head of its task."""
    layers: int | None
    hidden_size: int | None
    vocabulary: int | None
    context: int | None
    """Tokens that its positions reach; None where they have no end, as ALiBi's."""


def names() -> list[str]:
    return sorted(path.stem for path in CATALOGUE.glob("*.yaml") if path.stem != BY_PATH)


def published(name: str) -> dict[str, Any]:
    """An entry of the catalogue as it is written."""
    content: dict[str, Any] = yaml.safe_load((CATALOGUE / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def model(name: str) -> dict[str, Any]:
    """The fields of `ModelSpec` of an entry of the catalogue."""
    return complete(published(name))


def complete(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelSpec`: with the parameters counted, and with the configuration that its path leads to.

    Raises `SpecError`, one sentence, where there is no such model or it cannot be built.
    """
    fields_ = {key: value for key, value in content.items() if key != "source"}
    if fields_.get("path") is None:
        if fields_.get("weights", Weights.RANDOM.value) != Weights.RANDOM.value:
            raise SpecError("model.weights", fields_["weights"], "only model.path=... has weights to load")
        facts = counted().get(_digest(fields_))
        return fields_ | {"parameters": facts.parameters if facts else _describe(fields_)["facts"]["parameters"]}
    said = _describe(fields_)
    kept = {key: fields_[key] for key in ("name", "task")} | {"parameters": said["facts"]["parameters"]}
    kept |= {key: said[key] for key in ("model_type", "config")}
    if fields_.get("remote_code") or fields_.get("weights") == Weights.PRETRAINED.value:
        # What is on the path decides more than the configuration: it belongs to the cell.
        kept |= {key: fields_[key] for key in ("path", "weights", "remote_code")} | {"revision": said["revision"]}
    return kept


@cache
def counted() -> dict[str, Facts]:
    """The committed table, by the digest of what was counted: an entry that was changed since is not in it."""
    whole = [field.name for field in fields(Facts)]
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {
            row["digest"]: Facts(**{name: int(row[name]) if row[name] else None for name in whole})  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        }


def _digest(content: Mapping[str, Any]) -> str:
    decides = {key: content[key] for key in ("model_type", "task", "config")}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _describe(content: Mapping[str, Any]) -> dict[str, Any]:
    (said,) = json.loads(_described(json.dumps([content], sort_keys=True)))
    if "error" in said:
        raise SpecError(*said["error"])
    answer: dict[str, Any] = said
    return answer


@cache
def _described(contents: str) -> str:
    """Ask a process that has torch. A list of models in, a list of answers or errors out, both as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "sweep.worker.describe"],
        input=contents,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise SpecError("model.name", json.loads(contents)[0]["name"], f"it cannot be looked at: {why}")
    return lines[-1]


def count() -> dict[str, Facts]:
    """Build every entry of the catalogue on the meta device, and count."""
    contents = [{key: value for key, value in published(name).items() if key != "source"} for name in names()]
    answers = json.loads(_described(json.dumps(contents)))
    for said in answers:
        if "error" in said:
            raise SpecError(*said["error"])
    return {name: Facts(**said["facts"]) for name, said in zip(names(), answers, strict=True)}


def write_table() -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", "digest", *(field.name for field in fields(Facts))])
        for name, facts in count().items():
            writer.writerow([name, _digest(published(name)), *asdict(facts).values()])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep models", description="List the models of conf/model/.")
    parser.add_argument("--count", action="store_true", help="build each one on the meta device and count anew")
    options = parser.parse_args(arguments)
    if options.count:
        write_table()
        counted.cache_clear()
    known = counted()
    from rich.console import Console  # a bare machine, on which `gpu_check` runs, has none
    from rich.table import Table

    table = Table("model", "family", box=None, pad_edge=False)
    for column in ("parameters", "layers", "hidden", "vocabulary", "context"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("numbers from", no_wrap=True)
    for name in names():
        content = published(name)
        facts = known.get(_digest(content))
        figures = [None] * len(fields(Facts)) if facts is None else list(asdict(facts).values())
        shown = ["" if figure is None else f"{figure:,}" for figure in figures]
        table.add_row(
            name, content["model_type"], *shown, (content["source"] or "not published").removeprefix("https://")
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a file and a pipe have no width of their own
    console.print(table)
    console.print("Parameters are counted by the model itself, tied weights once; with the head of its task.")
    console.print("Any other: model.path=HUB_ID_OR_FOLDER.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
