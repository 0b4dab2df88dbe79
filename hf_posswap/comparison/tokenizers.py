"""One tokenizer for all models of a comparison: the same tokens, or no comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.comparison.candidates import Candidate
from hf_posswap.errors import DataError
from hf_posswap.text.tokens import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLE = "The quick brown fox, aged 10.5 years, said: 'naïve café'.\n\tdef f(x): return [x ** 2, {1: \"two\"}]  # ok\n"


def tokenizer_for(
    candidates: Sequence[Candidate], given: Any = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that all candidates are measured with.

    Args:
        candidates: whose folders and Hub ids may hold one.
        given: a tokenizer, a folder or a Hub id; None: that of the first candidate that has one.
        trust_remote_code: run code that a folder or Hub id brings, where its tokenizer is code.

    Raises:
        DataError: there is none, one cannot be read, or two candidates have tokenizers that differ.
        RemoteCodeError: one is code, which was not asked for.
    """
    if given is not None and not isinstance(given, str | Path):
        return given
    sources = [str(given)] if given is not None else _sources(candidates)
    if not sources:
        raise DataError("a model object brings no tokenizer: give tokenizer=.")
    found = {
        source: load_tokenizer(source, instead="give tokenizer=", trust_remote_code=trust_remote_code)
        for source in sources
    }
    first, *others = found.items()
    for source, tokenizer in others:
        if tokenizer(_SAMPLE)["input_ids"] != first[1](_SAMPLE)["input_ids"]:
            raise DataError(
                f"{first[0]} and {source} have tokenizers that differ: their losses a token cannot be compared."
            )
    return first[1]


def _sources(candidates: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(str(c.source) for c in candidates if isinstance(c.source, str | Path)))
