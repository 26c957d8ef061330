"""From what Hydra composed to what a cell is: the only place where the names in `conf/` meet `CellSpec`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from sweep import environment, models, virtual, workloads
from sweep.config_files import with_file
from sweep.spec import CellSpec, DeviceKind, EngineName, GpuSpec, Precision, SpecError, from_json, positive

CONF = Path(__file__).resolve().parent.parent / "conf"
LARGEST_GPU_BYTES = 2**40
NOT_OF_THE_CELL = ("gpu", "device", "sweep", "search", "budget", "force", "dry_run", "questions", "by_device", "steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One Hydra job: a cell and the sweep to which it belongs."""

    sweep: str
    spec: CellSpec


def job_from(config: DictConfig, **sizes: int) -> Job:
    """Resolve and validate a composed configuration; `sizes` fill in what is left to the walk.

    Raises `SpecError` or `environment.DeviceError`, each one sentence for the user.
    """
    config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    OmegaConf.set_readonly(config, False)
    for name, size in sizes.items():
        config[name] = size
    target = config.workload.get("_target_")
    if target is not None and workloads.brings_its_model(str(target)):
        # Nobody but the user's function knows what it trains.
        config.model = {"name": str(target), "model_type": "own", "config": {}}
    if (path := config.model.get("path")) is not None and config.model.name is None:
        config.model.name = Path(str(path)).expanduser().absolute().name
    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        why = "give it a value" if isinstance(error, MissingMandatoryValue) else f"give it a value ({error.msg})"
        raise SpecError(str(error.full_key), "???", " ".join(why.split())) from error
    content = {key: value for key, value in values.items() if key not in NOT_OF_THE_CELL}
    content["model"] = models.complete(values["model"]) if values["model"]["model_type"] != "own" else values["model"]
    content["workload"] = workloads.complete(values["workload"])
    content["device"] = dict(values["device"])
    if content["device"].get("kind") == DeviceKind.VIRTUAL.value:
        content["device"]["gpu"] = values["gpu"]
    kinds = [kind.value for kind in DeviceKind]
    if content["device"].get("kind") not in kinds:
        raise SpecError("device.kind", content["device"].get("kind"), "choose one of auto, " + ", ".join(kinds))
    kind = DeviceKind(content["device"]["kind"])
    wanted = _optional_count("world_size", values["world_size"])
    if wanted is None and content["engine"].get("name") == EngineName.SINGLE.value:
        wanted = 1
    content["world_size"] = environment.require_device(kind, wanted)
    content["lora"] = _lora(content["lora"])
    content["engine"] = with_file(content["engine"], content)
    positive("steps", values["steps"])
    content["measured_iterations"] = values["steps"]
    spec = from_json(CellSpec, content)
    if spec.device.gpu is not None:
        _require_virtual_gpu(spec.device.gpu, spec.world_size)
    if kind is DeviceKind.CPU and spec.model.parameters is not None:
        environment.require_host_memory(
            spec.model.parameters, state_bytes_per_parameter(spec), spec.world_size, spec.model.name
        )
    sweep = values["sweep"]
    if not isinstance(sweep, str) or not sweep or Path(sweep).name != sweep or sweep.startswith("."):
        raise SpecError("sweep", sweep, "give a plain folder name, without slashes")
    return Job(sweep=sweep, spec=spec)


def _lora(value: Any) -> Any:
    """Without a rank there are no adapters."""
    if not isinstance(value, dict) or value.get("rank") is not None:
        return value
    if value.get("targets"):
        raise SpecError("lora.rank", None, "give a rank with lora.targets")
    return None


def _require_virtual_gpu(gpu: GpuSpec, world_size: int) -> None:
    """Refuse what the virtual GPU would refuse, and build its library: before anything is run or written."""
    profile = virtual.gpus().get(gpu.key)
    if profile is None:
        raise SpecError("gpu.key", gpu.key, "choose one of " + ", ".join(sorted(virtual.gpus())))
    if world_size > virtual.MAX_GPUS:
        raise SpecError("world_size", world_size, f"the virtual device has at most {virtual.MAX_GPUS} GPUs")
    most = gpu.total_memory_bytes or profile.total_memory_bytes
    if not 2**30 <= most <= LARGEST_GPU_BYTES:
        valid = f"give {2**30} (1 GiB) to {LARGEST_GPU_BYTES} (1 TiB)"
        raise SpecError("gpu.total_memory_bytes", gpu.total_memory_bytes, valid)
    if gpu.other_processes_bytes + profile.assumed_context_bytes >= most:
        valid = f"gpu={gpu.key} has {most} bytes in all, of which a CUDA context needs {profile.assumed_context_bytes}"
        raise SpecError("gpu.other_processes_bytes", gpu.other_processes_bytes, valid)
    try:
        virtual.environment(profile, world_size=world_size)
    except (virtual.VirtualGpuError, OSError) as error:
        raise environment.DeviceError(f"device=virtual cannot be used: {' '.join(str(error).split())}") from error


def _optional_count(field: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(field, value, "give a whole number of 1 or more, or null")
    return value


def state_bytes_per_parameter(spec: CellSpec) -> int:
    """Weights, gradients and AdamW's two moments in bytes, per parameter and rank, at the least.

    Sharding by ZeRO divides parts of it by the world size; all ranks share one host on the CPU device, so that the
    host still holds at least one whole copy: that copy is what this counts.
    """
    full = 8 if spec.precision is Precision.BF16_PURE else 16
    zero = spec.engine.name is EngineName.DEEPSPEED and (spec.engine.zero_stage or 0) > 0
    shared = zero or spec.engine.name is EngineName.FSDP2
    return max(1, full // spec.world_size) if shared else full
