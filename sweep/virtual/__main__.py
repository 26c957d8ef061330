"""``python -m sweep.virtual run|doctor|gpus``: try a training script on GPUs that are not there."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sweep.virtual.doctor import doctor
from sweep.virtual.environment import DEFAULT_LAG, LAGS
from sweep.virtual.errors import VirtualGpuError
from sweep.virtual.profiles import GpuProfile, gpu, gpus
from sweep.virtual.run import run, screen

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str) -> int:
    """A number of bytes: 1073741824, 1024MiB, 1GiB."""
    number = text.strip().removesuffix("B").removesuffix("i")
    unit = number[-1:].upper() if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(number[-1:]) if unit else number) * _UNITS[unit])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give bytes, or a number with MiB or GiB") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sweep virtual", description="Try a training script on GPUs that are not there."
    )
    commands = parser.add_subparsers(dest="action", required=True)
    runs = commands.add_parser("run", help="run a training command and say what the GPUs held")
    runs.add_argument("--gpu", default="a100-80gb", help="profile, see 'gpus' (default: %(default)s)")
    runs.add_argument("--gpus", type=int, default=1, help="GPUs of the world; the command is rank 0 of it (default: 1)")
    runs.add_argument(
        "--one-process", action="store_true", help="show the GPUs to one ordinary process, without a world"
    )
    runs.add_argument("--distributed", action="store_true", help="form a world even with one GPU")
    runs.add_argument(
        "--total-memory", type=_bytes, metavar="BYTES", help="memory of the GPU, in place of the profile's"
    )
    runs.add_argument(
        "--context", type=_bytes, metavar="BYTES", help="size of the CUDA context, in place of the profile's"
    )
    runs.add_argument("--other-processes", type=_bytes, default=0, metavar="BYTES", help="memory that others hold")
    runs.add_argument("--lag", choices=LAGS, default=DEFAULT_LAG, help="how far the device runs behind the host")
    runs.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    runs.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command", help="for example: -- python train.py")
    commands.add_parser("doctor", help="say whether this machine can do it, and why not")
    commands.add_parser("gpus", help="list the profiles")
    return parser


def _profile(options: argparse.Namespace) -> GpuProfile:
    profile = gpu(options.gpu)
    if options.total_memory is not None:
        profile = dataclasses.replace(profile, total_memory_bytes=options.total_memory, nvml_total_bytes=None)
    if options.context is not None:
        profile = dataclasses.replace(profile, context_bytes=options.context)
    return profile


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise VirtualGpuError("Say what to run after '--', for example: -- python train.py.")
    has_world = not options.one_process and (options.gpus > 1 or options.distributed)
    report = run(
        command,
        _profile(options),
        gpus=options.gpus,
        world_size=options.gpus if has_world else None,
        other_processes_bytes=options.other_processes,
        lag=options.lag,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(screen(report), file=sys.stderr)
    return int(report["exit_code"])


def _list() -> int:
    print(f"{'key':16}{'name':34}{'capability':>11}{'memory GiB':>12}{'context MiB':>13}")
    for profile in gpus().values():
        context = "unknown" if profile.context_bytes is None else str(profile.context_bytes >> 20)
        memory = f"{profile.total_memory_bytes / (1 << 30):.2f}"
        print(f"{profile.key:16}{profile.name:34}{profile.compute_capability:>11}{memory:>12}{context:>13}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; of ``run`` it is the command's own."""
    options = _parser().parse_args(arguments)
    try:
        if options.action == "run":
            return _run(options)
        return doctor() if options.action == "doctor" else _list()
    except VirtualGpuError as error:
        print(f"sweep.virtual: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
