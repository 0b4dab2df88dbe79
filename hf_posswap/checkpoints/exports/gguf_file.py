"""Writing a model as a GGUF file, its positions whole; llama.cpp runs it where that is installed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_posswap.checkpoints.exports.gguf_keys import divisors, gguf_metadata
from hf_posswap.checkpoints.exports.gguf_proof import ran_alike
from hf_posswap.checkpoints.exports.gguf_tensors import Contents, contents_of, head_dim
from hf_posswap.checkpoints.exports.gguf_vocab import add_vocabulary
from hf_posswap.checkpoints.exports.mechanism import Stated
from hf_posswap.checkpoints.load import load
from hf_posswap.errors import CheckpointError, MissingDependencyError
from hf_posswap.utils.atomic_io import replacing

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}


@dataclass(frozen=True)
class GGUFFile:
    """A file that was written.

    Attributes:
        path: of the file.
        weights: type of its matrices: F32, F16 or BF16.
        vocabulary: in words.
        compared: with llama.cpp's outputs, in words; that it was not, where llama-cpp-python is not installed.
    """

    path: Path
    weights: str
    vocabulary: str
    compared: str


def write_gguf(source: Path, out: Path, stated: Stated, vocab: Path | None) -> GGUFFile:
    """Write the stock checkpoint in `source` to the GGUF file `out`, whole or not at all.

    Where llama-cpp-python is installed, llama.cpp runs the file before it takes its place.

    Args:
        source: a folder.
        out: a new file, which ends in .gguf.
        stated: the mechanism.
        vocab: a GGUF file with the vocabulary; None takes the checkpoint's tokenizer.

    Raises:
        MissingDependencyError: the extra `gguf` is not installed.
        UnsupportedSwapError: the model's architecture is not written here, or a setting of it is not llama.cpp's.
        UnsupportedModelError: its tokenizer is of a kind that only llama.cpp's converter can tell.
        CheckpointError: the checkpoint cannot be read, or `out` not be written.
        SwapVerificationError: llama.cpp computes something else.
    """
    if find_spec("gguf") is None:
        raise MissingDependencyError("gguf", "gguf")
    if os.path.lexists(out):
        raise CheckpointError(f"{out} is there already; give a file that is new.")
    model: Any = load(source)
    held = contents_of(model, stated)
    kind = _TYPES.get(model.dtype)
    if kind is None:
        raise CheckpointError(
            f"{source} holds weights of type {model.dtype}: float32, float16 and bfloat16 are written."
        )
    with replacing(out) as temporary:
        words = _write(temporary, model.config, held, stated, kind, source, vocab)
        compared = ran_alike(model, temporary, stated, "F16" if held.loose and kind == "F32" else kind)
    return GGUFFile(out, kind, words, compared)


def _write(path: Path, config: Any, held: Contents, stated: Stated, kind: str, source: Path, vocab: Path | None) -> str:
    """Write the file, and return its vocabulary in words."""
    import gguf

    writer = gguf.GGUFWriter(path, held.architecture)
    name = held.architecture
    try:
        writer.add_name(os.fsencode(source.resolve().name).decode(errors="replace"))  # its bytes, in any locale
        writer.add_file_type(_FILE_TYPES[kind])
        width = None if stated.kind != "rope" else _rotated(config, stated)
        positions = gguf_metadata(stated, width)
        for key, value in ({f"{name}.{key}": value for key, value in held.keys.items()} | positions).items():
            _add(writer, key, value)
        words = add_vocabulary(writer, source, config.vocab_size, vocab)
        names = gguf.get_tensor_name_map(_architecture(name), held.keys["block_count"])
        for old, weight in held.weights.items():
            new = names.get_name(old, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise CheckpointError(f"llama.cpp's architecture {name} has no place for the weight {old}.")
            if not weight.isfinite().all():
                raise CheckpointError(
                    f"{source} has NaN or infinity in {old}: take its weights from where they are whole."
                )
            wide = weight.float().contiguous().numpy()
            chosen = gguf.GGMLQuantizationType[kind if weight.dim() > 1 else "F32"]
            writer.add_tensor(new, gguf.quants.quantize(wide, chosen), raw_dtype=chosen)
        found = divisors(config, stated, head_dim(config)) if stated.kind == "rope" else {}
        for new, values in found.items():
            writer.add_tensor(new, torch.tensor(values).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return words


def _rotated(config: Any, stated: Stated) -> int:
    """Return the rotated dimensions of a head as llama.cpp counts them."""
    width = head_dim(config)
    share = 1.0 if stated.model_type != "gpt_neox" else stated.rope.get("partial_rotary_factor", 1.0)
    return int(width * share)


def _architecture(name: str) -> Any:
    import gguf

    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def _add(writer: Any, key: str, value: Any) -> None:
    """Add one value in the type that llama.cpp reads it in."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
