"""One tokenizer for all models of a comparison: the same tokens, or no comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.comparison.candidates import Candidate
from hf_posswap.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLE = "The quick brown fox, aged 10.5 years, said: 'naïve café'.\n\tdef f(x): return [x ** 2, {1: \"two\"}]  # ok\n"


def tokenizer_for(candidates: Sequence[Candidate], given: Any = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer that all candidates are measured with.

    Args:
        candidates: whose folders and Hub ids may hold one.
        given: a tokenizer, a folder or a Hub id; None: that of the first candidate that has one.

    Raises:
        DataError: there is none, one cannot be read, or two candidates have tokenizers that differ.
    """
    if given is not None and not isinstance(given, str | Path):
        return given
    sources = [str(given)] if given is not None else _sources(candidates)
    if not sources:
        raise DataError("a model object brings no tokenizer: give tokenizer=.")
    found = {source: _load(source) for source in sources}
    first, *others = found.items()
    for source, tokenizer in others:
        if tokenizer(_SAMPLE)["input_ids"] != first[1](_SAMPLE)["input_ids"]:
            raise DataError(
                f"{first[0]} and {source} have tokenizers that differ: their losses a token cannot be compared."
            )
    return first[1]


def _sources(candidates: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(str(c.source) for c in candidates if isinstance(c.source, str | Path)))


def _load(source: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{source!r} has no tokenizer that can be read ({first}): give tokenizer=.") from error
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:  # made up where its files are missing
        raise DataError(f"{source!r} has no tokenizer that can be read (it has no vocabulary): give tokenizer=.")
    return tokenizer
