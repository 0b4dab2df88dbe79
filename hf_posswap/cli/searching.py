"""`posswap search`: LongRoPE's divisors for one model, on your texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.arguments import Json, Model, TrustRemoteCode, source_of
from hf_posswap.cli.evaluating import Column, progress
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_text
from hf_posswap.cli.target import checked_file, load_tokenizer
from hf_posswap.errors import CheckpointError, DataError, OptionError
from hf_posswap.utils.atomic_io import writable_folder, write_json
from hf_posswap.utils.user_paths import real_path

if TYPE_CHECKING:
    from hf_posswap import LongRopeSearch

_TOKENIZER_ADVICE = "save one in the model's folder"


def search(
    model: Model,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TEXT...]",
            help="The same as --text, without the option.",
            hidden=True,
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="PATH",
            help="Texts to search on: files, folders of them, .jsonl or .parquet. Each text is at least --factor times "
            "as long as the model's window. Repeatable.",
            show_default=False,
        ),
    ] = None,
    column: Column = "text",
    *,
    factor: Annotated[
        float, typer.Option("--factor", metavar="X", help="Target length over original length.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE.json", help="Where to write the scheme.", show_default=False),
    ],
    population: Annotated[int, typer.Option(metavar="N", help="Candidates of the first population.")] = 64,
    iterations: Annotated[int, typer.Option(metavar="N", help="After the first population.")] = 40,
    native: Annotated[
        bool, typer.Option("--native", help="Search only what stock transformers can run: no n-hat.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Saves the search state; the same command resumes from it.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.json.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Search LongRoPE's divisors for a model: an evolution from PI, NTK and YaRN, by perplexity on your texts.

    The best scheme is written to FILE.json, which posswap patch and posswap explain accept instead of a scheme's name.
    On these texts it is never worse than linear, ntk and yarn. The defaults read every text 1344 times.

    Example: posswap search my-llama --text books/ --factor 4 --state search.json -o longrope.json
    """
    source = source_of(model)
    target = _checked_file(out, overwrite)
    if state is not None:
        checked_file(state, "--state")
    contents = _contents([*(texts or ()), *(text or ())], column)
    with quiet_library():
        import hf_posswap
        from hf_posswap.training.search.candidates import SearchSettings
        from hf_posswap.utils.devices import resolve_device

        SearchSettings(factor, population, iterations, mutation_rate=0.3, seed=seed)  # raises if a value is invalid
        chosen = resolve_device(device)
        tokenizer = load_tokenizer(source, instead=_TOKENIZER_ADVICE, trust_remote_code=trust_remote_code)
        if tokenizer is None:
            raise CheckpointError(f"{model} holds no tokenizer to read texts with; {_TOKENIZER_ADVICE}.")
        loaded: Any = hf_posswap.load(source, dtype="auto", trust_remote_code=trust_remote_code)
        result = hf_posswap.search_longrope(
            loaded.to(chosen),
            contents,
            factor,
            tokenizer=tokenizer,
            population=population,
            iterations=iterations,
            original_positions=[0] if native else None,
            state=state,
            seed=seed,
            reporter=progress(),
        )
        write_json(target, result.scheme.to_dict())
    if json:
        show_json({**result.to_dict(), "saved": str(target)})
        return
    _show(result)
    show_text("", f"Saved to {target}. Put it in with: posswap patch {model} {out} -o DIR")


def _show(result: LongRopeSearch) -> None:
    seeds = ", ".join(f"{name} {perplexity:.4g}" for name, perplexity in result.seeds.items())
    show_pairs(
        [
            ("perplexity", f"{result.perplexity:.4g} on {result.documents} texts of {result.length} tokens"),
            ("began with", seeds),
            ("evaluations", f"{result.evaluations[-1]} in {len(result.log) - 1} iterations"),
            ("n-hat", str(result.scheme.original_positions)),
            ("divisors", ", ".join(f"{divisor:.4g}" for divisor in result.scheme.filled("long_factor"))),
            ("attention", f"cos and sin times {result.scheme.filled('attention_factor'):.4g}"),
        ]
    )


def _checked_file(out: Path, overwrite: bool) -> Path:
    """Return `out` as an absolute path, after checking that it can be written."""
    path = real_path(out)
    if path.suffix != ".json":
        raise CheckpointError(f"--out {out} must end in .json, by which posswap patch knows a scheme's file.")
    if path.exists() and not (overwrite and path.is_file()):
        raise CheckpointError(f"--out {out} exists; give another file, or --overwrite to replace it.")
    writable_folder(path.parent, path)
    return path


def _contents(paths: list[Path], column: str) -> list[str]:
    """Return the texts in files and folders, as `posswap eval` reads them.

    Raises:
        OptionError: there is no path.
        DataError: a path cannot be read, or is a data set on the Hub, which has no known length.
    """
    from hf_posswap.text.documents import file_documents, files_below, hub_text

    if not paths:
        raise OptionError("give texts to search on: --text books/.")
    streamed = [str(path) for path in paths if hub_text(path) is not None]
    if streamed:
        raise DataError(f"{', '.join(streamed)}: give files or folders; a data set on the Hub has no end to search on.")
    files = [file for path in paths for file in files_below(path)]
    texts = [document.text for file in files for document in file_documents(file, column)]
    if not texts:
        raise DataError(f"{', '.join(map(str, paths))}: there is no text to search on.")
    return texts
