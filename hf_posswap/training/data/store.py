"""A cache of tokenized documents on disk; a lock makes concurrent processes share one tokenization."""

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
from hf_posswap.training.data.telling import Say, TokenizingProgress
from hf_posswap.utils.atomic_io import read_json, replacing, writable_folder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 2
_DIGESTS = "digests.json"
# Limits of a tokenizer call: fast tokenizers parallelize over documents, but memory must stay bounded.
_AT_ONCE, _CHARACTERS = 256, 4_000_000
_SPLITS = ("train", "held_out")
Placed = tuple[Document, bool | None]
"""A document, and whether it is held out; None: a hash of its text decides."""


@dataclass(frozen=True)
class TokenStore(Sequence[np.ndarray]):
    """Documents as token ids.

    Attributes:
        tokens: of all documents, concatenated, int32 [N].
        offsets: start of each document, and the end, int64 [documents + 1].
        digest: of both, computed when they were written.
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
    """Return the training and the held-out documents of `source`, from `cache` if they are there.

    Equal texts go to the same split. If the share holds out none of several documents, one text is held out.

    Args:
        source: of the documents.
        tokenizer: of the model.
        begin: whether each document begins with the tokenizer's begin-of-text token, if it has one.
        held_out: share to hold out, if the source does not decide.
        cache: folder of the cache.
        say: shows a progress line now and then; None: nothing is shown.

    Raises:
        DataError: the source cannot be read, or one of the splits would be empty.
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
            f"{error} Tokens are cached there: set another folder by data.cache or HF_POSSWAP_CACHE."
        ) from error
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with replacing(folder) as temporary:
                temporary.mkdir()
                least_hash = _write(source, tokenizer, begin, held_out, temporary, say)
                if least_hash is not None:
                    _write(
                        source,
                        tokenizer,
                        begin,
                        math.nextafter(least_hash, 1.0),
                        temporary,
                        say,
                        requested_share=held_out,
                    )
                write_json(temporary / "identity.json", identity)
    train_store, held_out_store = (_open(folder, split) for split in _SPLITS)
    return train_store, held_out_store


def _write(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    begin: bool,
    held_out: float,
    folder: Path,
    say: Say | None,
    *,
    requested_share: float | None = None,
) -> float | None:
    """Write the documents of `source` into `folder`; those with a hash below `held_out` go to the held-out split.

    Args:
        source: of the documents.
        tokenizer: of the model.
        begin: as in `token_stores`.
        held_out: share to hold out.
        folder: that takes the files.
        say: as in `token_stores`.
        requested_share: the requested share, if `held_out` was raised to hold out one text.

    Returns:
        None; or the least hash, if no document was held out and a larger share would fill both splits.

    Raises:
        DataError: one of the splits is empty, and no other share would fill it.
    """
    hash_positions: set[float] = set()
    lengths: dict[str, list[int]] = {split: [] for split in _SPLITS}
    digests = {split: hashlib.sha256() for split in _SPLITS}
    progress = TokenizingProgress(source, say)
    with (folder / "train.bin").open("wb") as train_file, (folder / "held_out.bin").open("wb") as held_out_file:
        for group in _groups(source_documents(source)):
            encoded = list(_encode(group, tokenizer, begin))
            progress.count(len(group), sum(map(len, encoded)))
            for (document, source_decision), ids in zip(group, encoded, strict=True):
                if source_decision is None:
                    hash_positions.add(_hash_position(document.text))
                is_held_out = _hash_position(document.text) < held_out if source_decision is None else source_decision
                split = _SPLITS[is_held_out]
                (held_out_file if is_held_out else train_file).write(ids.tobytes())
                digests[split].update(ids.astype("<i4").tobytes())
                lengths[split].append(len(ids))
    count = sum(map(len, lengths.values()))
    if not lengths["held_out"] and len(hash_positions) > 1:
        return min(hash_positions)
    if requested_share is not None and say is not None:
        say(
            f"{source.path}: data.held_out={requested_share:g} sets none of its {count} documents aside, so "
            f"{_listed(lengths)}. Raise data.held_out to measure on more."
        )
    if len(hash_positions) == 1 and not all(lengths.values()):
        raise DataError(
            f"{source.path} has one text, and training needs another one to measure on: give at least two different "
            "documents."
        )
    for split, document_lengths in lengths.items():
        if not document_lengths:
            lower, why = ("lower", "learn from") if split == "train" else ("raise", "measure on")
            raise DataError(
                f"{source.path} has {count} documents, and none of them is left to {why} with "
                f"data.held_out={held_out:g}: {lower} data.held_out, or give more documents."
            )
        np.save(folder / f"{split}.npy", np.cumsum([0, *document_lengths], dtype=np.int64))
        digests[split].update(np.array(document_lengths, dtype="<i8").tobytes())
    write_json(folder / _DIGESTS, {split: digest.hexdigest()[:16] for split, digest in digests.items()})
    return None


def _listed(lengths: dict[str, list[int]]) -> str:
    count = len(lengths["held_out"])
    return "one is set aside to measure on" if count == 1 else f"{count} equal ones are set aside to measure on"


def _groups(documents: Iterator[Placed]) -> Iterator[list[Placed]]:
    """Yield the non-empty documents in groups to tokenize at once."""
    group: list[Placed] = []
    characters = 0
    for document, is_held_out in documents:
        if not document.text:
            continue
        if group and (len(group) == _AT_ONCE or characters + len(document.text) > _CHARACTERS):
            yield group
            group, characters = [], 0
        group.append((document, is_held_out))
        characters += len(document.text)
    if group:
        yield group


def _encode(group: list[Placed], tokenizer: PreTrainedTokenizerBase, begin: bool) -> Iterator[np.ndarray]:
    texts = [document.text for document, _ in group]
    first = [tokenizer.bos_token_id] if begin and tokenizer.bos_token_id is not None else []
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        yield np.array([*first, *ids], dtype=np.int32)


def _open(folder: Path, split: str) -> TokenStore:
    try:
        offsets = np.load(folder / f"{split}.npy")
        tokens = np.memmap(folder / f"{split}.bin", dtype=np.int32, mode="r")
        digest = str(read_json(folder / _DIGESTS)[split])
    except Exception as error:  # numpy's reader of headers raises anything
        raise DataError(f"the cached tokens in {folder} cannot be read: {error}. Delete that folder.") from error
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 2 or offsets[0] or (np.diff(offsets) < 0).any():
        raise DataError(f"{folder}/{split}.npy holds no document offsets: it is damaged. Delete that folder.")
    if len(tokens) != offsets[-1]:
        raise DataError(
            f"{folder} holds {len(tokens)} tokens where {offsets[-1]} were written: it is damaged. Delete that folder."
        )
    return TokenStore(tokens, offsets, digest)


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    serialized = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    digest = hashlib.sha256(serialized.encode()).hexdigest()
    return {"class": type(tokenizer).__name__, "digest": digest, "bos": tokenizer.bos_token_id}


def _hash_position(text: str) -> float:
    """Return a hash of `text` in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56
