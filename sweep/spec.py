"""What one cell is: `CellSpec`, frozen and validated, and its identities.

A spec is the whole truth about a cell: the launcher writes it as JSON and the training process reads nothing else.
`cell_id` identifies a cell together with the environment that decides its result, `series_id` the cells that
differ in batch size alone. Sizes are in bytes, durations in seconds, lengths in tokens.
"""

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

SCHEMA_VERSION = 1  # 1: first
LATER = {"later": True}
"""Marks a field that came after records were published: at its default it is no part of a cell's identity."""

E = TypeVar("E", bound=Enum)
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


class DeviceKind(str, Enum):
    CUDA = "cuda"
    VIRTUAL = "virtual"
    CPU = "cpu"


class EngineName(str, Enum):
    DDP = "ddp"
    DEEPSPEED = "deepspeed"


class Precision(str, Enum):
    """`bf16` and `fp16` are mixed precision with fp32 master weights; `bf16_pure` keeps everything in bf16."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16_PURE = "bf16_pure"


class Task(str, Enum):
    CAUSAL_LM = "causal-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"


class Weights(str, Enum):
    RANDOM = "random"
    PRETRAINED = "pretrained"


class Optimizer(str, Enum):
    ADAMW = "adamw"
    SGD = "sgd"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    name: str
    model_type: str
    """The key under which transformers knows the architecture, such as `llama`."""
    task: Task = Task.CAUSAL_LM
    parameters: int | None = None
    """Number of parameters, tied weights counted once; None where only a user's own code knows the model."""
    config: Mapping[str, Any]
    """Keyword arguments of the architecture's configuration class: the published numbers."""
    path: str | None = field(default=None, metadata=LATER)
    """Hub id or folder, where more than its configuration is taken from there."""
    weights: Weights = field(default=Weights.RANDOM, metadata=LATER)
    remote_code: bool = field(default=False, metadata=LATER)
    """Whether code that comes with the model may run."""
    revision: str | None = field(default=None, metadata=LATER)
    """What identifies the content of `path`."""

    def __post_init__(self) -> None:
        if self.parameters is not None:
            positive("model.parameters", self.parameters)
        if self.path is None and (self.weights is not Weights.RANDOM or self.remote_code):
            raise SpecError("model.path", None, "it is required for pretrained weights and for a model's own code")

    @property
    def context(self) -> int | None:
        """The most tokens that its positions reach, where its configuration says so."""
        longest = self.config.get("max_position_embeddings", self.config.get("n_positions"))
        return longest if isinstance(longest, int) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    name: EngineName
    zero_stage: int | None = None

    def __post_init__(self) -> None:
        if self.name is EngineName.DEEPSPEED:
            if self.zero_stage not in (0, 1, 2, 3):
                raise SpecError("engine.zero_stage", self.zero_stage, "choose 0, 1, 2 or 3")
        elif self.zero_stage is not None:
            raise SpecError(
                "engine.zero_stage", self.zero_stage, "only engine=deepspeed has ZeRO stages; leave it null"
            )

    @property
    def label(self) -> str:
        return self.name.value if self.zero_stage is None else f"ZeRO-{self.zero_stage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """The virtual GPU: a profile's key, and what is changed in it."""

    key: str
    total_memory_bytes: int | None = None
    other_processes_bytes: int = 0

    def __post_init__(self) -> None:
        if self.total_memory_bytes is not None:
            positive("gpu.total_memory_bytes", self.total_memory_bytes)
        if self.other_processes_bytes < 0:
            raise SpecError(
                "gpu.other_processes_bytes", self.other_processes_bytes, "give a number of bytes, 0 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    kind: DeviceKind
    gpu: GpuSpec | None = None
    """Which GPU the virtual device plays."""
    memory_limit_bytes: int | None = None
    """CPU only: the address space that a rank may take on top of what it holds once its libraries are imported."""

    def __post_init__(self) -> None:
        assert (self.gpu is not None) == (self.kind is DeviceKind.VIRTUAL)
        if self.kind is DeviceKind.CPU:
            positive("device.memory_limit_bytes", self.memory_limit_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSpec:
    model: ModelSpec
    engine: EngineSpec
    device: DeviceSpec
    world_size: int
    batch_size: int
    """Sequences per device per forward pass (the micro-batch)."""
    seq_len: int
    gradient_checkpointing: bool = False
    expandable_segments: bool = False
    precision: Precision = Precision.BF16
    accumulation: int = 1
    """Forward passes per optimizer step."""
    optimizer: Optimizer = Optimizer.ADAMW
    gradient_clipping: float | None = 1.0
    warmup_iterations: int = 2
    """Iterations before the measured ones; the optimizer's states exist only after the first."""
    measured_iterations: int = 5
    seed: int = 0
    timeout_seconds: float | None = None
    """None: from the pace of the cells before (`sweep.launch.pace`). No part of a cell's identity."""

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "seq_len", "accumulation", "measured_iterations"):
            positive(name, getattr(self, name))
        if self.warmup_iterations < 1:
            raise SpecError(
                "warmup_iterations",
                self.warmup_iterations,
                "give 1 or more, so that the optimizer has stepped",
            )
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds < math.inf:
            raise SpecError("timeout_seconds", self.timeout_seconds, "give a number of seconds above 0, or null")
        if self.seed < 0:
            raise SpecError("seed", self.seed, "give a whole number of 0 or more")
        if self.gradient_clipping is not None and not 0 < self.gradient_clipping < math.inf:
            raise SpecError("gradient_clipping", self.gradient_clipping, "give a norm above 0, or null for none")
        longest = self.model.context
        if longest is not None and self.seq_len > longest:
            raise SpecError("seq_len", self.seq_len, f"model={self.model.name} takes at most {longest} tokens")

    @property
    def effective_batch_size(self) -> int:
        return self.batch_size * self.accumulation * self.world_size

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens that the whole world processes in one optimizer step."""
        return self.effective_batch_size * self.seq_len

    @property
    def series_id(self) -> str:
        """The same for all cells that differ in batch size alone."""
        content = _identity(self)
        del content["batch_size"]
        return _digest(content)

    @property
    def axes(self) -> dict[str, object]:
        """The values that charts and tables compare, by the name under which they are swept."""
        return {
            "model": self.model.name,
            "engine": self.engine.label,
            "device": self.device.kind.value,
            "gpu": self.device.gpu.key if self.device.gpu else None,
            "world_size": self.world_size,
            "seq_len": self.seq_len,
            "optimizer": self.optimizer.value,
            "precision": self.precision.value,
            "gradient_checkpointing": self.gradient_checkpointing,
            "expandable_segments": self.expandable_segments,
            "accumulation": self.accumulation,
        }


def unsupported_reason(spec: CellSpec) -> str | None:
    """Why this combination makes no sense, or None. Known before anything is spawned."""
    if spec.device.kind is DeviceKind.CPU:
        if spec.expandable_segments:
            return "expandable segments are a feature of the CUDA allocator; the CPU device has none"
        if spec.precision in (Precision.TF32, Precision.FP16):
            return f"{spec.precision.value} needs a GPU"
    if spec.engine.name is EngineName.DEEPSPEED and spec.precision is Precision.BF16_PURE:
        return "DeepSpeed keeps fp32 master weights; choose precision=bf16, or engine=ddp"
    return None


def cell_id(spec: CellSpec, identity: Mapping[str, object]) -> str:
    """Identity by content: the spec and the environment that decides its result (see `sweep.environment`)."""
    return _digest({"spec": _identity(spec), "identity": dict(identity), "schema": SCHEMA_VERSION})


def _identity(spec: CellSpec) -> Any:
    """What two cells must have in common to be the same: everything but the time they may take."""
    return _identifying(spec) | {"timeout_seconds": 900.0}  # as it was in every cell when the first were stored


def _identifying(value: Any) -> Any:
    """As `to_json`, without the later fields that are at their default: adding one changes no earlier identity."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return to_json(value)
    return {
        one.name: _identifying(getattr(value, one.name))
        for one in dataclasses.fields(value)
        if "later" not in one.metadata or getattr(value, one.name) != one.default
    }


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def positive(field: str, value: object) -> None:
    """Raises `SpecError` unless it is a whole number of 1 or more."""
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
        item = _converter(arguments[0])
        return lambda value, path: tuple([item(each, f"{path}[{i}]") for i, each in enumerate(value)])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return functools.partial(_to_mapping, _converter(arguments[0]), _converter(arguments[1]))
    if dataclasses.is_dataclass(hint):
        return functools.partial(_to_dataclass, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return functools.partial(_to_enum, hint)
    if hint in (int, float, str, bool):
        return functools.partial(_to_plain, hint)
    return lambda value, path: value


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
