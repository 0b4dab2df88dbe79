"""`posswap eval`: measures one model at every length, and the effect of a swap."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.arguments import GGUFFile, Json, Model, TrustRemoteCode, make_scheme, scheme_names, source_of
from hf_posswap.cli.outcome import was_interrupted
from hf_posswap.cli.output import quiet_library, show_json, show_lines, show_text
from hf_posswap.errors import OptionError
from hf_posswap.text.stdlib import PYTHON
from hf_posswap.utils.printable import printable
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.comparison import EvalSettings, Evaluation
    from hf_posswap.utils.progress import Reporter

_ABSOLUTE = re.compile(r"([^/\\~]*=)?((?:[/~]|[A-Za-z]:\\).*?)(\+[^/\\]*)?")
Lengths = Annotated[
    str | None,
    typer.Option(metavar="N,N", help="Lengths in tokens. Default: 1, 2, 4 and 8 windows.", show_default=False),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        metavar="N",
        help="Tokens that the new scheme should support. Default: the longest measured length if it is beyond the "
        "window, else what the scheme's factor says.",
        show_default=False,
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="ppl_prefix, nll_pos, ctx_gain, short_reg, passkey, offset_probe (these by default), ppl_compat, "
        "ruler_lite, longppl, cost; for encoders mlm_pos, retrieval, vectors (these by default), pseudo_ppl.",
        show_default=False,
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        metavar="PATH_OR_ID",
        help="Text to measure on: files, folders of them, .jsonl or .parquet, a folder of Dataset.save_to_disk, or a "
        "data set on the Hub as org/name or org/name:split. Repeatable. python: the sources and documentation of this "
        "Python installation, their held-out part.",
        show_default=False,
    ),
]
Column = Annotated[str, typer.Option(metavar="NAME", help="The text column of .jsonl and .parquet files.")]
Documents = Annotated[int, typer.Option(metavar="N", help="Maximum number of documents.")]
Trials = Annotated[
    int, typer.Option(metavar="N", help="Passkeys for each length and depth, prompts for each task and length.")
]
Margin = Annotated[float, typer.Option(metavar="NATS", help="Loss per token that the short-context verdict tolerates.")]
KeySpans = Annotated[Path | None, typer.Option(metavar="FILE", help="Key tokens for longppl, from posswap key-spans.")]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="PATH_OR_ID", help="Default: the model's tokenizer.", show_default=False)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="float32, bfloat16, ... Default: float32 on a CPU.", show_default=False),
]
Seed = Annotated[int, typer.Option(help="Random seed of needles, bootstraps and permutations.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="For results.json, tables, pictures, and finished units, from which the same command resumes.",
        show_default=False,
    ),
]
Pictures = Annotated[bool, typer.Option(help="Draw pictures into DIR; they need the extra 'plot'.")]


def evaluate(
    model: Model,
    scheme: Annotated[
        str | None,
        typer.Argument(
            metavar="SCHEME",
            help="Put this one in first, without training: yarn, or yarn:factor=4,base=500000.",
            show_default=False,
            autocompletion=scheme_names,
        ),
    ] = None,
    max_length: MaxLength = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", "--base", metavar="MODEL", help="Compare MODEL with this one.", show_default=False),
    ] = None,
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
    gguf_file: GGUFFile = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Measure a model at every length: perplexity, use of context, needles, and the cost of a swap.

    With SCHEME the model is measured with and without the scheme, on the same tokens. Every number comes with its
    uncertainty, and there is no verdict if there is too little text. Ctrl-C keeps finished units in DIR; the same
    command resumes from them.

    Example: posswap eval gpt2-rope --baseline gpt2 --text books/ -o results
    """
    if scheme is None and max_length is not None:
        raise OptionError("--max-length says how to put in a scheme: name one after MODEL.")
    source, base_source = source_of(model, gguf_file), None if baseline is None else source_of(baseline)
    chosen = None if scheme is None else make_scheme(scheme)
    documents_source = requested_text(text)
    with quiet_library(), telling_what_is_kept(out):
        from hf_posswap.comparison import Candidate, compare

        settings = eval_settings(lengths, metrics, documents, trials, margin, key_spans, seed)
        first = [Candidate(base_source or source, name="base")] if base_source or chosen else []
        evaluation = compare(
            [*first, Candidate(source, chosen, max_length=max_length)],
            documents=documents_source,
            tokenizer=tokenizer,
            out=out,
            settings=settings,
            column=column,
            pictures=pictures,
            reporter=progress(),
            trust_remote_code=trust_remote_code,
            command=command_line(),
            **placing(device, dtype),
        )
    show_evaluation(evaluation, json)


