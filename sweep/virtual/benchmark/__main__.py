"""``python -m sweep.virtual.benchmark FOLDER``: the virtual GPU against published measurements.

Installs the software of the measurements into FOLDER (3 GB), runs each published row there under
``python -m sweep.virtual run``, prints the comparison and writes it to ``results/virtual-gpu/``.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from sweep.virtual.environment import DEFAULT_LAG, LAGS

HERE = Path(__file__).parent
REQUIREMENTS = (
    "torch==2.2.2",
    "transformers==4.40.0",
    "deepspeed==0.14.2",
    "accelerate==0.29.3",
    "numpy<2",
    "setuptools",
)
MIB = 1 << 20
Row = dict[str, Any]


def old_environment(folder: Path) -> Path:
    """The Python of the environment in the folder, installed if it is not there yet."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True)
        # deepspeed's own build step needs torch and setuptools to be there already
        for packages in (REQUIREMENTS[:1] + REQUIREMENTS[4:], REQUIREMENTS):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "installed").touch()
    return python


def command(row: Row, python: Path, steps: int) -> list[str]:
    """The plain script and its arguments for one published row."""
    if row["model"].startswith("pythia"):
        script = ["train_accumulation.py", "--precision", row["precision"], "--accumulation", row["accumulation"]]
    else:
        script = ["train_zero3.py", "--model", row["model"], "--batch-size", row["batch_size"]]
        script += ["--gradient-checkpointing"] if row["gradient_checkpointing"] == "true" else []
    return [str(python), str(HERE / script[0]), *script[1:], "--steps", str(steps)]


def run_row(row: Row, python: Path, *, steps: int, lag: str) -> Row:
    """Runs one row and returns what the virtual GPU says of it."""
    variables = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    if row["expandable_segments"] == "true":
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    world = [] if row["model"].startswith("pythia") else ["--distributed"]
    others = ["--other-processes", f"{row['assumed_other_processes_mib']}MiB"]
    options = ["--gpu", row["gpu"], "--gpus", row["world_size"], "--lag", lag, *others, *world]
    done = subprocess.run(
        [python, "-m", "sweep.virtual", "run", *options, "--", *command(row, python, steps)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"status"')]
    if not lines:
        raise RuntimeError(f"{row} failed:\n{done.stderr[-3000:]}")
    result: Row = json.loads(lines[-1])
    return {
        "status": result["status"],
        "active_peak_mib": result["active_bytes.all.peak"] // MIB,
        "reserved_peak_mib": result["reserved_bytes.all.peak"] // MIB,
        "alloc_retries": result["num_alloc_retries"],
    }


def _error(virtual: int, low: str, high: str) -> float | None:
    """Relative distance to the measured range of the ranks, in percent; 0 within it."""
    if not low:
        return None
    nearest = min(max(virtual, int(low)), int(high))
    return 100 * (virtual - nearest) / nearest


def compare(row: Row, virtual: Row) -> Row:
    """One line of the table."""
    fits = virtual["status"] == row["status"] == "ok"
    errors = {
        f"{name}_error_percent": _error(
            virtual[f"{name}_peak_mib"], row[f"{name}_peak_min_mib"], row[f"{name}_peak_max_mib"]
        )
        if fits
        else None
        for name in ("active", "reserved")
    }
    rounded = {name: None if error is None else round(error, 2) for name, error in errors.items()}
    return {**row, **{f"virtual_{name}": value for name, value in virtual.items()}, **rounded}


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low}-{high}"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:+.2f}%" if isinstance(value, float) else str(value)


def markdown(table: list[Row], lag: str, steps: int) -> str:
    """The table for people."""
    lines = [
        "# The virtual GPU against published measurements",
        "",
        "Measured on real GPUs by others: `gpjt/fine-tune-2024-04` (fp16, AdamW, ZeRO-3, 2048 tokens, 30 steps; the",
        "range is over the ranks) and `huggingface/accelerate#2035` (SGD, 8 tokens, checkpointing). Virtual:",
        f"PyTorch 2.2.2, transformers 4.40.0, deepspeed 0.14.2, accelerate 0.29.3, lag {lag}, {steps} steps, no GPU.",
        "Peaks in MiB. The error is the distance to the measured range. That other processes held 1700 MiB of the RTX",
        "3090 is inferred, not published: PyTorch never reserved more than 21918 MiB there before it ran out. So are",
        "the 500 MiB of each A100 outside of PyTorch, about what NCCL's buffers take: without them batch size 13 runs",
        "with checkpointing alone, and with them batch size 14 has the published active peak to the MiB.",
        "",
        "| model | checkpointing | expandable | batch | accumulation | precision | measured active | virtual | error "
        "| measured reserved | virtual | error | retries |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        oom = row["virtual_status"] == "oom"
        cells = (
            row["model"],
            row["gradient_checkpointing"],
            row["expandable_segments"],
            row["batch_size"],
            row["accumulation"],
            row["precision"],
            "OOM" if row["status"] == "oom" else _span(row["active_peak_min_mib"], row["active_peak_max_mib"]),
            "OOM" if oom else row["virtual_active_peak_mib"],
            row["active_error_percent"],
            "OOM" if row["status"] == "oom" else _span(row["reserved_peak_min_mib"], row["reserved_peak_max_mib"]),
            "OOM" if oom else row["virtual_reserved_peak_mib"],
            row["reserved_error_percent"],
            row["virtual_alloc_retries"],
        )
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the rows one after the other."""
    parser = argparse.ArgumentParser(prog="python -m sweep.virtual.benchmark", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to install the software of the measurements")
    parser.add_argument("--output", type=Path, default=Path("results/virtual-gpu"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lag", choices=LAGS, default=DEFAULT_LAG)
    parser.add_argument("--only", default="", help="rows whose text contains this, for example 'llama3-8b,a100'")
    options = parser.parse_args()
    python = old_environment(options.folder.absolute())
    with (HERE / "published.csv").open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if options.only in ",".join(row.values())]
    table = []
    for row in rows:
        table.append(compare(row, run_row(row, python, steps=options.steps, lag=options.lag)))
        print(json.dumps(table[-1]), file=sys.stderr)
    options.output.mkdir(parents=True, exist_ok=True)
    name = f"published-{options.lag}"
    with (options.output / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    text = markdown(table, options.lag, options.steps)
    (options.output / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


main()
