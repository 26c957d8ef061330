"""What a cell trains on, looked at without running it: the text file, or the module of a user's own workload.

The user's module is only read here: importing it may import torch, or do anything else that its author wants.
"""

import ast
import hashlib
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from sweep.spec import SpecError

OWN = "own"
"""The entry of `conf/workload/` that stands for any function of a user."""
MODEL = "model"
"""A parameter of that name gets the model of `model=...`."""


def complete(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `WorkloadSpec`. Raises `SpecError` where a file, a module or a function is not there."""
    if content.get("_target_") is not None:
        rest = {key: value for key, value in content.items() if key not in ("name", "_target_")}
        target = str(content["_target_"])
        return {"name": OWN, "target": target, "arguments": rest, "digest": _digest(_sources(target))}
    if content.get("path") is not None:
        path = Path(str(content["path"])).expanduser()
        if not path.is_file():
            raise SpecError("workload.path", path, "there is no such text file")
        if content.get("tokenizer") is not None and not Path(str(content["tokenizer"])).expanduser().is_dir():
            raise SpecError("workload.tokenizer", content["tokenizer"], "give a folder with a tokenizer, or null")
        return dict(content) | {"path": str(path), "digest": _digest([path])}
    return dict(content)


def brings_its_model(target: str) -> bool:
    """Whether the user's function makes the model itself, rather than take it as its parameter `model`."""
    definition = _definition(target)
    if not isinstance(definition, ast.FunctionDef):
        return True
    parameters = [*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs]
    return all(parameter.arg != MODEL for parameter in parameters)


def _sources(target: str) -> list[Path]:
    """The module's file, or every Python file of the package that it belongs to."""
    _definition(target)
    file = _file_of(target)
    package = file.parent
    if not (package / "__init__.py").is_file():
        return [file]
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    return sorted(package.rglob("*.py"))


def _definition(target: str) -> ast.AST:
    """Where the module defines, assigns or imports the function."""
    name = target.rpartition(".")[2]
    try:
        module = ast.parse(_file_of(target).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise SpecError(
            "workload._target_", target, f"{error.filename or 'the module'} is not Python: {error}"
        ) from error
    for node in module.body:
        names = {alias.asname or alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
        names |= {each.id for each in getattr(node, "targets", []) if isinstance(each, ast.Name)}
        if getattr(node, "name", None) == name or name in names:
            return node
    raise SpecError("workload._target_", target, f"{target.rpartition('.')[0]} defines no {name}")


def _file_of(target: str) -> Path:
    """Found as an import in the current folder would, and without importing anything, its packages included."""
    module = target.rpartition(".")[0]
    if not module:
        raise SpecError("workload._target_", target, "give package.module.function")
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    parts = module.split(".")
    for number in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), places)
        if spec is None:
            valid = f"no module {module} is found from {Path.cwd()}, nor on PYTHONPATH"
            raise SpecError("workload._target_", target, valid)
        places = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise SpecError("workload._target_", target, f"{module} is not a Python file")
    return Path(spec.origin)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