@contextmanager
def telling_what_is_kept(out: Path | None) -> Iterator[None]:
    """After Ctrl-C inside the block, print on stderr what is kept and how to resume, on the main process.

    Args:
        out: the folder of --out; None: there is none.
    """
    try:
        yield
    except BaseException as error:
        if (isinstance(error, KeyboardInterrupt) or was_interrupted()) and os.environ.get("RANK", "0") == "0":
            typer.echo(printable(_kept_note(None if out is None else expand_home(out))), err=True)
        raise


def _kept_note(folder: Path | None) -> str:
    from hf_posswap.evaluation.store import units_in

    if folder is None:
        return (
            "Interrupted: nothing is kept, because --out DIR was not given. With it, finished units are kept there, "
            "and the same command resumes from them."
        )
    count = units_in(folder)
    if not count:
        return "Interrupted: no unit was finished yet, and the same command starts again."
    return f"Interrupted. {count} finished units are kept in {folder}: the same command resumes from them."


def requested_text(text: list[Path] | None) -> list[Path] | str:
    """Return the paths that --text names, or "python" for Python's own text.

    Raises:
        OptionError: no text is given, or `python` and others.
    """
    if not text:
        raise OptionError(
            f"there is no text to measure on: give --text books/ (files or folders, or org/name of a data set on the "
            f"Hub). --text {PYTHON} measures on the sources and documentation of this Python installation."
        )
    if Path(PYTHON) not in text:
        return text
    if len(text) > 1:
        raise OptionError(f"--text {PYTHON} goes alone: measure on other texts in a second run, or give ./{PYTHON}.")
    return PYTHON


def eval_settings(
    lengths: str | None,
    metrics: str | None,
    documents: int,
    trials: int,
    margin: float,
    key_spans: Path | None,
    seed: int,
) -> EvalSettings:
    """Return the settings that the shared options describe.

    Raises:
        OptionError, UnknownNameError: a value is invalid.
    """
    from hf_posswap.comparison import EvalSettings

    return EvalSettings(
        lengths=whole_numbers(lengths),
        metrics=None if metrics is None else tuple(name.strip() for name in metrics.split(",")),
        documents=documents,
        trials=trials,
        margin=margin,
        key_spans=key_spans,
        seed=seed,
    )


def whole_numbers(text: str | None) -> tuple[int, ...] | None:
    """Parse the value of --lengths, "512,1024"; None if the option is missing.

    Raises:
        OptionError: no whole numbers.
    """
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise OptionError(f"--lengths are whole numbers with commas, such as 512,1024; got {text!r}.") from None


def placing(device: str, dtype: str | None) -> dict[str, Any]:
    """Return the device and dtype arguments of `compare`.

    Raises:
        OptionError: no such device or precision.
    """
    import torch

    from hf_posswap.utils.devices import resolve_device

    precision = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(precision, torch.dtype):
        raise OptionError(f"--dtype {dtype}: expected a precision of torch, such as float32 or bfloat16.")
    return {"device": resolve_device(device), "dtype": precision}


def progress() -> Reporter:
    """Return a progress reporter on stderr, which keeps stdout clean."""
    from rich.console import Console

    from hf_posswap.utils.progress import Reporter

    return Reporter(Console(file=sys.stderr, markup=False, emoji=False, highlight=False))


def command_line() -> str:
    """Return the running command; absolute paths, which may name a user, become relative or just the last component."""
    return shlex.join(["posswap", *map(_public_word, sys.argv[1:])])


def _public_word(word: str) -> str:
    """Return one word of a command without the leading folders of an absolute path, also in NAME=PATH+SCHEME.

    Example:
        >>> _public_word("base=/home/me/gpt2+yarn:factor=4"), _public_word("lr=3/model")
        ('base=gpt2+yarn:factor=4', 'lr=3/model')
    """
    from hf_posswap.utils.format import public_name

    match = _ABSOLUTE.fullmatch(word)
    if match is None:
        return word
    head, path, swap = match.groups("")
    location = Path(path)
    below = location.is_absolute() and location != Path.cwd() and location.is_relative_to(Path.cwd())
    return f"{head}{location.relative_to(Path.cwd()) if below else public_name(path)}{swap}"


def show_evaluation(evaluation: Evaluation, json: bool) -> None:
    """Print all results as JSON, or the main ones as Markdown, on the main process only."""
    from hf_posswap.comparison import is_main_process

    if not is_main_process():
        return
    if json:
        show_json(evaluation.results)
        return
    show_lines(str(evaluation).rstrip())
    if evaluation.folder is not None:
        show_text("", f"All of it is in {evaluation.folder}.")
