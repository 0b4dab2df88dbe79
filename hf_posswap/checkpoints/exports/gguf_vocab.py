"""The vocabulary of a GGUF file: of GPT-2's kind of tokenizer, of another file, or none without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError, UnsupportedModelError

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # gguf.TokenType


def add_vocabulary(writer: Any, source: Path, size: int, vocab: Path | None) -> str:
    """Write the vocabulary, and return in words what it is.

    Args:
        writer: a `gguf.GGUFWriter`.
        source: the checkpoint's folder.
        size: of the model's vocabulary, in tokens.
        vocab: a GGUF file with the vocabulary, as `convert_hf_to_gguf.py --vocab-only` writes it; None takes the
            checkpoint's tokenizer.

    Raises:
        UnsupportedModelError: its tokenizer is of a kind that only llama.cpp's converter can tell.
        CheckpointError: `vocab` cannot be read, or holds no vocabulary.
    """
    if vocab is not None:
        return _copied(writer, vocab)
    path = source / "tokenizer.json"
    if not path.exists():
        writer.add_tokenizer_model("none")
        return "none: the checkpoint has no tokenizer.json, so llama.cpp takes token numbers alone"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    if not _is_gpt2_kind(tokenizer):
        raise UnsupportedModelError(
            f"the tokenizer of {source} is not of GPT-2's kind: what llama.cpp calls it only its converter knows. Run "
            f"convert_hf_to_gguf.py {source} --vocab-only --outfile vocab.gguf, and give --vocab vocab.gguf."
        )
    _add_gpt2(writer, tokenizer, source, size)
    return "byte-level BPE as GPT-2 has it, from tokenizer.json"


def _is_gpt2_kind(tokenizer: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json is a byte-level BPE that splits words by GPT-2's expression, and does no more."""
    split = tokenizer.get("pre_tokenizer") or {}
    return (
        tokenizer["model"].get("type") == "BPE"
        and tokenizer.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and split.get("use_regex", True)
        and not split.get("add_prefix_space", False)
    )


def _add_gpt2(writer: Any, tokenizer: dict[str, Any], source: Path, size: int) -> None:
    import gguf

    names: dict[int, str] = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in tokenizer.get("added_tokens", []) if each.get("special")}
    names |= {each["id"]: each["content"] for each in tokenizer.get("added_tokens", [])}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(size)])
    kinds = [_CONTROL if i in special else _NORMAL if i in names else _UNUSED for i in range(size)]
    writer.add_token_types(kinds)
    gguf.SpecialVocab(source, load_merges=True, n_vocab=size).add_to_gguf(writer)


def _copied(writer: Any, vocab: Path) -> str:
    """Copy all keys of the tokenizer from another GGUF file."""
    import gguf

    try:
        fields = gguf.GGUFReader(vocab).fields
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"cannot read the vocabulary in {vocab}: {error}") from error
    held = {name: field for name, field in fields.items() if name.startswith("tokenizer.")}
    if "tokenizer.ggml.model" not in held:
        raise CheckpointError(f"{vocab} holds no vocabulary: give what convert_hf_to_gguf.py --vocab-only writes.")
    for name, field in held.items():
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    return f"that of {vocab.name}"
