"""The vocabulary of a GGUF file: from a GPT-2 tokenizer, from another GGUF file, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError, UnsupportedModelError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.untrusted import read_bounded_json

_NORMAL, _CONTROL, _ADDED, _UNUSED = 1, 3, 4, 5  # gguf.TokenType; _ADDED is its USER_DEFINED
_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
"""Files of tokenizers of other kinds."""
_MORE = ("dropout", "ignore_merges", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
"""Settings of a byte-pair encoding that GPT-2's does not have."""
_STRICTER = ("lstrip", "rstrip", "single_word")
"""Settings of an added token that strip spaces or match whole words: llama.cpp ignores them."""


def add_vocabulary(writer: Any, source: Path, size: int, vocab: Path | None) -> str:
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
        return _copied(writer, vocab, size)
    path = source / "tokenizer.json"
    other = next((name for name in _OTHERS if (source / name).exists()), None)
    if not path.exists() and other is not None:
        raise UnsupportedModelError(f"{source} has its tokenizer in {other} and not in tokenizer.json. {_ask(source)}")
    if not path.exists():
        writer.add_tokenizer_model("none")
        return "none: the checkpoint has no tokenizer.json, so llama.cpp takes token numbers alone"
    tokenizer = _read(path)
    if not _is_gpt2_kind(tokenizer):
        raise UnsupportedModelError(
            f"the tokenizer of {source} is not a GPT-2 tokenizer: only llama.cpp's converter knows its name there. "
            f"{_ask(source)}"
        )
    _add_gpt2(writer, tokenizer, source, size)
    return "byte-level BPE as GPT-2 has it, from tokenizer.json"


def _ask(source: Path) -> str:
    return f"Run convert_hf_to_gguf.py {source} --vocab-only --outfile vocab.gguf, and give --vocab vocab.gguf."


def _read(path: Path) -> dict[str, Any]:
    try:
        tokenizer = read_bounded_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {shown(path)}: {error}. Get the file again from its source.") from error
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise CheckpointError(f"{path} has no model: it is not a tokenizer file. Get the file again from its source.")
    return tokenizer


def _is_gpt2_kind(tokenizer: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json is a byte-level BPE that splits words by GPT-2's expression, and does no more."""
    split, model = tokenizer.get("pre_tokenizer") or {}, tokenizer["model"]
    return (
        model.get("type") == "BPE"
        and not any(model.get(name) for name in _MORE)
        and not any(each.get(name) for each in tokenizer.get("added_tokens", []) for name in _STRICTER)
        and tokenizer.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and split.get("use_regex", True)
        and not split.get("add_prefix_space", False)
    )


def _add_gpt2(writer: Any, tokenizer: dict[str, Any], source: Path, size: int) -> None:
    import gguf

    names: dict[int, str] = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in tokenizer.get("added_tokens", []) if each.get("special")}
    added = {each["id"]: each["content"] for each in tokenizer.get("added_tokens", [])}
    names |= added
    if max(names, default=0) >= size:
        raise CheckpointError(
            f"the tokenizer of {source} has a token {max(names)}, and the model has {size}, from 0 on: take the "
            "tokenizer and the weights of one checkpoint."
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(size)])
    token_types = dict.fromkeys(names, _NORMAL) | dict.fromkeys(added, _ADDED) | dict.fromkeys(special, _CONTROL)
    writer.add_token_types([token_types.get(i, _UNUSED) for i in range(size)])
    gguf.SpecialVocab(source, load_merges=True, n_vocab=size).add_to_gguf(writer)


def _copied(writer: Any, vocab: Path, size: int) -> str:
    """Copy all keys of the tokenizer from another GGUF file, which has `size` tokens."""
    import gguf

    try:
        fields = gguf.GGUFReader(vocab).fields
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"cannot read the vocabulary in {vocab}: {error}") from error
    tokenizer_fields = {name: field for name, field in fields.items() if name.startswith("tokenizer.")}
    if "tokenizer.ggml.model" not in tokenizer_fields:
        raise CheckpointError(f"{vocab} holds no vocabulary: give what convert_hf_to_gguf.py --vocab-only writes.")
    tokens = tokenizer_fields.get("tokenizer.ggml.tokens")
    count = 0 if tokens is None else len(tokens.data)
    if count != size:
        raise CheckpointError(f"{vocab} has {count} tokens, and the model {size}: give the vocabulary of this model.")
    for name, field in tokenizer_fields.items():
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    return f"that of {vocab.name}"
