"""Frozen dataclasses to JSON and back, with one sentence for whatever does not fit."""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


class SpecError(ValueError):
    """A value that the user can correct. One sentence: the field, the value, what would be valid."""

    def __init__(self, field: str, value: object, valid: str) -> None:
        super().__init__(f"{field}={_shown(value)} is not valid: {valid}.")
        self.field = field


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return "null" if value is None else str(value)


def positive(field: str, value: object) -> None:
    """Raises `SpecError` for anything but a whole number of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(field, value, "give a whole number of 1 or more")


def to_json(value: Any) -> Any:
    """A frozen dataclass as plain JSON values; `from_json` is its inverse."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


LATER: Mapping[str, bool] = types.MappingProxyType({"later": True})
"""Marks a field that specs of earlier versions lack: at its default it is no part of a spec's identity."""


def identity_of(value: Any) -> Any:
    """As `to_json`, without the fields of later versions that are at their default: stored cells keep their names."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return to_json(value)
    return {
        field.name: identity_of(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if not (field.metadata.get("later") and getattr(value, field.name) == field.default)
    }


def from_json(kind: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass `kind` from JSON values. Raises `SpecError` naming the field that does not fit."""
    unnamed: Any = kind
    fields = _fields(unnamed)
    for name in data:
        if name not in fields:
            raise SpecError(path + name, data[name], f"there is no such field; known are {', '.join(sorted(fields))}")
    values = {}
    for name, (convert, required) in fields.items():
        if name in data:
            values[name] = convert(data[name], path + name)
        elif required:
            raise SpecError(path + name, None, "it is required")
    return kind(**values)


Converter = Callable[[Any, str], Any]


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Converter, bool]]:
    """How each field is read, and whether it must be there. Looked up once: thousands of records are read at a time."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        field.name: (_converter(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }


@functools.cache
def _converter(hint: Any) -> Converter:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = _converter(next(a for a in arguments if a is not type(None)))
        return lambda value, path: None if value is None else inner(value, path)
    if origin is tuple:
        return functools.partial(_to_tuple, _converter(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return functools.partial(_to_mapping, _converter(arguments[0]), _converter(arguments[1]))
    if dataclasses.is_dataclass(hint):
        return functools.partial(_to_dataclass, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return functools.partial(_to_enum, hint)
    if hint in (int, float, str, bool):
        return functools.partial(_to_plain, hint)
    return lambda value, path: value


def _to_tuple(item: Converter, value: Any, path: str) -> Any:
    if not isinstance(value, list | tuple):
        raise SpecError(path, value, "give a list")
    return tuple([item(each, f"{path}[{i}]") for i, each in enumerate(value)])


def _to_mapping(key: Converter, item: Converter, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecError(path, value, "give a mapping")
    return {key(k, path): item(v, f"{path}.{k}") for k, v in value.items()}


def _to_dataclass(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecError(path, value, f"give the fields of {kind.__name__}")
    return from_json(kind, value, path + ".")


def _to_enum(kind: type[Enum], value: Any, path: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        raise SpecError(path, value, "choose one of " + ", ".join(str(m.value) for m in kind)) from None


def _to_plain(kind: type, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
        raise SpecError(path, value, f"give {wanted}")
    return value
