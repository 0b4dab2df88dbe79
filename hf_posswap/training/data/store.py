"""A cache of tokenized documents on disk; a lock makes concurrent processes share one tokenization."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, overload

import numpy as np
from filelock import FileLock

from hf_posswap.errors import CheckpointError, DataError
from hf_posswap.text.chats import Chat, ChatEncoder
from hf_posswap.text.stdlib import Document, hash_position
from hf_posswap.training.data.settings import Source
from hf_posswap.training.data.sources import Say, TokenizingProgress, source_documents, source_identity
from hf_posswap.utils.atomic_io import read_json, replacing, writable_folder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 3
_DIGESTS, _ROWS = "digests.json", "rows.json"
# Limits of a tokenizer call: fast tokenizers parallelize over documents, but memory must stay bounded.
_AT_ONCE, _CHARACTERS = 256, 4_000_000
_FLAGS = ".counted"
_OF_THE_LOAD = ("is_local", "local_files_only", "name_or_path", "model_max_length")
"""What a tokenizer's config says of where it was loaded from and where its model ends, which changes no token."""
_SAMPLE = "The ship's 2 Masts,\n\tand 1,024 \u00dcber-long\u2019words: na\u00efve \u6771\u4eac \U0001f6a2  </s> <s>"
"""Text with what tokenizers treat in different ways: case, accents, digits, blanks, other scripts, special tokens."""
_SPLITS = ("train", "held_out")
Placed = tuple[Document, bool | None]
"""A document, and whether it is held out; None: a hash of its text decides."""


@dataclass(frozen=True)
class TokenStore(Sequence[np.ndarray]):
    """Documents as token ids.

    Attributes:
        tokens: of all documents, concatenated, int32 [N].
        offsets: start of each document, and the end, int64 [documents + 1].
        digest: of all arrays, computed when they were written.
        counted: whether the loss counts each token, bool [N]; None: it counts all.
        rows: numbers of rows of both splits, by the names in the summary.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    digest: str
    counted: np.ndarray | None = None
    rows: Mapping[str, int] = field(default_factory=dict)

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

    def counted_of(self, index: int) -> np.ndarray:
        """Return whether the loss counts each token of document `index`, bool [its tokens]."""
        start, end = self.offsets[index], self.offsets[index + 1]
        return np.ones(end - start, dtype=bool) if self.counted is None else self.counted[start:end]


def token_stores(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    begin: bool,
    held_out: float,
    cache: Path,
    assistant_only: bool = False,
    completion_only: bool | None = None,
    ends: bool = False,
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
        assistant_only: as in `ChatEncoder`.
        completion_only: likewise.
        ends: whether each document of text ends with the tokenizer's end-of-text token and has the special tokens
            that the tokenizer adds itself, as in TRL's SFTTrainer.
        say: shows a progress line now and then; None: nothing is shown.

    Raises:
        DataError: the source cannot be read, one of the splits would be empty, or a row is not what the loss is to
            count.
        CheckpointError: the cache cannot be written.
    """
    origin = source_identity(source)
    commit = None if origin.get("commit") is None else str(origin["commit"])
    identity = {
        "layout": _LAYOUT,
        "source": origin,
        "tokenizer": _tokenizer_identity(tokenizer),
        "begin": begin,
        "held_out": held_out,
        "loss": [assistant_only, completion_only],
    } | ({"ends": True} if ends else {})
    encoder = _Encoder(tokenizer, begin=begin, ends=ends)
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
                chats = ChatEncoder(tokenizer, assistant_only, completion_only)
                least_hash = _write(source, commit, encoder, chats, held_out, temporary, say)
                if least_hash is not None:
                    share, chats = (
                        math.nextafter(least_hash, 1.0),
                        ChatEncoder(tokenizer, assistant_only, completion_only),
                    )
                    _write(source, commit, encoder, chats, share, temporary, say, requested_share=held_out)
                write_json(temporary / "identity.json", identity)
    train_store, held_out_store = (_open(folder, split) for split in _SPLITS)
    return train_store, held_out_store


