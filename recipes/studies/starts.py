"""The loss of a swapped learned table before any training, in the window and beyond, compared with the base.

    python recipes/pretrain.py gpt2 my-gpt2 --text books/
    python -m recipes.studies.starts --base my-gpt2 --fit books/ --valid other-books/ --out results

The base is a folder with a model of learned positions, or a run of recipes/pretrain.py. Its table is replaced by a
tiled table, by sinusoids at the table's scale, by sinusoids ridge-fitted to it with several penalties, and by biases,
unfitted and fitted to its attention scores on separate texts: from one slope a head to any function of distance, the
closest to the scores that a bias of distance can be. All read the same tokens: single windows of the original length,
and 1, 2, 4 and 8 windows at once. Nothing is trained. The same command resumes an interrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import EvalDocuments, read_documents
from hf_posswap.errors import SchemeError
from hf_posswap.evaluation import RunStore, reach_of
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import write_json, write_text
from hf_posswap.utils.format import interval_text
from recipes.studies.measuring import (
    INTERVALS,
    LAST,
    LAST_ALONE,
    MULTIPLES,
    WINDOW,
    Means,
    Texts,
    difference,
    document_means,
    intervals_said,
)
from recipes.studies.running import versions, work_folder
from recipes.studies.shapes import BentAlibi, registered

NAME = "starts"
FITTED_DOCUMENTS, FITTED_WINDOWS = 12, 4
"""Documents that a bias is fitted to, and windows of each."""
PENALTIES = (0.1, 1.0, 10.0, 100.0, 300.0, 1000.0)
ANY = "t5, a bucket a distance"
"""A bias that is any function of distance, in windows of up to 256 tokens."""


@dataclass(frozen=True)
class Start:
    """One replacement of the base's table.

    Attributes:
        name: of its row.
        scheme: of the table.
        options: fields of the scheme.
        centre: whether the mean of the rows moves into the token embeddings first.
        fit: whether its bias is fitted.
    """

    name: str
    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    centre: bool = False
    fit: bool = False


STARTS = (
    Start("learned, tiled", "learned", {"extend": "tile"}),
    Start("sinusoidal, scaled", "sinusoidal"),
    Start("sinusoidal, scaled, table centred", "sinusoidal", centre=True),
    *(Start(f"sinusoidal, ridge {penalty:g}", "sinusoidal", {"ridge": penalty}) for penalty in PENALTIES),
    *(
        Start(f"{scheme}, {'fitted' if fit else 'as it is'}, table centred", scheme, centre=True, fit=fit)
        for scheme in ("alibi", "t5")
        for fit in (False, True)
    ),
    *(
        Start(f"{name}, fitted, table centred", scheme, options, centre=True, fit=True)
        for name, scheme, options in (
            ("kerple, a power", "kerple", {"variant": "power"}),
            ("kerple, a logarithm", "kerple", {}),
            ("alibi and 2 constants", BentAlibi.name, {"near": 2}),
            ("alibi and 4 constants", BentAlibi.name, {"near": 4}),
            ("alibi, two slopes", BentAlibi.name, {"corners": (32,)}),
            ("alibi, four slopes", BentAlibi.name, {"corners": (4, 16, 64)}),
            ("alibi, four slopes and 2 constants", BentAlibi.name, {"corners": (4, 16, 64), "near": 2}),
            (ANY, "t5", {"num_buckets": 512, "max_distance": 257}),
            ("fire", "fire", {}),
            ("alibi + alibi", "sum", {"terms": ("alibi", "alibi")}),
        )
    ),
)
PLAIN = "sinusoidal, scaled, table centred"
"""What the fits are compared with beyond the window."""


def main(
    base: Annotated[Path, typer.Option(help="A folder with a model of learned positions, or of recipes/pretrain.py.")],
    out: Annotated[Path, typer.Option(help="The folder for JSON and table.")],
    fit: Annotated[list[Path] | None, typer.Option(help="Texts to fit biases to; Python's own otherwise.")] = None,
    valid: Annotated[list[Path] | None, typer.Option(help="Texts to measure on; Python's own otherwise.")] = None,
    pieces: Annotated[int, typer.Option(help="Of 8 windows each, from the start of every document on.")] = 1,
    documents: Annotated[int, typer.Option(help="Most documents to measure on.")] = 16,
    work: Annotated[Path | None, typer.Option(help="For what was measured; the user's cache otherwise.")] = None,
) -> None:
    """Measure the base and every start, and write the table."""
    work_dir = work_folder(work)
    folder = base if (base / "config.json").is_file() else base / "model"
    tokenizer = load_tokenizer(folder, instead="save it with the model")
    model = hf_posswap.load(folder).eval()
    window = reach_of(model).window
    corpus = read_documents(valid, tokenizer, length=pieces * MULTIPLES[-1] * window, limit=documents)
    texts = Texts(corpus, window, tokenizer)
    other = [document.text for document in python_corpus().train] if fit is None else fit
    fitted_to = read_documents(other, tokenizer, length=FITTED_WINDOWS * window, limit=FITTED_DOCUMENTS)
    with RunStore(work_dir / "measured" / texts.documents.to_dict()["digest"][:10]) as store, registered():
        base_means = document_means(model, texts, store)
        measured = [(start, *_measure(start, folder, texts, store, fitted_to)) for start in STARTS]
    result = {
        "study": NAME,
        "intervals": INTERVALS,
        "versions": versions(),
        "base": {"parameters": model.num_parameters(), "window": window, "nll": float(base_means[WINDOW].mean())},
        "texts": texts.to_dict() | {"source": ", ".join(path.name for path in valid or ()) or corpus.source},
        "fit": {
            "source": ", ".join(path.name for path in fit or ()) or "Python's own",
            "documents": len(fitted_to.names),
            "digest": fitted_to.to_dict()["digest"],
            "tokens of a document": FITTED_WINDOWS * window,
        },
        "command": "python -m recipes.studies.starts --base $BASE "
        + ("--fit $OTHER " if fit else "")
        + (f"--valid $TEXT --pieces {pieces} " if valid else f"--pieces {pieces} ")
        + f"--documents {documents} --out results",
        "rows": rows_of(base_means, measured),
    }
    write_json(out / f"{NAME}.json", result)
    write_text(out / f"{NAME}.md", markdown(result))
    typer.echo(markdown(result))


def _measure(
    start: Start, folder: Path, texts: Texts, store: RunStore, fitted_to: EvalDocuments
) -> tuple[dict[str, Any], Means | str]:
    """Return the scheme after the swap and its loss on each document; or why the swap was refused."""
    model = hf_posswap.load(folder).eval()
    if start.centre:
        hf_posswap.centre_table(model)
    chosen: Any = {"name": start.scheme, **start.options}
    try:
        if start.fit:
            chosen = hf_posswap.fit_bias(model, chosen, fitted_to.tokens.reshape(-1, texts.window))
        hf_posswap.patch_model(model, chosen, max_length=texts.longest)
    except SchemeError as error:
        return {}, str(error)
    return hf_posswap.swap_plan(model).scheme.to_dict(), document_means(model, texts, store)


def rows_of(base: Means, measured: Sequence[tuple[Start, dict[str, Any], Means | str]]) -> list[dict[str, Any]]:
    """Return a row per start: its losses, compared with the base in the window and with plain sinusoids beyond.

    Args:
        base: means of documents of the unswapped model.
        measured: of each start, its scheme and its means of documents, or why it was refused.
    """
    plain = next(means for start, _, means in measured if start.name == PLAIN)
    rows: list[dict[str, Any]] = []
    for start, scheme, means in measured:
        row: dict[str, Any] = {"start": start.name, "scheme": scheme}
        if isinstance(means, str):
            rows.append(row | {"refused": means})
            continue
        assert not isinstance(plain, str)
        row["in_window"] = {"nll": float(means[WINDOW].mean()), **difference(base[WINDOW], means[WINDOW])}
        row["lengths"] = [
            {"windows": m, "nll": float(means[str(m)].mean()), "less_plain": difference(plain[str(m)], means[str(m)])}
            for m in MULTIPLES
        ]
        rows.append(row | {"last_window": difference(means[LAST_ALONE], means[LAST])})
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    base, texts, fit, installed = result["base"], result["texts"], result["fit"], result["versions"]
    head = ["start", "residual", "growth", "in the window", "less the base"]
    head += [f"{m}x" for m in MULTIPLES] + [f"{MULTIPLES[-1]}x less plain", "8th window"]
    return "\n".join(
        [
            "# Where a swap of a learned table starts",
            "",
            f"A GPT-2 of {base['parameters'] / 1e6:.1f} M parameters and {base['window']} positions, not trained after "
            f"the swap; the base's loss in the window is {base['nll']:.4f} nats/token. Measured on "
            f"{texts['documents']} documents ({texts['source']}), {texts['pieces of a document']} x "
            f"{texts['tokens of a piece']} tokens each; torch {installed['torch']}, "
            f"transformers {installed['transformers']}. Brackets: paired intervals. "
            f"{intervals_said(result)}",
            "",
            "- Residual: of a ridge fit, relative to the table's spread. Growth: the largest norm of a row beyond the "
            "window, relative to the largest inside.",
            f"- Fitted: to attention scores on {fit['documents']} other documents ({fit['source']}), "
            f"{fit['tokens of a document']} tokens each.",
            f"- {ANY}: any function of distance for each layer and head, of all biases of distance the closest to the "
            "scores. What it loses needs positions that depend on the content, or training. Closest to the scores is "
            "not least in loss: a smoother bias may lose less.",
            "- Constants: at distance 0, 1 and so on. Slopes: they change at 32 tokens, or at 4, 16 and 64.",
            f"- 1x to 8x: number of windows read at once. Plain: {PLAIN}.",
            "- 8th window: the loss of its tokens after seven windows of context, less their loss alone; above 0, "
            "length harms.",
            "",
            _line(head),
            _line(["---"] * len(head)),
            *(_line(_cells(row)) for row in result["rows"]),
            "",
            f"    {result['command']}",
            "",
        ]
    )


def _cells(row: dict[str, Any]) -> list[str]:
    if "refused" in row:
        return [row["start"], f"refused: {row['refused']}", *[""] * (len(MULTIPLES) + 5)]
    fit = [row["scheme"].get(name) for name in ("residual", "growth")]
    inside, lengths = row["in_window"], row["lengths"]
    return [
        row["start"],
        *("–" if value is None else f"{value:.2f}" for value in fit),
        f"{inside['nll']:.4f}",
        _interval(inside),
        *(f"{cell['nll']:.4f}" for cell in lengths),
        _interval(lengths[-1]["less_plain"]),
        _interval(row["last_window"]),
    ]


def _interval(change: dict[str, Any]) -> str:
    return f"{change['difference']:+.4f} [{interval_text(change, '+.4f', ', ')}]"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


app = script(main)

if __name__ == "__main__":
    app()
