"""Write a model as a GGUF file with all its positions, and compare it with the model where llama.cpp is installed.

The vocabulary comes from a byte-level BPE, from another GGUF file, or is left out. llama.cpp runs the file in a
separate process, because it can exit on a file that it refuses.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.checkpoints.exports.gguf_contents import (
    SLIDING,
    Contents,
    contents_of,
    divisors,
    gguf_metadata,
    rotated,
    stays_whole,
)
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.checkpoints.load import load
from hf_posswap.errors import CheckpointError, MissingDependencyError, SwapVerificationError, UnsupportedModelError
from hf_posswap.utils.atomic_io import check_new_file, replacing, scratch_folder, shown
from hf_posswap.utils.devices import available_bytes
from hf_posswap.utils.format import human_bytes, said_by
from hf_posswap.utils.gguf_source import read_gguf
from hf_posswap.utils.gguf_tokenizer import PRE_TOKENIZERS, PreTokenizer, recognized
from hf_posswap.utils.printable import brief_repr, printable
from hf_posswap.utils.untrusted import card_data, read_bounded_json

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedModel

_NORMAL, _CONTROL, _ADDED, _UNUSED = 1, 3, 4, 5  # gguf.TokenType; _ADDED is its USER_DEFINED
_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
"""Files of tokenizers of other kinds."""
_MORE = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
"""Settings of a byte-pair encoding that llama.cpp does not have."""
_STRICTER = ("lstrip", "rstrip", "single_word")
"""Settings of an added token that strip spaces or match whole words: llama.cpp ignores them."""
_PHI_3 = re.compile("phi-?3", re.IGNORECASE)
"""In a model's name: by it alone llama.cpp decides that special tokens strip the spaces behind them, whatever the
tokenizer is, and it loads no such vocabulary without Phi-3's special tokens."""
MOST = 512
"""Tokens of the text that is compared, at most."""
_COMPARED = 8
"""How many beginnings of that text llama.cpp continues."""
BOUNDS = {"F32": 1e-3, "F16": 5e-2, "BF16": 4e-1, "Q8_0": 1.2e-1}
"""How far log probabilities may be apart, in nats, by the coarsest number that llama.cpp computes with: at most, and
for Q8_0 on average. With weights of 8 bits it rounds activations to 8 bits as well, and single tokens are far apart."""
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
        weights: type of its matrices: F32, F16, BF16 or Q8_0; and which ones are of another, as a sentence.
        vocabulary: which one, as a sentence.
        compared: how near llama.cpp's outputs are to the model's, as a sentence; or that xllamacpp is missing.
    """

    weights: str
    vocabulary: str
    compared: str


def write_gguf(
    source: Path, out: Path, position_config: PositionConfig, vocab: Path | None, dtype: str | None = None
) -> GGUFFile:
    """Write the stock checkpoint in `source` to the GGUF file `out`, whole or not at all.

    Where xllamacpp is installed, llama.cpp runs the file before it is put in place.

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
    check_new_file(out)
    model: PreTrainedModel = load(source)
    weight_type = _TYPES.get(model.dtype) if dtype is None else DTYPES[dtype]
    if dtype is not None:
        model = model.float() if dtype == "q8_0" else model  # whose values no type of 16 bits holds
        _round(model, DTYPES[dtype], source)
    contents = contents_of(model, position_config)
    if weight_type is None:
        raise CheckpointError(f"{source} holds weights of type {model.dtype}: give --dtype f32, f16, bf16 or q8_0.")
    weights = _weights_sentence(contents, weight_type, source)
    coarsest = "F16" if contents.loose and weight_type == "F32" else weight_type
    size = model.config.vocab_size
    write = partial(_write, model.config, contents, position_config, weight_type, source)
    with replacing(out) as temporary, scratch_folder() as folder:
        vocabulary = write(temporary, lambda writer: add_vocabulary(writer, source, size, vocab))
        runs = temporary
        if vocabulary.startswith("none"):
            write(runs := folder / out.name, lambda writer: _add_numbers(writer, size))
        compared = ran_alike(model, runs, position_config, coarsest)
    return GGUFFile(weights, vocabulary, compared)


def _round(model: PreTrainedModel, weight_type: str, source: Path) -> None:
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


