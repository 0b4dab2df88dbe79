"""The common tokenizer of all models of a comparison."""

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
    """Return the tokenizer for all candidates.

    Args:
        candidates: their folders and Hub ids, or those of their model objects, may contain tokenizers.
        given: a tokenizer, a folder or a Hub id; None: the tokenizer of the first candidate that has one.
        trust_remote_code: run code that comes with a tokenizer.

    Raises:
        DataError: there is no tokenizer, one cannot be read, or two candidates have different tokenizers.
        RemoteCodeError: a tokenizer needs code without `trust_remote_code`.
    """
    if given is not None and not isinstance(given, str | Path):
        return given
    sources = [str(given)] if given is not None else _sources(candidates)
    if not sources:
        raise DataError("a model object has no tokenizer: give tokenizer=.")
    tokenizers = {
        source: load_tokenizer(source, instead="give tokenizer=", trust_remote_code=trust_remote_code)
        for source in sources
    }
    first, *others = tokenizers.items()
    for source, tokenizer in others:
        if tokenizer(_SAMPLE)["input_ids"] != first[1](_SAMPLE)["input_ids"]:
            raise DataError(
                f"{first[0]} and {source} have different tokenizers: their losses per token cannot be compared."
            )
    return first[1]


def _sources(candidates: Sequence[Candidate]) -> list[str]:
    """Return the folders and Hub ids of candidates; where there are none, those that model objects were loaded from."""
    named = [str(c.source) for c in candidates if isinstance(c.source, str | Path)]
    loaded = [str(getattr(getattr(c.source, "config", None), "name_or_path", None) or "") for c in candidates]
    return list(dict.fromkeys(named or filter(None, loaded)))
