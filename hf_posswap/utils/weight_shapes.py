"""Names and shapes of weights in safetensors files, from their headers alone: never the numbers."""

from __future__ import annotations

import struct
from pathlib import Path

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.printable import brief_repr
from hf_posswap.utils.untrusted import parse_json, read_bounded_json

FLOATS = ("F", "BF")
"""What the kinds of floating-point numbers begin with, as safetensors calls them."""
Shapes = dict[str, tuple[int, ...]]
_MOST_HEADER = 100_000_000  # bytes: the bound of safetensors itself
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


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
        shapes = {name: tuple(map(_whole, entry["shape"])) for name, entry in tensors.items()}
        wanted = max((_whole(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        size_on_disk = path.stat().st_size - 8 - size
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
    if wanted > size_on_disk:
        raise CheckpointError(
            f"{path} is cut off: its tensors take {wanted} bytes, and it has {size_on_disk}. Copy or make it again."
        )
    return shapes


def header_kinds(path: Path) -> dict[str, str]:
    """Return names and kinds of numbers (F32, BF16, I8, ...) of the tensors in a safetensors file, from its header.

    Raises:
        CheckpointError: as `header_shapes`.
    """
    header_shapes(path)  # which says what is wrong with it
    with path.open("rb") as file:
        header = parse_json(file.read(struct.unpack("<Q", file.read(8))[0]).decode("utf-8"))
    return {name: str(entry.get("dtype")) for name, entry in header.items() if name != "__metadata__"}


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a whole number stands")
    return value


def folder_shapes(folder: Path) -> Shapes | None:
    """Return names and shapes of the weights of a checkpoint in `folder`, of one file or many; None: no safetensors.

    Raises:
        CheckpointError: a file, or the index of many, cannot be read.
    """
    files = weight_files(folder)
    if files is None:
        return None
    shapes: Shapes = {}
    for file in files:
        shapes |= header_shapes(file)
    return shapes


def folder_kinds(folder: Path) -> dict[str, str]:
    """Return names and kinds of numbers of the weights in `folder`, as `folder_shapes`; {}: no safetensors.

    Raises:
        CheckpointError: as `folder_shapes`.
    """
    dtypes: dict[str, str] = {}
    for file in weight_files(folder) or ():
        dtypes |= header_kinds(file)
    return dtypes


def weight_files(folder: Path) -> list[Path] | None:
    """Return the safetensors files of a checkpoint in `folder`, one or many; None: there are none.

    transformers takes the one file where both it and an index are there; the index must be right all the same.

    Raises:
        CheckpointError: the index of a sharded checkpoint cannot be read, or names a file outside its folder.
    """
    indexed = _files_in(folder / INDEX) if (folder / INDEX).is_file() else None
    return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else indexed


def refuse_outside(folder: Path) -> None:
    """Refuse a folder whose index names weights in other folders, which transformers would read.

    Raises:
        CheckpointError: names the index and the first such file.
    """
    for stem in ("model.safetensors", "pytorch_model.bin"):
        for path in sorted(folder.glob(f"{stem}.index*.json")):
            if path.is_file():
                _files_in(path)


def _files_in(path: Path) -> list[Path]:
    """Return the files that the index at `path` names, all in its folder."""
    where = f"{path.name} of {str(path.parent)!r}"
    try:
        index = read_bounded_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {where}: {error}") from error
    mapping = index.get("weight_map") if isinstance(index, dict) else None
    names = list(mapping.values()) if isinstance(mapping, dict) else None
    if not names:
        raise CheckpointError(f"{where} must map each weight to a file in its folder.")
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\\" in name:
            got = f"names {brief_repr(name)}: copy or make it again."
            raise CheckpointError(f"{where} must map each weight to a file in its folder, and {got}")
    return [path.parent / name for name in sorted(set(names))]