def _quantized(weight: torch.Tensor, weight_format: str) -> tuple[np.ndarray, np.ndarray]:
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
    config: PreTrainedConfig,
    contents: Contents,
    position_config: PositionConfig,
    weight_type: str,
    source: Path,
    path: Path,
    add_tokens: Callable[[GGUFWriter], str],
) -> str:
    """Write the file, and return the sentence of `add_tokens` about its vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(path, contents.architecture)
    name = contents.architecture
    try:
        _add_card(writer, source)
        writer.add_file_type(_FILE_TYPES[weight_type])
        if weight_type == "Q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        width = None if position_config.kind != "rope" else rotated(config, position_config)
        metadata = gguf_metadata(position_config, width)
        for key, value in ({f"{name}.{key}": value for key, value in contents.keys.items()} | metadata).items():
            _add(writer, key, value)
        vocabulary = add_tokens(writer)
        architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
        names = gguf.get_tensor_name_map(architecture, contents.keys["block_count"])
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


def _add_card(writer: GGUFWriter, source: Path) -> None:
    """Add the licence and the languages that the README.md of the checkpoint names."""
    card = card_data(source)
    if isinstance(license := card.get("license"), str):
        writer.add_license(license)
    languages = card.get("language")
    languages = [languages] if isinstance(languages, str) else languages
    if isinstance(languages, list) and languages and all(isinstance(each, str) for each in languages):
        writer.add_languages(languages)


def _add(writer: GGUFWriter, key: str, value: object) -> None:
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


def add_vocabulary(writer: GGUFWriter, source: Path, size: int, vocab: Path | None) -> str:
    """Write the vocabulary, and return a sentence about it.

    Args:
        writer: a `gguf.GGUFWriter`.
        source: the checkpoint's folder.
        size: of the model's vocabulary, in tokens.
        vocab: a GGUF file with the vocabulary, as `convert_hf_to_gguf.py --vocab-only` writes it; None takes the
            checkpoint's tokenizer.

    Raises:
        UnsupportedModelError: only llama.cpp's converter can name the tokenizer.
        CheckpointError: `vocab` or the tokenizer cannot be read, or is not of this model.
    """
    if vocab is not None:
        return _copy_vocabulary(writer, vocab, size)
    name = os.fsencode(source.resolve().name).decode(errors="replace")  # its bytes, in any locale
    writer.add_name(_PHI_3.sub("Phi 3", name))
    tokenizer = _read_tokenizer(source)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return "none: the checkpoint has no tokenizer.json, so llama.cpp takes token numbers alone"
    chosen = _pre_tokenizer_of(tokenizer, source)
    _add_byte_level(writer, tokenizer, chosen, source, size)
    normalizer = " (llama.cpp does not compose letters, NFC, as this tokenizer does)" if _composes(tokenizer) else ""
    return f"byte-level BPE with the splits of {chosen.names[0]}, from tokenizer.json{normalizer}"


def _add_numbers(writer: GGUFWriter, size: int) -> str:
    """Write a number as the text of each token: llama.cpp's server runs no file without a vocabulary."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([str(token) for token in range(size)])
    writer.add_token_types([_NORMAL] * size)
    writer.add_token_merges(["0 1"])
    return "numbers"


def _vocab_advice(source: Path) -> str:
    return (
        "Give --vocab another GGUF file of the same model, which has the vocabulary. Or run convert_hf_to_gguf.py "
        f"{source} --vocab-only --outfile vocab.gguf, and give --vocab vocab.gguf."
    )


def vocabulary_caveat(source: str, command: str) -> tuple[str, str]:
    """Return why the vocabulary of the checkpoint `source` cannot be written, and the command that helps.

    That is "" and `command` itself where it can be written, is unknown, or `command` does not write it. No weights are
    read.
    """
    folder = Path(source)
    if not folder.is_dir() or not command.startswith("posswap export "):
        return "", command
    try:
        tokenizer = _read_tokenizer(folder)
        if tokenizer is not None:
            _pre_tokenizer_of(tokenizer, folder)
    except (CheckpointError, UnsupportedModelError) as error:
        first = f"python convert_hf_to_gguf.py {shlex.quote(source)} --vocab-only --outfile vocab.gguf"
        with_vocabulary = command.replace(" -o model.gguf", " -o model.gguf --vocab vocab.gguf")
        return (
            f"the verdict is of the positions; the vocabulary cannot be exported: {error}",
            f"{first} && {with_vocabulary}",
        )
    return "", command


def _read_tokenizer(source: Path) -> dict[str, object] | None:
    """Return what the tokenizer.json of a checkpoint holds; None where it has no tokenizer."""
    path = source / "tokenizer.json"
    other = next((name for name in _OTHERS if (source / name).exists()), None)
    if not path.exists():
        if other is None:
            return None
        raise UnsupportedModelError(
            f"{source} has its tokenizer in {other} and not in tokenizer.json. {_vocab_advice(source)}"
        )
    try:
        tokenizer = read_bounded_json(path)
        json.dumps(tokenizer, ensure_ascii=False).encode("utf-8")  # half of a pair of escapes is no text
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {shown(path)}: {error}. Get the file again from its source.") from error
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise CheckpointError(f"{path} has no model: it is not a tokenizer file. Get the file again from its source.")
    return tokenizer


