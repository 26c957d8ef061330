"""What `sweep` can do: its commands, and the help of the application. Neither Hydra nor torch is needed for it."""

import re
from collections.abc import Iterator, Sequence

from sweep.config import CONF

COMMANDS = {
    "models": ("sweep.models", "list the models of the catalogue"),
    "plots": ("sweep.plots", "draw charts of results, again or of other kinds"),
    "report": ("sweep.report", "print the tables again; write report.html and summary.md"),
    "recommend": ("sweep.recommend", "rank what reaches an effective batch; write it as a launcher's file"),
    "explain": ("sweep.explain", "what the memory is at the moment of the peak, and what brings it down"),
    "compare": ("sweep.compare", "set two sweeps or more side by side, cell by cell"),
    "import": ("sweep.importing", "take other people's measurements in"),
    "export": ("sweep.exporting", "write a sweep for other tools"),
    "calibrate": ("sweep.calibrate", "fit estimated times to measured ones"),
    "virtual": ("sweep.virtual.__main__", "run a script of your own on the virtual GPU; list the GPUs"),
}
"""By name: the module that has its `main`, and what it does."""

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")

_HEAD = """\
sweep: which batch sizes fit, and how fast, in which configuration.

  sweep model=llama3-8b                                   the default grid, each series until out of memory
  sweep model=llama3-8b batch_size=1,2,4 precision=bf16   several values are an axis of the grid
  sweep model=llama3-8b engine=fsdp2 --dry-run            only say what would be measured first
  sweep model=tiny device=cpu                             really trains, on this machine's CPU

Results go to results/<sweep>/ and are reused; charts go to plots/<sweep>/. `python -m sweep.run` is the same.
"""
_TAIL = """\
Options of another choice: engine=fsdp2 --help. What a command line composes to: --cfg job.
Tab completion: eval "$(sweep -sc install=bash)"
"""


def options(group: str) -> list[str]:
    """What can be chosen of a group of conf/."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def short_help() -> str:
    """What to type first."""
    return "\n".join([*_commands(), "\nsweep --help says what every value means."])


def help_text(arguments: Sequence[str]) -> str:
    """Commands, groups and values with their comments, and the options of the choices among `arguments`."""
    return "\n".join(_parts(arguments))


def _commands() -> Iterator[str]:
    yield _HEAD
    yield "== Commands (sweep COMMAND --help) =="
    yield from (f"{name:<11}{what}" for name, (_, what) in COMMANDS.items())


def _parts(arguments: Sequence[str]) -> Iterator[str]:
    yield from _commands()
    yield "\n== Groups (choose with group=option) =="
    yield from (f"{group}: {', '.join(options(group))}" for group in GROUPS)
    yield "\n== Values (override with key=value, sweep with key=a,b) =="
    config = (CONF / "config.yaml").read_text(encoding="utf-8")
    if shown := re.search(r"^# Where results go.*?(?=^hydra:)", config, re.DOTALL | re.MULTILINE):
        yield shown.group()
    chosen = dict(each.split("=", 1) for each in ("engine=deepspeed", *arguments) if "=" in each)
    for group in GROUPS:
        for option in chosen.get(group, "").split(","):
            if option in options(group):
                yield f"== {group}={option} =="
                yield (CONF / group / f"{option}.yaml").read_text(encoding="utf-8")
    yield _TAIL.rstrip()
