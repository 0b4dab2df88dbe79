"""`posswap compare`: several models on the same tokens, each held against the first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import Json, TrustRemoteCode, make_scheme, source_of
from hf_posswap.cli.evaluating import (
    Column,
    Device,
    Documents,
    Dtype,
    KeySpans,
    Lengths,
    Margin,
    MaxLength,
    Metrics,
    Out,
    Pictures,
    Seed,
    Text,
    Tokenizer,
    Trials,
    eval_settings,
    placing,
    progress,
    show_evaluation,
)
from hf_posswap.cli.output import quiet_library

if TYPE_CHECKING:
    from hf_posswap.comparison import Candidate


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Folders or Hub ids, or MODEL+SCHEME:FIELD=VALUE:... to put in a scheme without training. +SCHEME "
            "alone takes the first model's. The first is what the others are held against.",
            show_default=False,
        ),
    ],
    max_length: MaxLength = None,
    lengths: Lengths = None,
    metrics: Metrics = None,
    text: Text = None,
    column: Column = "text",
    documents: Documents = 48,
    trials: Trials = 10,
    margin: Margin = 0.02,
    key_spans: KeySpans = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = None,
    seed: Seed = 0,
    out: Out = None,
    pictures: Pictures = True,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Compare models on the same tokens: checkpoints, or one model with different schemes put in.

    A model is loaded once, however many schemes are put into it. Differences from the first model are paired by
    document and corrected for the number of lengths.

    Example: posswap compare llama +ntk +yarn:factor=4 --lengths 2048,4096,8192 --text books/
    """
    chosen = parse_candidates(models, max_length)
    with quiet_library():
        from hf_posswap.comparison import compare as run

        found = run(
            chosen,
            documents=text,
            tokenizer=tokenizer,
            out=out,
            settings=eval_settings(lengths, metrics, documents, trials, margin, key_spans, seed),
            column=column,
            pictures=pictures,
            reporter=progress(),
            trust_remote_code=trust_remote_code,
            **placing(device, dtype),
        )
    show_evaluation(found, json)


def parse_candidates(models: list[str], max_length: int | None) -> list[Candidate]:
    """Return the candidates that the arguments write.

    Args:
        models: "MODEL", "MODEL+SCHEME", "MODEL+SCHEME:FIELD=VALUE:...", or "+SCHEME..." of the first model.
        max_length: tokens that schemes are meant for; None: the longest length that is measured.

    Raises:
        CheckpointError: a folder does not exist, or the first argument names no model.
        OptionError, UnknownNameError, SchemeError: as `make_scheme`.

    Example:
        >>> found = parse_candidates(["org/llama", "+yarn:factor=4", "org/other"], None)
        >>> [candidate.label for candidate in found]
        ['llama', 'llama+yarn:factor=4', 'other']
    """
    from hf_posswap.comparison import Candidate

    candidates: list[Candidate] = []
    for given in models:
        model, plus, swap = (given, "", "") if Path(given).expanduser().exists() else given.partition("+")
        source = str(candidates[0].source) if plus and not model and candidates else source_of(model)
        if not plus:
            candidates.append(Candidate(source))
            continue
        name, *settings = swap.split(":")
        label = f"{Path(source).name}+{swap}"
        candidates.append(Candidate(source, make_scheme(name, settings), max_length=max_length, name=label))
    return candidates