def _pre_tokenizer_of(tokenizer: dict[str, Any], source: Path) -> PreTokenizer:
    """Return how llama.cpp splits text as a tokenizer.json does, which does nothing else that llama.cpp does not.

    Raises:
        UnsupportedModelError: it does; or it splits text in no way that is known here.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens", [])
    pre_tokenizer = None
    if model.get("type") != "BPE":
        reason = f"is of kind {model.get('type')}, and only byte-level BPE is written here"
    elif not model.get("merges"):
        reason = "has no merges, and llama.cpp loads no byte-level BPE without any"
    elif settings := [name for name in _MORE if model.get(name)]:
        reason = f"has {', '.join(settings)}, which llama.cpp does not have"
    elif strict := [each.get("content") for each in added if any(map(each.get, _STRICTER))]:
        reason = (
            f"has added tokens such as {strict[0]!r} that strip spaces or match whole words, which llama.cpp ignores"
        )
    elif tokenizer.get("normalizer") is not None and not _composes(tokenizer):
        reason = f"normalizes text ({tokenizer['normalizer'].get('type')}), which llama.cpp does not"
    else:
        pre_tokenizer = recognized(tokenizer)
        known_names = ", ".join(each.names[0] for each in PRE_TOKENIZERS)
        reason = f"splits text as none of {known_names} does: only llama.cpp's converter may know its name there"
    if pre_tokenizer is None:
        raise UnsupportedModelError(f"the tokenizer of {source} {reason}. {_vocab_advice(source)}")
    return pre_tokenizer


def _composes(tokenizer: dict[str, Any]) -> bool:
    """Return whether all that a tokenizer.json normalizes is NFC, which leaves nearly every text as it is."""
    normalizer = tokenizer.get("normalizer") or {}
    return [each.get("type") for each in normalizer.get("normalizers", [normalizer])] == ["NFC"]


def _special_tokens_around(source: Path, special: dict[str, int]) -> dict[str, bool]:
    """Return whether the tokenizer puts bos before a text, and eos behind it.

    Raises:
        UnsupportedModelError: it puts other tokens there.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(f"cannot read {source / 'tokenizer.json'}: {said_by(error)}") from error
    inner = tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.encode("a").ids
    first = ids.index(inner[0]) if inner and inner[0] in ids else 0
    before, behind = ids[:first], ids[first + len(inner) :]
    if before not in ([], [special.get("bos")]) or behind not in ([], [special.get("eos")]):
        raise UnsupportedModelError(
            f"the tokenizer of {source} puts the tokens {before} before a text and {behind} behind it, and llama.cpp "
            f"bos and eos alone. {_vocab_advice(source)}"
        )
    return {"bos": bool(before), "eos": bool(behind)}


