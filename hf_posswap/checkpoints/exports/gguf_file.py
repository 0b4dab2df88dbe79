"""Write a model as a GGUF file with all its positions, and run it with llama.cpp where that is installed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_posswap.checkpoints.exports.gguf_keys import divisors, gguf_metadata
from hf_posswap.checkpoints.exports.gguf_proof import ran_alike
from hf_posswap.checkpoints.exports.gguf_tensors import Contents, contents_of, rotated, stays_whole
from hf_posswap.checkpoints.exports.gguf_vocab import add_vocabulary
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.checkpoints.load import load
from hf_posswap.errors import CheckpointError, MissingDependencyError
from hf_posswap.utils.atomic_io import replacing
from hf_posswap.utils.card_data import card_data

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""What the matrices of a file may be converted to, as GGUF calls it."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_BLOCK = 32
"""Weights of a row that share a scale in Q8_0."""


@dataclass(frozen=True)
class GGUFFile:
    """A file that was written.

    Attributes:
        path: of the file.
        weights: type of its matrices: F32, F16, BF16 or Q8_0; and which ones are of another, as a sentence.
        vocabulary: which one, as a sentence.
        compared: how near llama.cpp's outputs are to the model's, as a sentence; or that llama-cpp-python is missing.
    """

    path: Path
    weights: str
    vocabulary: str
    compared: str


def write_gguf(
    source: Path, out: Path, position_config: PositionConfig, vocab: Path | None, dtype: str | None = None
) -> GGUFFile:
    """Write the stock checkpoint in `source` to the GGUF file `out`, whole or not at all.

    Where llama-cpp-python is installed, llama.cpp runs the file before it is put in place.

    Args:
        source: a folder.
        out: a new file, which ends in .gguf.
        position_config: the mechanism.
        vocab: a GGUF file with the vocabulary; None takes the checkpoint's tokenizer.
        dtype: of the matrices, a key of `DTYPES`; None: that of the checkpoint. Vectors are float32.

    Raises:
        MissingDependencyError: the extra `gguf` is not installed.
        UnsupportedSwapError: the export does not support the model's architecture, or llama.cpp does not have one of
            its settings.
        UnsupportedModelError: only llama.cpp's converter can name the model's tokenizer.
        CheckpointError: the checkpoint cannot be read, or `out` not be written.
        SwapVerificationError: llama.cpp computes something else.
    """
    if find_spec("gguf") is None:
        raise MissingDependencyError("gguf", "gguf")
    if os.path.lexists(out):
        raise CheckpointError(f"{out} already exists: give a new file name.")
    model: Any = load(source)
    weight_type = _TYPES.get(model.dtype) if dtype is None else DTYPES[dtype]
    if dtype is not None:
        model = model.float() if dtype == "q8_0" else model  # whose values no type of 16 bits holds
        _round(model, DTYPES[dtype], source)
    contents = contents_of(model, position_config)
    if weight_type is None:
        raise CheckpointError(f"{source} holds weights of type {model.dtype}: give --dtype f32, f16, bf16 or q8_0.")
    weights = _weights_sentence(contents, weight_type, source)
    with replacing(out) as temporary:
        vocabulary = _write(temporary, model.config, contents, position_config, weight_type, source, vocab)
        compared = ran_alike(
            model, temporary, position_config, "F16" if contents.loose and weight_type == "F32" else weight_type
        )
    return GGUFFile(out, weights, vocabulary, compared)


def _round(model: Any, weight_type: str, source: Path) -> None:
    """Round the matrices of `model` to what the file holds, so that what is compared is what it can be."""
    from transformers.pytorch_utils import Conv1D

    transposed = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = parameter.T if id(parameter) in transposed else parameter
            weight_format = _weight_format(name, weight, weight_type)
            if weight.dim() < 2 or not weight.isfinite().all():  # the latter is refused later
                continue
            rounded = (
                torch.from_numpy(_quantized(weight, weight_format)[1])
                if weight_format == "Q8_0"
                else weight.to(_DTYPES[weight_format])
            )
            if not rounded.isfinite().all():
                raise CheckpointError(
                    f"{source} has values in {name} beyond the largest of {weight_format}: give --dtype bf16 or f32."
                )
            weight.copy_(rounded)


def _weight_format(name: str, weight: torch.Tensor, weight_type: str) -> str:
    """Return the type of one weight in the file, where matrices are of `weight_type`.

    What chooses experts or adds positions is not of 8 bits, and neither are rows that do not consist of whole blocks.
    """
    if weight.dim() < 2 or stays_whole(name) or (weight_type == "Q8_0" and name.endswith(".wpe.weight")):
        return "F32"
    return "F16" if weight_type == "Q8_0" and weight.shape[-1] % _BLOCK else weight_type


def _quantized(weight: torch.Tensor, weight_format: str) -> tuple[Any, Any]:
    """Return a weight as the file has it, and the values of that."""
    import gguf

    chosen = gguf.GGMLQuantizationType[weight_format]
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # a scale that is too large becomes infinite, and `_round` refuses that
        data = gguf.quants.quantize(weight.detach().float().contiguous().numpy(), chosen)
        return data, gguf.quants.dequantize(data, chosen).reshape(weight.shape)


def _weights_sentence(contents: Contents, weight_type: str, source: Path) -> str:
    weight_formats = [_weight_format(name, weight, weight_type) for name, weight in contents.weights.items()]
    if weight_type != "Q8_0":
        return weight_type
    if "Q8_0" not in weight_formats:
        raise CheckpointError(
            f"no matrix of {source} has rows of a multiple of {_BLOCK} weights, a block of Q8_0: give --dtype f16."
        )
    odd = weight_formats.count("F16")
    return f"Q8_0; {odd} with rows of no multiple of {_BLOCK} weights are F16" if odd else "Q8_0"


def _write(
    path: Path,
    config: Any,
    contents: Contents,
    position_config: PositionConfig,
    weight_type: str,
    source: Path,
    vocab: Path | None,
) -> str:
    """Write the file, and return a sentence about its vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(path, contents.architecture)
    name = contents.architecture
    try:
        writer.add_name(os.fsencode(source.resolve().name).decode(errors="replace"))  # its bytes, in any locale
        _add_card(writer, source)
        writer.add_file_type(_FILE_TYPES[weight_type])
        if weight_type == "Q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        width = None if position_config.kind != "rope" else rotated(config, position_config)
        metadata = gguf_metadata(position_config, width)
        for key, value in ({f"{name}.{key}": value for key, value in contents.keys.items()} | metadata).items():
            _add(writer, key, value)
        vocabulary = add_vocabulary(writer, source, config.vocab_size, vocab)
        names = gguf.get_tensor_name_map(_architecture(name), contents.keys["block_count"])
        for old, weight in contents.weights.items():
            new = names.get_name(old, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise CheckpointError(f"llama.cpp's architecture {name} has no tensor for the weight {old}.")
            if not weight.isfinite().all():
                raise CheckpointError(
                    f"{source} has NaN or infinity in {old}: get the weights again from their source."
                )
            weight_format = _weight_format(old, weight, weight_type)
            writer.add_tensor(
                new, _quantized(weight, weight_format)[0], raw_dtype=gguf.GGMLQuantizationType[weight_format]
            )
        for new, values in ({} if width is None else divisors(config, position_config, width)).items():
            writer.add_tensor(new, torch.tensor(values).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return vocabulary


def _add_card(writer: Any, source: Path) -> None:
    """Add the licence and the languages that the README.md of the checkpoint names."""
    card = card_data(source)
    if isinstance(license := card.get("license"), str):
        writer.add_license(license)
    languages = card.get("language")
    languages = [languages] if isinstance(languages, str) else languages
    if isinstance(languages, list) and languages and all(isinstance(each, str) for each in languages):
        writer.add_languages(languages)


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
        case list():
            writer.add_array(key, value)
