"""`posswap compare`: several models on the same tokens, each held against the control or the first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import Json, TrustRemoteCode, make_scheme, source_of
from hf_posswap.cli.completing import added_schemes
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
    command_line,
    eval_settings,
    placing,
    progress,
    show_evaluation,
)
from hf_posswap.cli.output import quiet_library
from hf_posswap.cli.scheme_command import refuse_other_ways
from hf_posswap.errors import OptionError
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.comparison import Candidate

_NOT_IN_NAMES = "/\\+:~"


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Folders or Hub ids, or MODEL+SCHEME:FIELD=VALUE,... to put in a scheme without training. +SCHEME "
            "alone takes the first model's. NAME=MODEL says what it is called; otherwise its run's folder does.",
            show_default=False,
            autocompletion=added_schemes,
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The model that the others are held against; without it the one called control, or the first.",
            show_default=False,
        ),
    ] = None,
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

    A model is loaded once, however many schemes are put into it. Differences from the control, or the first model, are
    paired by document and corrected for the number of lengths. Beyond its window each is also held against the sliding
    window: the control, reading half-overlapping windows of the original size.

    Example: posswap compare base=gpt2 control/model rope/model --against control --text books/ -o results

    Example: posswap compare llama +ntk +yarn:factor=4 --lengths 2048,4096,8192 --text books/
    """
    chosen = parse_candidates(models, max_length, against)
    with quiet_library():
        from hf_posswap.comparison import compare as run

        found = run(
            chosen,
            against=against,
            command=command_line(),
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


@dataclass(frozen=True)
class Given:
    """One argument, taken apart.

    Attributes:
        name: that was given, or None.
        source: a folder or a Hub id.
        swap: "SCHEME:FIELD=VALUE,...", or "".
    """

    name: str | None
    source: str
    swap: str


def parse_candidates(models: list[str], max_length: int | None, against: str | None = None) -> list[Candidate]:
    """Return the candidates that the arguments write. What is wrong with their names is told before torch is loaded.

    Args:
        models: "MODEL", "MODEL+SCHEME", "MODEL+SCHEME:FIELD=VALUE,...", or "+SCHEME..." of the first model, each with
            "NAME=" before it or without.
        max_length: tokens that schemes are meant for; None: the longest length that is measured.
        against: name of the model that the others are held against, to be checked; None: it was not asked for.

    Raises:
        CheckpointError: a folder does not exist, or the first argument names no model.
        DataError: two models are called the same.
        OptionError, UnknownNameError, SchemeError: as `make_scheme`, an argument has no model after its name, or none
            is called `against`.

    Example:
        >>> found = parse_candidates(["org/llama", "+yarn:factor=4", "mine=org/other"], None)
        >>> [candidate.label for candidate in found]
        ['llama', 'llama+yarn:factor=4', 'mine']
    """
    from hf_posswap.comparison.names import check_names, reference_name, source_names

    given: list[Given] = []
    for text in models:
        given.append(_take_apart(text, given[0].source if given else None))
    known = source_names(one.source for one in given if one.name is None)
    names: list[str] = []
    for text, one in zip(models, given, strict=True):
        plain = names[0] if text.startswith("+") and names else known.get(one.source, "")
        names.append(one.name or f"{plain}+{one.swap}".rstrip("+"))
    _refuse_schemes_without_a_sign(models, given)
    check_names(names)
    reference_name(names, against)

    from hf_posswap.comparison import Candidate

    candidates = []
    for name, one in zip(names, given, strict=True):
        swap = make_scheme(one.swap) if one.swap else None
        candidates.append(Candidate(one.source, swap, max_length=max_length, name=name))
    return candidates


def _refuse_schemes_without_a_sign(texts: list[str], given: list[Given]) -> None:
    """Raise an OptionError where an argument is a scheme without +, or a field that stands apart from its scheme."""
    unsure = [
        n for n, one in enumerate(given) if not one.swap and "/" not in one.source and not Path(one.source).exists()
    ]
    if not unsure:
        return
    from hf_posswap.schemes import SCHEMES

    refuse_other_ways([text for n, text in enumerate(texts) if n in unsure or given[n].swap])
    for n in unsure:
        if texts[n].partition(":")[0] in SCHEMES:
            raise OptionError(f"{texts[n]!r} is a scheme, and no model: write +{texts[n]} to put it in.")


def _take_apart(text: str, first: str | None) -> Given:
    """Return what one argument says; `first` is the source of the first one."""
    if expand_home(text).exists():
        return Given(None, source_of(text), "")
    name, equals, rest = text.partition("=")
    if not equals or set(name) & set(_NOT_IN_NAMES):  # as in runs/a=1/model and in +yarn:factor=4
        name, rest = "", text
    elif not name.strip() or not rest:
        raise OptionError(f"{text!r}: expected NAME=MODEL, for example rope=runs/rope/model.")
    if expand_home(rest).exists():
        return Given(name or None, source_of(rest), "")
    model, plus, swap = rest.partition("+")
    if plus and not swap:
        raise OptionError(f"{text!r}: expected a scheme after +, for example +rope; posswap schemes lists them.")
    return Given(name or None, first if plus and not model and first else source_of(model), swap)
