"""`python -m sweep.worker.describe`: what models are, asked by the process that does not import torch.

A JSON list of the contents of `conf/model/` on stdin; on stdout, for each, what it is (`sweep.models.Facts` and the
configuration that its path leads to) or which field is wrong and how.
"""

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

CONFIG = "config.json"
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


class NoSuchModelError(Exception):
    """The field, its value, and what would be valid."""


def main() -> None:
    print(json.dumps([answer(content) for content in json.load(sys.stdin)]))


def answer(content: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return describe(content)
    except NoSuchModelError as error:
        return {"error": error.args}
    except Exception as error:  # whatever a library says of a model that cannot be
        said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        return {"error": ("model.name", content["name"], f"it cannot be built: {said[:500]}")}


def describe(content: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from sweep.spec import ModelSpec, from_json
    from sweep.worker.model import build_from, configuration_of

    revision, found = None, dict(content)
    if content.get("path") is not None:
        folder, revision = locate(content)
        found |= from_folder(folder, content)
    model = from_json(ModelSpec, found | {"revision": revision})
    if unknown := unknown_keys(content, found["model_type"]):
        (key, value), *_ = unknown.items()
        raise NoSuchModelError(
            f"model.config.{key}", value, f"a configuration of {found['model_type']} has no such key"
        )
    config = configuration_of(model)
    with torch.device("meta"):
        built = build_from(config, model, torch.float32)
    text = config.get_text_config()
    facts = {
        "parameters": sum(parameter.numel() for parameter in built.parameters()),
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "vocabulary": getattr(text, "vocab_size", None),
        "context": getattr(text, "max_position_embeddings", None),
    }
    return {"facts": facts, "model_type": found["model_type"], "config": found["config"], "revision": revision}


def unknown_keys(content: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """What was asked for and would only be kept as an attribute that nothing reads."""
    from transformers import AutoConfig

    known = vars(AutoConfig.for_model(model_type))
    with_them = vars(AutoConfig.for_model(model_type, **content["config"]))
    return {key: value for key, value in content["config"].items() if key in with_them and key not in known}


def locate(content: Mapping[str, Any]) -> tuple[Path, str]:
    """The folder with config.json, and what identifies its content: the Hub's commit, or a digest of the files."""
    path, pretrained = str(content["path"]), content.get("weights") == "pretrained"
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise NoSuchModelError("model.path", path, f"the folder has no {CONFIG}")
        return folder, _content_digest(folder)
    if folder.is_absolute() or path.startswith((".", "~")):
        raise NoSuchModelError("model.path", path, "there is no such folder")
    online = not constants.HF_HUB_OFFLINE and hub_answers()
    try:
        file = Path(hf_hub_download(path, CONFIG, etag_timeout=5, local_files_only=not online))
        if pretrained:
            patterns = ["*.json", "*.safetensors", "*.py", "*.model"]
            snapshot_download(path, allow_patterns=patterns, local_files_only=not online)
    except HFValidationError:
        valid = "give the id of a model on the Hugging Face Hub, such as owner/name, or a folder that exists"
    except GatedRepoError:
        valid = "its owner grants access on request: ask on its page of the Hub, then `hf auth login`"
    except RepositoryNotFoundError:
        valid = "the Hub has no model of that name, or it is private: `hf auth login` for a private one"
    except EntryNotFoundError as error:  # of which "not in the cache" is a kind
        if online and "404" in str(error):
            valid = f"the Hub has no {CONFIG} for it"
        else:
            valid = "it is neither a folder nor in the local cache, and the Hugging Face Hub cannot be reached"
    except OSError as error:
        valid = f"the Hub could not be asked: {' '.join(str(error).split())[:200]}"
    else:
        return file.parent, file.parent.name
    raise NoSuchModelError("model.path", path, valid)


def hub_answers() -> bool:
    """Whether the Hub's name is known here: asked at once, since the library would retry for half a minute."""
    if any(os.environ.get(name) for name in PROXIES):
        return True  # a proxy looks names up
    host = constants.ENDPOINT.partition("://")[2].partition("/")[0].partition(":")[0]
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def from_folder(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Its type and its configuration, with what `model.config` replaces in it."""
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    model_type = written.get("model_type")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own_code = bool(written.get("auto_map")) and bool(content.get("remote_code"))
    if model_type not in CONFIG_MAPPING and not own_code:
        if written.get("auto_map"):
            valid = "its code is not part of transformers; model.remote_code=true runs the code that comes with it"
        else:
            valid = f"transformers knows no architecture model_type={model_type}"
        raise NoSuchModelError("model.path", content["path"], valid)
    left_out = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "auto_map")
    config = {key: value for key, value in written.items() if key not in left_out and not key.startswith("_")}
    return {"model_type": model_type, "config": config | content["config"]}


def _content_digest(folder: Path) -> str:
    """Of the configuration and the code, byte for byte; of weights the name, the size and when they were written."""
    digest = hashlib.sha256()
    for file in sorted(each for each in folder.iterdir() if each.is_file()):
        if file.suffix in (".json", ".py"):
            digest.update(file.name.encode() + file.read_bytes())
        else:
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
