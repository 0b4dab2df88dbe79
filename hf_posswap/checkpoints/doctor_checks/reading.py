"""Reading a checkpoint's small files and the headers of its weights: names and shapes, never the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posswap.compat.transformers_files import file_of
from hf_posswap.errors import CheckpointError
from hf_posswap.utils.untrusted import read_bounded_json
from hf_posswap.utils.weight_shapes import Shapes, folder_shapes


@dataclass(frozen=True)
class Chart:
    """What lies in a checkpoint.

    Attributes:
        source: the folder or Hub id.
        config: config.json, as it stands there; None where there is none.
        adapter: adapter_config.json, or None.
        sidecar: posswap.json, or None.
        tokenizer: tokenizer_config.json, or None.
        shapes: of the weights, by name; None where there are none that can be read.
    """

    source: str
    config: dict[str, Any] | None
    adapter: dict[str, Any] | None
    sidecar: dict[str, Any] | None
    tokenizer: dict[str, Any] | None
    shapes: Shapes | None


def read_chart(source: str | Path, **hub: Any) -> Chart:
    """Return what lies in the checkpoint at `source`, a folder or a Hub id; no weight is read.

    Args:
        source: the folder or Hub id.
        hub: revision, token, cache_dir, local_files_only for a Hub id.

    Raises:
        CheckpointError: neither a config.json nor an adapter_config.json is there, or a file cannot be read.
    """
    names = ("config.json", "adapter_config.json", "posswap.json", "tokenizer_config.json")
    config, adapter, sidecar, tokenizer = (read_json_of(source, name, **hub) for name in names)
    if config is None and adapter is None:
        raise CheckpointError(f"{str(source)!r} holds neither a config.json nor an adapter_config.json.")
    shapes = None if config is None else _shapes_of(source, hub)
    return Chart(str(source), config, adapter, sidecar, tokenizer, shapes)


def read_json_of(source: str | Path, name: str, **hub: Any) -> dict[str, Any] | None:
    """Return the object in the JSON file `name` of a folder or Hub id; None where there is no such file.

    Raises:
        CheckpointError: it cannot be read, or holds no object.
    """
    path = _path_of(source, name, hub)
    if path is None:
        return None
    try:
        value = read_bounded_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {name} of {str(source)!r}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} of {str(source)!r} must hold an object, got {type(value).__name__}.")
    return value


def _path_of(source: str | Path, name: str, hub: dict[str, Any]) -> Path | None:
    """Return where the file `name` is, downloaded if need be; None where there is no such file."""
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return file_of(source, name, **hub)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {name} of {str(source)!r}: {error}") from error


def _shapes_of(source: str | Path, hub: dict[str, Any]) -> Shapes | None:
    return folder_shapes(Path(source)) if Path(source).is_dir() else _shapes_on_hub(str(source), hub)


def _shapes_on_hub(source: str, hub: dict[str, Any]) -> Shapes | None:
    """Return the shapes of weights on the Hub, from the first bytes of each file; None where that does not work."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    known = {name: hub[name] for name in ("revision", "token") if name in hub}
    try:
        files = get_safetensors_metadata(source, **known).files_metadata.values()
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError, ValueError):
        return None
    return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}
