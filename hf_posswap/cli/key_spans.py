"""`posswap key-spans`: the tokens that need far context, for the metric longppl."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.arguments import Model, TrustRemoteCode, source_of
from hf_posswap.cli.evaluating import Column, Device, Documents, Dtype, Text, Tokenizer, placing, requested_text
from hf_posswap.cli.output import quiet_library, show_lines
from hf_posswap.cli.target import checked_file
from hf_posswap.errors import DataError, OptionError, PositionRangeError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.auto_classes import TRUST

if TYPE_CHECKING:
    import numpy as np

    from hf_posswap.comparison.candidates import Subject


def key_spans(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The JSON file to write.")],
    length: Annotated[int, typer.Option(metavar="N", help="Tokens of each document: the longest measured length.")],
    text: Text = None,
    column: Column = "text",
    documents: Documents = 48,
    short: Annotated[int, typer.Option(metavar="N", help="Tokens of the short context.")] = 4096,
    stride: Annotated[int, typer.Option(metavar="N", help="Tokens that each short window scores.")] = 1024,
    gain: Annotated[float, typer.Option(metavar="NATS", help="Minimum gain in loss from the whole text.")] = 2.0,
    limit: Annotated[float, typer.Option(metavar="NATS", help="Maximum loss with the whole text.")] = 2.0,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Find the tokens that MODEL predicts well, and much better from the whole text than from a short part of it.

    MODEL should use long context well. Models that are measured on these tokens must have the same tokenizer, and be
    measured with the same texts, documents and longest length.

    Example: posswap key-spans llama --length 32768 --text books/ -o spans.json, and then
    posswap compare llama +yarn --metrics longppl --key-spans spans.json --lengths 32768 --text books/
    """
    source = source_of(model)
    if not 2 <= short < length:  # with these values no text could have key tokens
        raise OptionError(f"--short is at least 2 and less than --length, got --short {short} --length {length}.")
    if not 1 <= stride <= short:
        raise OptionError(f"--stride is at least 1 and at most --short, got --stride {stride} --short {short}.")
    if documents < 2:
        raise OptionError(f"--documents is a whole number of at least 2, got {documents}.")
    for name, value in (("--gain", gain), ("--limit", limit)):
        if not math.isfinite(value):
            raise OptionError(f"{name} is a number of nats, got {value}.")
    requested = requested_text(text)
    with quiet_library():
        from hf_posswap.comparison.documents import check_paths, text_and_count
        from hf_posswap.evaluation.longppl import find_key_spans

        documents_source, _ = text_and_count(requested, None)
        check_paths(documents_source)
        target = checked_file(out)
        placement = placing(device, dtype) | {TRUST: trust_remote_code}
        subject, tokens = _prepare(source, documents_source, column, documents, length, tokenizer, placement)
        how = {"short": short, "stride": stride, "gain": gain, "limit": limit}
        spans = find_key_spans(subject.scorer, subject.name, list(tokens), **how)  # type: ignore[arg-type]
        count = sum(stop - start for document in spans.spans for start, stop in document)
        if count == 0:
            raise DataError(
                f"{subject.name} predicts no token that much better from {length} tokens than from {short}: take "
                "longer documents, a better model, or a smaller --gain."
            )
        spans.save(target)
    show_lines(f"{count} key tokens in {len(spans.spans)} documents of {length} tokens: {shown(out)}")


def _prepare(
    source: str,
    text: list[Path] | None,
    column: str,
    documents: int,
    length: int,
    tokenizer: str | None,
    placement: dict[str, Any],
) -> tuple[Subject, np.ndarray]:
    """Return the evaluator and the documents, int32 [N, length], checked against its vocabulary and memory."""
    from hf_posswap.comparison.candidates import Candidate, ModelLoader, make_subject, tokenizer_for
    from hf_posswap.comparison.documents import read_documents
    from hf_posswap.evaluation.cost import check_memory
    from hf_posswap.text.tokens import check_token_ids

    candidate = Candidate(source)
    loaded_tokenizer = tokenizer_for([candidate], tokenizer, trust_remote_code=placement[TRUST])
    tokens = read_documents(text, loaded_tokenizer, length=length, limit=documents, column=column).tokens
    subject = make_subject(candidate.label, ModelLoader({}, **placement).model(candidate, length), length)
    if subject.reach.limit is not None and subject.reach.limit < length:
        raise PositionRangeError(f"{subject.name} ends at {subject.reach.limit} tokens: --length {length} is too long.")
    check_token_ids(subject.model, tokens)
    check_memory(subject.model, length, prefill=subject.identity["prefill"])
    return subject, tokens
