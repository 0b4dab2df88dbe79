"""The vocabulary of a GGUF file: from a byte-level BPE, from another GGUF file, or none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError, UnsupportedModelError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.format import said_by
from hf_posswap.utils.gguf_header import read_gguf
from hf_posswap.utils.gguf_tokenizer import PRE_TOKENIZERS, PreTokenizer, recognized
from hf_posswap.utils.printable import brief_repr, printable
from hf_posswap.utils.untrusted import read_bounded_json

_NORMAL, _CONTROL, _ADDED, _UNUSED = 1, 3, 4, 5  # gguf.TokenType; _ADDED is its USER_DEFINED
_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
"""Files of tokenizers of other kinds."""
_MORE = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
"""Settings of a byte-pair encoding that llama.cpp does not have."""
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
    chosen = _chosen(tokenizer, source)
    _add_byte_level(writer, tokenizer, chosen, source, size)
    normalizer = " (llama.cpp does not compose letters, NFC, as this tokenizer does)" if _composes(tokenizer) else ""
    return f"byte-level BPE with the splits of {chosen.names[0]}, from tokenizer.json{normalizer}"


def _ask(source: Path) -> str:
    return (
        "Give --vocab another GGUF file of the same model, which has the vocabulary. Or run convert_hf_to_gguf.py "
        f"{source} --vocab-only --outfile vocab.gguf, and give --vocab vocab.gguf."
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        tokenizer = read_bounded_json(path)
        json.dumps(tokenizer, ensure_ascii=False).encode("utf-8")  # half of a pair of escapes is no text
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {shown(path)}: {error}. Get the file again from its source.") from error
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise CheckpointError(f"{path} has no model: it is not a tokenizer file. Get the file again from its source.")
    return tokenizer


def _chosen(tokenizer: dict[str, Any], source: Path) -> PreTokenizer:
    """Return how llama.cpp splits text as a tokenizer.json does, which does nothing else that llama.cpp does not.

    Raises:
        UnsupportedModelError: it does; or it splits text in no way that is known here.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens", [])
    pre_tokenizer = None
    if model.get("type") != "BPE":
        reason = f"is of kind {model.get('type')}, and only byte-level BPE is written here"
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
        raise UnsupportedModelError(f"the tokenizer of {source} {reason}. {_ask(source)}")
    return pre_tokenizer


def _composes(tokenizer: dict[str, Any]) -> bool:
    """Return whether all that a tokenizer.json normalizes is NFC, which leaves nearly every text as it is."""
    normalizer = tokenizer.get("normalizer") or {}
    return [each.get("type") for each in normalizer.get("normalizers", [normalizer])] == ["NFC"]


def _around(source: Path, special: dict[str, int]) -> dict[str, bool]:
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
            f"bos and eos alone. {_ask(source)}"
        )
    return {"bos": bool(before), "eos": bool(behind)}


def _add_byte_level(writer: Any, tokenizer: dict[str, Any], chosen: PreTokenizer, source: Path, size: int) -> None:
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
            f"tokens would be lost. {_ask(source)}"
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(chosen.names[0])
    writer.add_token_list(tokens)
    token_types = dict.fromkeys(names, _NORMAL) | dict.fromkeys(added, _ADDED) | dict.fromkeys(special, _CONTROL)
    writer.add_token_types([token_types.get(i, _UNUSED) for i in range(size)])
    vocabulary = gguf.SpecialVocab(source, load_merges=True, n_vocab=size)
    vocabulary.add_special_token |= _around(source, vocabulary.special_token_ids)
    vocabulary.add_to_gguf(writer)


def _copied(writer: Any, vocab: Path, size: int) -> str:
    """Copy all keys of the tokenizer from another GGUF file, which has `size` tokens."""
    fields = read_gguf(vocab).fields
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
    return f"that of {printable(vocab.name)}"
