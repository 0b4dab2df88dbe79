"""Tokens of whole documents on disk, made once: another process that asks meanwhile waits and gets the same."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from filelock import FileLock

from hf_posswap.errors import CheckpointError, DataError
from hf_posswap.text.stdlib import Document
from hf_posswap.training.data.settings import Source
from hf_posswap.training.data.sources import source_documents, source_identity
from hf_posswap.training.data.telling import Say, Telling
from hf_posswap.utils.atomic_io import read_json, replacing, writable_folder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 2
_DIGESTS = "digests.json"
# What is tokenized together: several documents, because the fast tokenizers share them out, but not a library of books.
_AT_ONCE, _CHARACTERS = 256, 4_000_000
_PARTS = ("train", "held_out")
Placed = tuple[Document, bool | None]
"""A document, and whether it is held out; None: its text decides."""


@dataclass(frozen=True)
class TokenStore(Sequence[np.ndarray]):
    """Documents as token ids.

    Attributes:
        tokens: of all, one after another, int32 [N].
        offsets: where each begins, and the end, int64 [documents + 1].
        digest: of both, made as they were written.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    digest: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        k = range(len(self))[index]
        return self.tokens[self.offsets[k] : self.offsets[k + 1]]


def token_stores(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    begin: bool,
    held_out: float,
    cache: Path,
    say: Say | None = None,
) -> tuple[TokenStore, TokenStore]:
    """Return the documents of `source` to learn from and those held out, from `cache` where they lie there.

    Equal texts land in the same part. Where the share holds out no document of several, one text is held out.

    Args:
        source: of the documents.
        tokenizer: of the model.
        begin: whether each begins with the tokenizer's begin-of-text token, where it has one.
        held_out: share to hold out, where the source does not say which.
        cache: folder that keeps them.
        say: shows a line now and then where it takes long; None: nothing is said.

    Raises:
        DataError: the source cannot be read, or one of the parts would be empty.
        CheckpointError: the cache cannot be written.
    """
    identity = {
        "layout": _LAYOUT,
        "source": source_identity(source),
        "tokenizer": _tokenizer_identity(tokenizer),
        "begin": begin,
        "held_out": held_out,
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    try:
        folder = writable_folder(cache) / f"tokens-{name}"
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Tokens are kept there: data.cache or HF_POSSWAP_CACHE names another."
        ) from error
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with replacing(folder) as temporary:
                temporary.mkdir()
                least = _write(source, tokenizer, begin, held_out, temporary, say)
                if least is not None:
                    _write(source, tokenizer, begin, math.nextafter(least, 1.0), temporary, say, asked=held_out)
                write_json(temporary / "identity.json", identity)
    train, measured = (_open(folder, part) for part in _PARTS)
    return train, measured


def _write(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    begin: bool,
    held_out: float,
    folder: Path,
    say: Say | None,
    *,
    asked: float | None = None,
) -> float | None:
    """Write the documents of `source` into `folder`, those with a place below `held_out` apart.

    Args:
        source: of the documents.
        tokenizer: of the model.
        begin: as in `token_stores`.
        held_out: share to hold out.
        folder: that takes the files.
        say: as in `token_stores`.
        asked: the share that was asked for, where `held_out` is another, which holds out one text.

    Returns:
        None; or, where no document was held out and another share would leave some for both parts, the least place.

    Raises:
        DataError: one of the parts is empty, and no other share would fill it.
    """
    places: set[float] = set()
    lengths: dict[str, list[int]] = {part: [] for part in _PARTS}
    digests = {part: hashlib.sha256() for part in _PARTS}
    telling = Telling(source, say)
    with (folder / "train.bin").open("wb") as train, (folder / "held_out.bin").open("wb") as measured:
        for group in _groups(source_documents(source)):
            encoded = list(_encode(group, tokenizer, begin))
            telling.count(len(group), sum(map(len, encoded)))
            for (document, out), ids in zip(group, encoded, strict=True):
                if out is None:
                    places.add(_place(document.text))
                aside = _place(document.text) < held_out if out is None else out
                part = _PARTS[aside]
                (measured if aside else train).write(ids.tobytes())
                digests[part].update(ids.astype("<i4").tobytes())
                lengths[part].append(len(ids))
    count = sum(map(len, lengths.values()))
    if not lengths["held_out"] and len(places) > 1:
        return min(places)
    if asked is not None and say is not None:
        say(
            f"{source.path}: data.held_out={asked:g} sets none of its {count} documents aside, so {_listed(lengths)}. "
            "Raise data.held_out to measure on more."
        )
    for part, found in lengths.items():
        if not found:
            lower, why = ("lower", "learn from") if part == "train" else ("raise", "measure on")
            raise DataError(
                f"{source.path} has {count} documents, and none of them is left to {why} with "
                f"data.held_out={held_out:g}: {lower} data.held_out, or give more documents."
            )
        np.save(folder / f"{part}.npy", np.cumsum([0, *found], dtype=np.int64))
        digests[part].update(np.array(found, dtype="<i8").tobytes())
    write_json(folder / _DIGESTS, {part: digest.hexdigest()[:16] for part, digest in digests.items()})
    return None


def _listed(lengths: dict[str, list[int]]) -> str:
    count = len(lengths["held_out"])
    return "one is set aside to measure on" if count == 1 else f"{count} equal ones are set aside to measure on"


def _groups(documents: Iterator[Placed]) -> Iterator[list[Placed]]:
    """Give the documents that hold text in groups to tokenize at once."""
    group: list[Placed] = []
    characters = 0
    for document, out in documents:
        if not document.text:
            continue
        if group and (len(group) == _AT_ONCE or characters + len(document.text) > _CHARACTERS):
            yield group
            group, characters = [], 0
        group.append((document, out))
        characters += len(document.text)
    if group:
        yield group


def _encode(group: list[Placed], tokenizer: PreTrainedTokenizerBase, begin: bool) -> Iterator[np.ndarray]:
    texts = [document.text for document, _ in group]
    first = [tokenizer.bos_token_id] if begin and tokenizer.bos_token_id is not None else []
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        yield np.array([*first, *ids], dtype=np.int32)


def _open(folder: Path, part: str) -> TokenStore:
    try:
        offsets = np.load(folder / f"{part}.npy")
        tokens = np.memmap(folder / f"{part}.bin", dtype=np.int32, mode="r")
        digest = str(read_json(folder / _DIGESTS)[part])
    except Exception as error:  # numpy's reader of headers raises anything
        raise DataError(f"the kept tokens in {folder} cannot be read: {error}. Delete that folder.") from error
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 2 or offsets[0] or (np.diff(offsets) < 0).any():
        raise DataError(f"{folder}/{part}.npy holds no beginnings of documents: it is damaged. Delete that folder.")
    if len(tokens) != offsets[-1]:
        raise DataError(
            f"{folder} holds {len(tokens)} tokens where {offsets[-1]} were written: it is damaged. Delete that folder."
        )
    return TokenStore(tokens, offsets, digest)


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    held = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    digest = hashlib.sha256(held.encode()).hexdigest()
    return {"class": type(tokenizer).__name__, "digest": digest, "bos": tokenizer.bos_token_id}


def _place(text: str) -> float:
    """Return a number in [0, 1) that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56
