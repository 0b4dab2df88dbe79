"""Names and shapes of weights in safetensors files, from their headers alone: never the numbers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.untrusted import parse_json, read_bounded_json

Shapes = dict[str, tuple[int, ...]]
_MOST_HEADER = 100_000_000  # bytes: the bound of safetensors itself
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def header_shapes(path: Path) -> Shapes:
    """Return names and shapes of the tensors in a safetensors file, from its header alone.

    Raises:
        CheckpointError: it has no such header, or ends before its last tensor.
    """
    try:
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            if size > min(_MOST_HEADER, path.stat().st_size - 8):
                raise ValueError(f"a header of {size} bytes")
            header = parse_json(file.read(size).decode("utf-8"))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found = {name: tuple(map(_whole, entry["shape"])) for name, entry in tensors.items()}
        wanted = max((_whole(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        held = path.stat().st_size - 8 - size
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        struct.error,
    ) as error:
        raise CheckpointError(f"{path} has no readable safetensors header: {error}. Copy or make it again.") from error
    if wanted > held:
        raise CheckpointError(
            f"{path} is cut off: its tensors take {wanted} bytes, and it has {held}. Copy or make it again."
        )
    return found


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a whole number stands")
    return value


def folder_shapes(folder: Path) -> Shapes | None:
    """Return names and shapes of the weights of a checkpoint in `folder`, of one file or many; None: no safetensors.

    Raises:
        CheckpointError: a file, or the index of many, cannot be read.
    """
    if (folder / _INDEX).is_file():
        names = _files_in(folder)
    elif (folder / _WEIGHTS).is_file():
        names = [_WEIGHTS]
    else:
        return None
    shapes: Shapes = {}
    for name in names:
        shapes |= header_shapes(folder / name)
    return shapes


def _files_in(folder: Path) -> list[str]:
    """Return the files that the index in `folder` names: beside it, nowhere else."""
    try:
        index: Any = read_bounded_json(folder / _INDEX)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {_INDEX} of {str(folder)!r}: {error}") from error
    mapping = index.get("weight_map") if isinstance(index, dict) else None
    names = list(mapping.values()) if isinstance(mapping, dict) else None
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{_INDEX} of {str(folder)!r} must map each weight to a file beside it.")
    return sorted(set(names))