def _add_byte_level(
    writer: GGUFWriter, tokenizer: dict[str, Any], chosen: PreTokenizer, source: Path, size: int
) -> None:
    import gguf

    names: dict[int, str] = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    vocabulary_size = len(names)
    special = {each["id"]: each["content"] for each in tokenizer.get("added_tokens", []) if each.get("special")}
    added = {each["id"]: each["content"] for each in tokenizer.get("added_tokens", [])}
    changed = [index for index, token in added.items() if names.get(index, token) != token]
    names |= added
    if max(names, default=0) >= size:
        raise CheckpointError(
            f"the tokenizer of {source} has a token {max(names)}, and the model has {size}, from 0 on: take the "
            "tokenizer and the weights of one checkpoint."
        )
    tokens = [names.get(i, f"[PAD{i}]") for i in range(size)]
    doubled = [token for token, count in Counter(tokens).items() if count > 1]
    if changed or doubled or len(tokenizer["model"]["vocab"]) != vocabulary_size:
        problem = f"several tokens {brief_repr(doubled[0])}" if doubled else "several tokens of one id"
        raise UnsupportedModelError(
            f"the tokenizer of {source} has {problem}, and a GGUF file holds one text for each id, and each text once: "
            f"tokens would be lost. {_vocab_advice(source)}"
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(chosen.names[0])
    writer.add_token_list(tokens)
    token_types = dict.fromkeys(names, _NORMAL) | dict.fromkeys(added, _ADDED) | dict.fromkeys(special, _CONTROL)
    writer.add_token_types([token_types.get(i, _UNUSED) for i in range(size)])
    vocabulary = gguf.SpecialVocab(source, load_merges=True, n_vocab=size)
    vocabulary.add_special_token |= _special_tokens_around(source, vocabulary.special_token_ids)
    vocabulary.add_to_gguf(writer)


def _copy_vocabulary(writer: GGUFWriter, vocab: Path, size: int) -> str:
    """Copy all keys of the tokenizer, and the name, from another GGUF file, which has `size` tokens."""
    fields = read_gguf(vocab).fields
    tokenizer_fields = {
        name: field for name, field in fields.items() if name.startswith("tokenizer.") or name == "general.name"
    }
    if "tokenizer.ggml.model" not in tokenizer_fields:
        raise CheckpointError(f"{vocab} holds no vocabulary: give what convert_hf_to_gguf.py --vocab-only writes.")
    tokens = tokenizer_fields.get("tokenizer.ggml.tokens")
    count = 0 if tokens is None else len(tokens.data)
    if count != size:
        raise CheckpointError(f"{vocab} has {count} tokens, and the model {size}: give the vocabulary of this model.")
    for name, field in tokenizer_fields.items():
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    return f"that of {printable(vocab.name)}"


def ran_alike(model: PreTrainedModel, path: Path, position_config: PositionConfig, coarsest: str) -> str:
    """Return a sentence on how near llama.cpp's outputs are to those of `model`, or that it is not installed.

    Args:
        model: a causal language model.
        path: of its GGUF file.
        position_config: its mechanism.
        coarsest: F32, F16, BF16 or Q8_0: of the weights, or of GELU, which llama.cpp looks up in a table of F16.

    Raises:
        SwapVerificationError: llama.cpp fails, or its outputs differ.
    """
    if find_spec("xllamacpp") is None:
        return "not compared: xllamacpp is not installed"
    kept = sum(parameter.nbytes for parameter in model.parameters())
    needed, free = 4 * model.num_parameters() - kept + path.stat().st_size, available_bytes(torch.device("cpu"))
    if free is not None and free < needed:
        return f"not compared: that takes {human_bytes(needed)} of memory, and {human_bytes(free)} are free"
    count = min(position_config.length, MOST)
    if position_config.rope_type == "dynamic":  # plain rope there
        count = min(count, position_config.original or position_config.length)
    if position_config.window is not None and position_config.model_type not in SLIDING:
        count = min(count, position_config.window)
    ids = torch.randint(0, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    ends = sorted({max(1, (count - 1) * part // _COMPARED) for part in range(1, _COMPARED + 1)})
    tokens, log_probabilities = run_llamacpp(path, ids, ends, count)
    with torch.no_grad():
        logits = model.float().eval()(ids[None]).logits[0, torch.tensor(ends) - 1]  # [E, V]
    expected = logits.double().log_softmax(-1).gather(1, tokens)
    differences = (log_probabilities - expected).abs()
    average = coarsest == "Q8_0"
    apart, bound = float(differences.mean() if average else differences.max()), BOUNDS[coarsest]
    if not apart <= bound:  # a NaN too
        raise SwapVerificationError(
            f"llama.cpp's log probabilities after {ends[-1]} tokens are {'on average' if average else 'up to'} "
            f"{apart:.2g} nats from the model's, more than {bound:g}. Nothing was written; please report this."
        )
    qualifier = " on average (it rounds activations to 8 bits, too)" if average else ""
    return f"llama.cpp gives the model's log probabilities in {count} random tokens, to {apart:.1g} nats{qualifier}"


def run_llamacpp(path: Path, ids: torch.Tensor, ends: Sequence[int], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K tokens that llama.cpp's server finds most probable after the first N of `ids` [L], for N in `ends`.

    Its cache has `context` positions, rounded up to a multiple of 256, in float32, and N is less than the model's. It
    runs in a separate process, because llama.cpp can exit on a file that it refuses, with as many threads as torch has.

    Returns:
        Tokens int64 [E, K], the most probable first, and their log probabilities float64 [E, K]; K is at most 1,000.

    Raises:
        SwapVerificationError: that process failed; the message has its first error, or its last line.
    """
    with scratch_folder() as folder:
        given, chosen, out = folder / "tokens.npy", folder / "ends.npy", folder / "out.npz"
        np.save(given, ids.numpy())
        np.save(chosen, np.array(ends))
        program = Path(__file__).with_name("llamacpp_child.py")
        # not a thread for each core: where others compute too, llama.cpp's threads spin until the slowest has its turn
        threads = torch.get_num_threads()
        command = [sys.executable, program, path, given, chosen, out, context, threads]
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}  # which would hide the reason of an abort
        run = subprocess.run(list(map(str, command)), capture_output=True, check=False, env=environment)
        if run.returncode or not out.exists():
            lines = run.stderr.decode("utf-8", errors="replace").strip().splitlines() or ["nothing"]
            reason = printable(next((line.partition(" E ")[2] for line in lines if " E " in line), lines[-1]))
            raise SwapVerificationError(f"llama.cpp cannot run {path.name} (exit {run.returncode}): {reason}")
        with np.load(out) as stored:
            return torch.from_numpy(stored["tokens"]), torch.from_numpy(stored["logprobs"]).double()
