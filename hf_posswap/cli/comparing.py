"""`posswap compare`: several models on the same tokens, each compared with the control or the first model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_posswap.cli.arguments import Json, TrustRemoteCode, added_schemes, make_scheme, source_of
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
    requested_text,
    show_evaluation,
    telling_what_is_kept,
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
            "alone uses the first model. NAME=MODEL sets the label; the default is the run's folder name.",
            show_default=False,
            autocompletion=added_schemes,
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            "--against",
            metavar="NAME",
            help="The baseline: its label. Default: the model called control, else the first.",
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

    A model is loaded once, however many schemes are put into it. Differences from the baseline are paired by document
    and corrected for the number of lengths. Beyond the window, each model is also compared with the sliding window: the
    baseline, reading half-overlapping windows of the original size.

    Example: posswap compare base=gpt2 control/model rope/model --baseline control --text books/ -o results

    Example: posswap compare llama +ntk +yarn:factor=4 --lengths 2048,4096,8192 --text books/
    """
    chosen = parse_candidates(models, max_length, baseline)
    documents_source = requested_text(text)
    with quiet_library(), telling_what_is_kept(out):
        from hf_posswap.comparison import compare as run

        evaluation = run(
            chosen,
            baseline=baseline,
            command=command_line(),
            documents=documents_source,
            tokenizer=tokenizer,
            out=out,
            settings=eval_settings(lengths, metrics, documents, trials, margin, key_spans, seed),
            column=column,
            pictures=pictures,
            reporter=progress(),
            trust_remote_code=trust_remote_code,
            **placing(device, dtype),
        )
    show_evaluation(evaluation, json)


@dataclass(frozen=True)
class ModelSpec:
    """A parsed MODEL argument.

    Attributes:
        name: the part before "=", or None.
        source: a folder or a Hub id.
        swap: "SCHEME:FIELD=VALUE,...", or "".
    """

    name: str | None
    source: str
    swap: str


def parse_candidates(models: list[str], max_length: int | None, baseline: str | None = None) -> list[Candidate]:
    """Parse MODEL arguments to candidates. Their names are checked before torch is imported.

    Args:
        models: "MODEL", "MODEL+SCHEME", "MODEL+SCHEME:FIELD=VALUE,...", or "+SCHEME..." of the first model, each with
            "NAME=" before it or without.
        max_length: tokens that the schemes should support; None: as in `Candidate`.
        baseline: name of the baseline, to be checked; None: the default baseline.

    Raises:
        CheckpointError: a folder does not exist.
        DataError: two models have the same name.
        OptionError, UnknownNameError, SchemeError: as `make_scheme`; or an argument has no model after its name, the
            first one names none, or no model is called `baseline`.

    Example:
        >>> candidates = parse_candidates(["org/llama", "+yarn:factor=4", "mine=org/other"], None)
        >>> [candidate.label for candidate in candidates]
        ['llama', 'llama+yarn:factor=4', 'mine']
    """
    from hf_posswap.comparison.names import check_names, reference_name, source_names

    arguments: list[ModelSpec] = []
    for text in models:
        arguments.append(_parse_model_argument(text, arguments[0].source if arguments else None))
    known = source_names(argument.source for argument in arguments if argument.name is None)
    names: list[str] = []
    for text, argument in zip(models, arguments, strict=True):
        plain = names[0] if text.startswith("+") and names else known.get(argument.source, "")
        names.append(argument.name or f"{plain}+{argument.swap}".rstrip("+"))
    _refuse_schemes_without_a_sign(models, arguments)
    check_names(names)
    reference_name(names, baseline)

    from hf_posswap.comparison import Candidate

    candidates = []
    for name, argument in zip(names, arguments, strict=True):
        swap = make_scheme(argument.swap) if argument.swap else None
        candidates.append(Candidate(argument.source, swap, max_length=max_length, name=name))
    return candidates


def _refuse_schemes_without_a_sign(texts: list[str], parsed_arguments: list[ModelSpec]) -> None:
    """Raise an OptionError if an argument is a scheme without +, or a field separated from its scheme."""
    suspects = [
        n
        for n, parsed in enumerate(parsed_arguments)
        if not parsed.swap and "/" not in parsed.source and not Path(parsed.source).exists()
    ]
    if not suspects:
        return
    from hf_posswap.schemes import SCHEMES

    refuse_other_ways([text for n, text in enumerate(texts) if n in suspects or parsed_arguments[n].swap])
    for n in suspects:
        if texts[n].partition(":")[0] in SCHEMES:
            raise OptionError(f"{texts[n]!r} is a scheme, and no model: write +{texts[n]} to put it in.")


def _parse_model_argument(text: str, first: str | None) -> ModelSpec:
    """Parse one argument; `first` is the source of the first argument."""
    if expand_home(text).exists():
        return ModelSpec(None, source_of(text), "")
    name, equals, rest = text.partition("=")
    if not equals or set(name) & set(_NOT_IN_NAMES):  # as in runs/a=1/model and in +yarn:factor=4
        name, rest = "", text
    elif not name.strip() or not rest:
        raise OptionError(f"{text!r}: expected NAME=MODEL, for example rope=runs/rope/model.")
    if expand_home(rest).exists():
        return ModelSpec(name or None, source_of(rest), "")
    model, plus, swap = rest.partition("+")
    if plus and not swap:
        raise OptionError(f"{text!r}: expected a scheme after +, for example +rope; posswap schemes lists them.")
    if plus and not model and not first:
        raise OptionError(f"{text!r} puts a scheme into the first model, and none is before it: write MODEL {text}.")
    return ModelSpec(name or None, first if plus and not model and first else source_of(model), swap)
