"""What to train on: the sources, their shares, and how windows are cut from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hf_posswap.errors import ConfigError

Packing = Literal["none", "documents", "concatenated", "pose", "random-positions"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)
_LEAST_LENGTH = 4
_MOST_TIMES = 1000


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
        path: a file, or a folder of them: .txt, .md, .rst and .py files are one document each, .jsonl and .json lines
            and .parquet rows one each. Or a folder of `Dataset.save_to_disk`, "folder:split" if it has several splits;
            or "org/name", "org/name:split" or "org/name@commit:split" of a data set on the Hub; or "python": the
            running Python's own sources and documentation (a folder of that name is "./python").
        weight: share of the windows that come from here, in proportion to the other sources' weights.
        column: that holds the text of a row. A row without text there is a chat if it has messages, or prompt and
            completion, in TRL's formats (https://huggingface.co/docs/trl/dataset_formats); messages takes them from
            rows that have text too.
        documents: most documents to take, in order; None: all.
        min_tokens: tokens that a document must have; shorter ones are left out. None: all are taken.
        upsample: how often a pass reads a document, by its least tokens: {0: 0.5, 4096: 1, 8192: 4} reads half of the
            documents below 4096 tokens, and those from 8192 on four times. None: each once.
        streaming: whether a data set on the Hub is read row by row, or downloaded as a whole first.
    """

    path: str = ""
    weight: float = 1.0
    column: str = "text"
    documents: int | None = None
    min_tokens: int | None = None
    upsample: Mapping[int, float] | None = None
    streaming: bool = True

    def __post_init__(self) -> None:
        problems = []
        if not self.path:
            problems.append("path is a file, a folder, org/name of a data set, or 'python'; none is given")
        if not (math.isfinite(self.weight) and self.weight > 0):
            problems.append(f"weight is a number above 0, got {self.weight!r}; leave the source out for a share of 0")
        if self.documents is not None and self.documents < 2:
            problems.append(f"documents is a whole number of at least 2, got {self.documents!r}")
        if self.min_tokens is not None and self.min_tokens < 1:
            problems.append(f"min_tokens is a number of tokens from 1, got {self.min_tokens!r}")
        for tokens, times in (self.upsample or {}).items():
            if tokens < 0 or not 0 <= times <= _MOST_TIMES:
                problems.append(
                    f"upsample maps a number of tokens from 0 to how often longer documents are read, 0 to "
                    f"{_MOST_TIMES}, got {tokens!r}: {times!r}"
                )
        _refuse(problems, "source")


@dataclass(frozen=True)
class DataSettings:
    """What to train on, and how windows are cut from it.

    Attributes:
        sources: where documents come from. There is no default: without one, nothing can be trained.
        length: tokens of a window.
        packing: "none": a window holds tokens of one document, padded where that ends. "documents": as many whole
            documents as fit, with no attention across. "concatenated": documents one after another in random order,
            cut every `length` tokens, with attention across. "pose": two pieces of one document, as far apart in
            position as the target length allows, with attention across (https://arxiv.org/abs/2309.10400).
            "random-positions": one piece of a document at sorted random positions below the target length, with
            attention across (https://arxiv.org/abs/2305.16843).
        separator: text or special token between concatenated documents, instead of the begin-of-text token of each
            (https://arxiv.org/abs/2504.06214). None: documents follow one another as they are tokenized.
        assistant_only_loss: count the assistant's messages alone, as in TRL: those in the chat template's
            {% generation %} blocks, or, without such blocks, what each message adds to the prompt before it. Sources
            of text alone are counted whole.
        completion_only_loss: count the completion alone, as in TRL; None: in rows with prompt and completion.
        eos_token: the token that ends each row of text, as in TRL, which then has the special tokens that the
            tokenizer adds itself; chats and the saved model end with it too. None: prompts with completions end with
            the tokenizer's, and other text has the begin-of-text token alone.
        cut: windows that each `length` tokens are cut into, step by step, repeated: [8, 1] alternates steps of eight
            short windows with steps of one full-length window. Every step reads the same number of tokens.
        seed: of the order, the positions and the masking.
        cache: folder that keeps tokens for later runs; None: $HF_POSSWAP_CACHE, or the user's cache.
        held_out: share of the documents that are held out of training.
        mask_share: share of an encoder's tokens to predict.
    """

    sources: tuple[Source, ...] = ()
    length: int = 512
    packing: Packing = "none"
    separator: str | None = None
    assistant_only_loss: bool = False
    completion_only_loss: bool | None = None
    eos_token: str | None = None
    cut: tuple[int, ...] = (1,)
    seed: int = 0
    cache: Path | None = None
    held_out: float = 0.05
    mask_share: float = 0.15

    def __post_init__(self) -> None:
        problems = []
        if (problem := cut_problem(self.cut, self.length)) is not None:
            problems.append(f"cut {problem}")
        if self.length < _LEAST_LENGTH:
            problems.append(f"length is a whole number of at least {_LEAST_LENGTH} tokens, got {self.length!r}")
        if self.packing not in PACKINGS:
            problems.append(f"packing is one of {', '.join(PACKINGS)}, got {self.packing!r}")
        if self.separator is not None and (self.packing != "concatenated" or not self.separator):
            problems.append(
                "separator is text between the documents of packing 'concatenated', got "
                f"{self.separator!r} with packing {self.packing!r}"
            )
        if self.eos_token == "":
            problems.append("eos_token is a token of the vocabulary, got ''; leave it out for none")
        if self.seed < 0:
            problems.append(f"seed is a whole number of at least 0, got {self.seed!r}")
        for name in ("held_out", "mask_share"):
            if not 0 < getattr(self, name) < 1:
                problems.append(f"{name} is a share between 0 and 1, got {getattr(self, name)!r}")
        _refuse(problems, "data")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Window lengths in tokens, the longest first.

        Example:
            >>> DataSettings(length=2048, cut=(8, 1)).lengths
            (2048, 256)
        """
        return tuple(self.length // pieces for pieces in sorted(set(self.cut)))

    def to_dict(self) -> dict[str, object]:
        """Return the settings as JSON."""
        return dataclasses.asdict(self) | {"cache": None if self.cache is None else str(self.cache)}


def cut_problem(cut: tuple[int, ...], length: int) -> str | None:
    """Return what is wrong with `cut` for windows of `length` tokens, or None.

    Example:
        >>> cut_problem((8, 1), 2048)
        >>> cut_problem((8,), 2048)
        'must contain 1, for steps of full-length windows, got [8]'
    """
    if 1 not in cut:
        return f"must contain 1, for steps of full-length windows, got {list(cut)}"
    invalid = [pieces for pieces in cut if pieces < 1 or length % pieces or length // pieces < _LEAST_LENGTH]
    if invalid and length >= _LEAST_LENGTH:
        return (
            f"must divide {length} tokens into windows of equal length and at least {_LEAST_LENGTH} tokens each, got "
            f"{', '.join(map(str, invalid))}"
        )
    return None


def _refuse(problems: list[str], section: str) -> None:
    if problems:
        raise ConfigError(f"{section}: {'; '.join(problems)}.")
