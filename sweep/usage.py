"""Mistakes on the command line, each as one sentence that names the key and the choices; Hydra's own are a page."""

import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from sweep.config import CONF
from sweep.help import COMMANDS, GROUPS, options


def fail(message: str) -> NoReturn:
    """End the program as a user's mistake ends it: one sentence on stderr, exit code 1."""
    sys.exit(f"sweep: {message}")


def values_of(override: Override) -> list[str]:
    """The values that an override gives to its key; several where it is swept. Ends the program on other sweeps."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    try:
        values = [str(value) for value in override.sweep_string_iterator()] if override.is_discrete_sweep() else []
    except HydraException as error:
        fail(f"{override.input_line}: {' '.join(str(error).split())}.")
    if not values:
        fail(f"{override.input_line} names no values: sweep {key} with a list such as a,b or with range(1,5).")
    return values


def fail_on_mistakes(arguments: Sequence[str]) -> None:
    """Compose once before Hydra takes over."""
    overrides = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    if any(argument.startswith("-") for argument in overrides):
        return  # --cfg and the like: Hydra answers
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            close = difflib.get_close_matches(word.lower(), COMMANDS, n=1)
            meant = f"did you mean sweep {close[0]}? " if close else ""
            fail(f"{word} is neither a command nor of the form key=value: {meant}--help shows both.")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            for override in OverridesParser.create(config_loader=loader).parse_overrides(overrides):
                _check_choice(override)
            loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
        except HydraException as error:
            chosen = [each for each in overrides if each.partition("=")[0] in GROUPS]
            known = loader.load_configuration("config", chosen, run_mode=RunMode.MULTIRUN)
            keys = [*GROUPS, *_keys(OmegaConf.to_container(known, resolve=False))]
            fail(_sentence(error, overrides, keys))
        except ValueError as error:
            fail(f"{' '.join(str(error).split()).rstrip('.')}; --help shows what can be set.")


def _check_choice(override: Override) -> None:
    group, values = override.get_key_element().lstrip("+~"), values_of(override)
    if group == "hydra/sweeper" and values != ["until_oom"]:
        fail(f"hydra/sweeper={','.join(values)} cannot run a sweep: leave it at until_oom.")
    if group not in GROUPS:
        return
    known = options(group)
    for value in values:
        if value not in known and not (group == "experiment" and value == "null"):
            begun = [each for each in known if value and each.startswith(value.lower())]
            if close := begun[:3] or difflib.get_close_matches(value.lower(), known):
                fail(f"{group}={value} is not known: did you mean {' or '.join(close)}? --help shows all.")
            fail(f"{group}={value} is not known: choose one of {', '.join(known)}.")


def _keys(content: Any, path: str = "") -> Iterator[str]:
    for key, value in content.items():
        if key == "hydra":
            continue
        yield f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{path}{key}.")


def _choices_with(key: str) -> str:
    """The choices whose own values have this key, as `engine=deepspeed`; empty where there are none."""
    group, _, field = key.partition(".")
    files = {each: CONF / group / f"{each}.yaml" for each in options(group)} if group in GROUPS else {}
    found = [each for each, file in files.items() if f"\n{field}:" in file.read_text(encoding="utf-8")]
    return f"{group}={' or '.join(found)}" if found else ""


def _sentence(error: HydraException, overrides: Sequence[str], keys: Sequence[str]) -> str:
    for override in overrides:
        key = override.partition("=")[0].lstrip("~")
        if "=" in override and key not in keys and not key.startswith(("hydra", "+")):  # + is for what is not there
            if elsewhere := _choices_with(key):
                return f"{key} is not valid here: only {elsewhere} has it."
            close = difflib.get_close_matches(key.lower(), keys, n=1)
            meant = f"did you mean {close[0]}? --help shows" if close else "--help shows"
            return f"{key} is not known: {meant} what can be set."
    sentence = " ".join(str(error).split()).partition(" See http")[0]
    return f"{sentence.rstrip('.')}; --help shows what can be set."