def _write(
    source: Source,
    commit: str | None,
    encoder: _Encoder,
    chats: ChatEncoder,
    held_out: float,
    folder: Path,
    say: Say | None,
    *,
    requested_share: float | None = None,
) -> float | None:
    """Write the documents of `source` into `folder`; those with a hash below `held_out` go to the held-out split.

    Args:
        source: of the documents.
        commit: of a data set on the Hub; None: unknown.
        encoder: turns text into tokens.
        chats: turns chats into tokens.
        held_out: share to hold out.
        folder: that takes the files.
        say: as in `token_stores`.
        requested_share: the requested share, if `held_out` was raised to hold out one text.

    Returns:
        None; or the least hash, if no document was held out and a larger share would fill both splits.

    Raises:
        DataError: one of the splits is empty, and no other share would fill it.
    """
    progress = TokenizingProgress(source, say)
    with ExitStack() as stack:
        splits = tuple(stack.enter_context(_SplitWriter(folder, split)) for split in _SPLITS)
        groups = _groups(source_documents(source, chats=True, commit=commit))
        hash_positions, rows = _write_groups(groups, splits, encoder, chats, held_out, progress)
    lengths = {writer.split: writer.lengths for writer in splits}
    count = sum(map(len, lengths.values()))
    if not count and rows["without_loss"]:
        raise DataError(
            f"{source.path} has {rows['without_loss']} rows, and none has a token that the loss counts: give messages "
            "of the assistant, or leave data.assistant_only_loss and data.completion_only_loss out."
        )
    if not lengths["held_out"] and len(hash_positions) > 1:
        return min(hash_positions)
    if requested_share is not None and say is not None:
        number = len(lengths["held_out"])
        aside = "one is set aside to measure on" if number == 1 else f"{number} equal ones are set aside to measure on"
        say(
            f"{source.path}: data.held_out={requested_share:g} sets none of its {count} documents aside, so {aside}. "
            "Raise data.held_out to measure on more."
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
    write_json(folder / _DIGESTS, {writer.split: writer.digest() for writer in splits})
    write_json(folder / _ROWS, rows | {"diverging_prompts": chats.diverging, "unstopped": chats.unstopped})
    return None


def _write_groups(
    groups: Iterator[list[Placed]],
    splits: tuple[_SplitWriter, ...],
    encoder: _Encoder,
    chats: ChatEncoder,
    held_out: float,
    progress: TokenizingProgress,
) -> tuple[set[float], dict[str, int]]:
    """Write the documents of `groups` into `splits`, and return the hashes of those placed by it, and counts of rows.

    Raises:
        DataError: text and chats are mixed, and the loss is to count parts of the chats alone.
    """
    hash_positions: set[float] = set()
    rows = {"chats": 0, "without_loss": 0}
    text = ""  # the name of a document that is not a chat
    for group in groups:
        encoded = list(_encode(group, encoder, chats))
        progress.count(len(group), sum(len(ids) for ids, _ in encoded))
        for (document, source_decision), (ids, counted) in zip(group, encoded, strict=True):
            is_chat = isinstance(document, Chat)
            rows["chats"] += is_chat
            text = text or ("" if is_chat else document.name)
            if text and rows["chats"]:
                _refuse_text_among_chats(text, chats)
            if counted is not None and not counted[1:].any():
                rows["without_loss"] += 1
                continue
            if source_decision is None:
                hash_positions.add(hash_position(document.text))
            is_held_out = hash_position(document.text) < held_out if source_decision is None else source_decision
            splits[is_held_out].write(ids, counted)
    return hash_positions, rows


class _SplitWriter:
    """Writes the tokens of one split, and their flags once one is not counted.

    Args:
        folder: that takes the files.
        split: "train" or "held_out".
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split
        self.lengths: list[int] = []
        self.tokens = 0
        self._hash, self._flags_hash = hashlib.sha256(), hashlib.sha256()
        self._flags: BinaryIO | None = None

    def __enter__(self) -> _SplitWriter:
        self._ids = (self.folder / f"{self.split}.bin").open("wb")
        (self.folder / f"{self.split}{_FLAGS}").unlink(missing_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._ids.close()
        if self._flags is not None:
            self._flags.close()

    def write(self, ids: np.ndarray, counted: np.ndarray | None) -> None:
        """Append a document; `counted` None: the loss counts all of it."""
        if self._flags is None and counted is not None and not counted.all():
            self._flags = (self.folder / f"{self.split}{_FLAGS}").open("wb")
            for start in range(0, self.tokens, _CHARACTERS):
                self._write_flags(np.ones(min(_CHARACTERS, self.tokens - start), dtype=bool))
        self._ids.write(ids.tobytes())
        self._hash.update(ids.astype("<i4").tobytes())
        if self._flags is not None:
            self._write_flags(np.ones(len(ids), dtype=bool) if counted is None else counted)
        self.lengths.append(len(ids))
        self.tokens += len(ids)

    def _write_flags(self, counted: np.ndarray) -> None:
        assert self._flags is not None
        self._flags.write(counted.tobytes())
        self._flags_hash.update(counted.tobytes())

    def digest(self) -> str:
        """Return the digest of tokens, lengths and flags; without flags it is that of tokens and lengths."""
        self._hash.update(np.array(self.lengths, dtype="<i8").tobytes())
        if self._flags is not None:
            self._hash.update(self._flags_hash.digest())
        return self._hash.hexdigest()[:16]


def _refuse_text_among_chats(text: str, encoder: ChatEncoder) -> None:
    """Refuse a source of text and chats if the loss is to count parts of the chats alone."""
    key = "assistant_only_loss" if encoder.assistant_only else "completion_only_loss"
    if encoder.assistant_only or encoder.completion_only:
        raise DataError(
            f"{text} is text, other rows of its source are chats, and data.{key}=true counts only parts of chats: put "
            "text into another source, where it is counted whole."
        )


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


@dataclass(frozen=True)
class _Encoder:
    """Turns text into tokens.

    Attributes:
        tokenizer: of the model.
        begin: as in `token_stores`.
        ends: likewise.
    """

    tokenizer: PreTrainedTokenizerBase
    begin: bool
    ends: bool

    def __call__(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Yield the token ids of each of `texts`, int32 [n]."""
        if not texts:
            return
        first = [self.tokenizer.bos_token_id] if self.begin and self.tokenizer.bos_token_id is not None else []
        if self.ends:
            end, first = str(self.tokenizer.eos_token), []
            texts = [text if text.endswith(end) else text + end for text in texts]
        for ids in self.tokenizer(texts, add_special_tokens=self.ends, verbose=False)["input_ids"]:
            yield np.array([*first, *ids], dtype=np.int32)


def _encode(
    group: list[Placed], encoder: _Encoder, chats: ChatEncoder
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield the tokens of each document, and which of them the loss counts; None: all."""
    rows = encoder([document.text for document, _ in group if not isinstance(document, Chat)])
    for document, _ in group:
        if isinstance(document, Chat):
            yield chats.encode(document)
        else:
            yield next(rows), None


def _open(folder: Path, split: str) -> TokenStore:
    try:
        offsets = np.load(folder / f"{split}.npy")
        tokens = np.memmap(folder / f"{split}.bin", dtype=np.int32, mode="r")
        digest = str(read_json(folder / _DIGESTS)[split])
        rows = dict(read_json(folder / _ROWS))
        flags = folder / f"{split}{_FLAGS}"
        counted = np.memmap(flags, dtype=bool, mode="r") if flags.is_file() else None
    except Exception as error:  # numpy's reader of headers raises anything
        raise DataError(f"the cached tokens in {folder} cannot be read: {error}. Delete that folder.") from error
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 2 or offsets[0] or (np.diff(offsets) < 0).any():
        raise DataError(f"{folder}/{split}.npy holds no document offsets: it is damaged. Delete that folder.")
    if counted is not None and len(counted) != len(tokens):
        raise DataError(f"{flags} holds {len(counted)} flags for {len(tokens)} tokens: delete {folder}.")
    if len(tokens) != offsets[-1]:
        raise DataError(
            f"{folder} holds {len(tokens)} tokens where {offsets[-1]} were written: it is damaged. Delete that folder."
        )
    return TokenStore(tokens, offsets, digest, counted, rows)


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return what decides the tokens of a text, as JSON: that in a fast tokenizer, or in the files of a slow one."""
    backend, digest = getattr(tokenizer, "backend_tokenizer", None), hashlib.sha256()
    if backend is not None:
        digest.update(backend.to_str().encode())
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            config_path = Path(folder) / "tokenizer_config.json"
            config = read_json(config_path)
            config_path.write_text(json.dumps({name: config[name] for name in config if name not in _OF_THE_LOAD}))
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                digest.update(json.dumps([path.relative_to(folder).as_posix(), path.read_bytes().hex()]).encode())
        sample = tokenizer(_SAMPLE, add_special_tokens=False, verbose=False)["input_ids"]
        digest.update(json.dumps([tokenizer.get_vocab(), sample], sort_keys=True).encode())
    return {
        "class": type(tokenizer).__name__,
        "digest": digest.hexdigest(),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token,
        "chat_template": getattr(tokenizer, "chat_template", None),
    } | ({"split_special_tokens": True} if getattr(tokenizer, "split_special_tokens", False) else {})
