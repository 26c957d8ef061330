"""The Hydra application: `python -m sweep.run -m model=llama3-8b batch_size=1,2,4 gradient_checkpointing=false,true`.

One Hydra job is one cell. The sweeper (`hydra_plugins/sweep_until_oom`) decides which cells; a job looks its cell up
in the store, or launches it and saves the record, and returns it. It never raises for what a cell did.
"""

import os
import sys
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sweep.config import CONF, job_from
from sweep.help import help_text
from sweep.launch import run_cell
from sweep.models import BY_PATH
from sweep.record import CellRecord
from sweep.spec import SizeAxis
from sweep.store import RESULTS, Store
from sweep.workloads import OWN


def run(config: DictConfig) -> CellRecord | OSError:
    """Measure one cell. Gives its record, which is in the store; the error where nothing can be stored any more."""
    job = job_from(config)
    overrides = list(HydraConfig.get().overrides.task)
    try:
        return run_cell(
            job.spec,
            Store(RESULTS / job.sweep),
            overrides,
            force=bool(config.force),
            searched=SizeAxis(config.search.axis),
        )
    except OSError as error:  # given to the sweeper: Hydra would print its own words about one that is raised
        return error


IMPLIED = {"model.path=": f"model={BY_PATH}", "workload._target_=": f"workload={OWN}"}
"""Values that make sense with one choice of a group alone: naming the value makes the choice."""


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """The arguments with what they imply."""
    given = ["dry_run=true" if argument == "--dry-run" else argument for argument in arguments]
    for value, choice in IMPLIED.items():
        group = choice.partition("=")[0] + "="
        if any(each.startswith(value) for each in given) and not any(each.startswith(group) for each in given):
            given.append(choice)
    return given


def main() -> None:
    from sweep.usage import fail, fail_on_mistakes

    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text(sys.argv[1:]))
        return
    if "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ:
        fail("this is one of several ranks, and each would run the whole sweep: start it once, without torchrun.")
    sys.argv[1:] = spelled_out(sys.argv[1:])
    fail_on_mistakes(sys.argv[1:])
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()


if __name__ == "__main__":
    main()
