"""Hydra's own errors for a wrong command line, as one sentence that names the group and the choices."""

import sys
from collections.abc import Sequence

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode

from sweep.config import CONF


def fail(message: str) -> None:
    """End the program as a user's mistake ends it: one sentence on stderr, exit code 1."""
    sys.exit(f"sweep: {message}")


def fail_on_unknown_option(arguments: Sequence[str]) -> None:
    """Compose once before Hydra takes over, since Hydra's own message would be a page."""
    overrides = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    if any(argument.startswith("-") for argument in overrides):
        return  # --help, --cfg and the like: Hydra answers
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
        except MissingConfigException as error:
            group, _, option = (error.missing_cfg_file or "").rpartition("/")
            if not error.options:
                fail(" ".join(str(error).split()))
            fail(f"{group}={option} is not known: choose one of {', '.join(error.options or [])}.")
        except HydraException as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            sentence = " ".join(f"{error}{cause}".split()).partition(" See http")[0]
            fail(f"{sentence.rstrip('.')}; --help shows what can be set.")
