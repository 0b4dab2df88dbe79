"""The value of a longer window without training: untrained swaps compared with the sliding window.

    python recipes/pretrain.py llama my-llama --text books/
    python -m recipes.studies.untrained --base my-llama --valid other-books/ --out results
    python -m recipes.studies.untrained --base my-gpt2 --fit books/ --valid other-books/ --out results

The base is a folder with a causal model of learned positions or RoPE, or a run of recipes/pretrain.py. It is swapped to
each scheme for 2, 4 and 8 windows, which are read at once. The baseline needs no swap: the base reads the same tokens
by half-overlapping windows of its length. Schemes for a learned table are fitted to it if possible, on separate
texts. Nothing is trained. Rows of other bases in the results are kept, and the same command resumes an interrupted run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import read_documents
from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.errors import UnknownNameError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.evaluation import RunStore, measure_losses, reach_of, sliding_losses
from hf_posswap.text.stdlib import python_corpus
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import read_json, write_json, write_text
from recipes.studies.measuring import INTERVALS, MULTIPLES, Texts, difference
from recipes.studies.running import versions, work_folder
from recipes.studies.untrained_table import markdown

NAME = "untrained"
FITTED_DOCUMENTS, FITTED_WINDOWS = 12, 4
"""Documents to fit schemes to, and windows of each."""
BEYOND = MULTIPLES[1:]


@dataclass(frozen=True)
class Start:
    """One way to read beyond the window without training.

    Attributes:
        name: of its rows.
        scheme: its name; None: the unswapped base.
        options: fields of the scheme.
        scaled: whether it has a factor, set by the length.
        fit: whether the table is centred and the scheme fitted to it.
    """

    name: str
    scheme: str | None
    options: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False
    fit: bool = False


STARTS: dict[str, tuple[Start, ...]] = {
    "rope": (
        Start("as it is", None),
        *(Start(name, name, scaled=True) for name in ("linear", "ntk", "ntk_by_parts", "yarn", "dynamic")),
        *(Start(name, name) for name in ("self_extend", "rerope", "dual_chunk", "nope")),
    ),
    "learned": (
        Start("learned, tiled", "learned", {"extend": "tile"}),
        Start("sinusoidal, ridge 100", "sinusoidal", {"ridge": 100.0}),
        Start("nope, table centred", "nope"),
        *(Start(f"{name}, fitted", name, fit=True) for name in ("alibi", "t5")),
        Start("rope, fitted", "rope", {"partial": 0.5}, fit=True),
    ),
}
"""By the base's position mechanism."""


def main(
    base: Annotated[Path, typer.Option(help="A folder with a model, or of recipes/pretrain.py.")],
    out: Annotated[Path, typer.Option(help="The folder for JSON and table.")],
    name: Annotated[str | None, typer.Option(help="Of the base in the results; otherwise its folder's.")] = None,
    fit: Annotated[list[Path] | None, typer.Option(help="Texts to fit to; Python's own otherwise.")] = None,
    valid: Annotated[list[Path] | None, typer.Option(help="Texts to measure on; Python's own otherwise.")] = None,
    documents: Annotated[int, typer.Option(help="Most documents to measure on.")] = 40,
    only: Annotated[list[str] | None, typer.Option(help="Of the starts, by name; otherwise all.")] = None,
    work: Annotated[Path | None, typer.Option(help="For what was measured; the user's cache otherwise.")] = None,
) -> None:
    """Measure every start on one base, and write all rows."""
    work_dir = work_folder(work)
    folder = base if (base / "config.json").is_file() else base / "model"
    tokenizer = load_tokenizer(folder, instead="save it with the model")
    window = reach_of(hf_posswap.load(folder)).window
    corpus = read_documents(valid, tokenizer, length=MULTIPLES[-1] * window, limit=documents)
    texts = Texts(corpus, window, tokenizer)
    other = [document.text for document in python_corpus().train] if fit is None else fit
    fitted_to = read_documents(other, tokenizer, length=FITTED_WINDOWS * window, limit=FITTED_DOCUMENTS)
    with RunStore(work_dir / "measured" / texts.documents.to_dict()["digest"][:10]) as store:
        block = measure_base(folder, texts, fitted_to.tokens.reshape(-1, window), store, only)
    source_text = ", ".join(path.name for path in valid or ()) or corpus.source
    block_entry = {"name": name or base.resolve().name, **block, "texts": texts.to_dict() | {"source": source_text}}
    block_entry |= {"protocol": corpus.said, "intervals": INTERVALS, "versions": versions()}
    text_options = f"{'--fit $OTHER ' if fit else ''}{'--valid $TEXT ' if valid else ''}"
    only_options = "".join(f"--only {shlex.quote(start_name)} " for start_name in only or ())
    sizes = f"--documents {documents} {only_options}--out results"
    block_entry["command"] = f"python -m recipes.studies.untrained --base $BASE {text_options}{sizes}"
    result = _with_base(out / f"{NAME}.json", block_entry)
    write_json(out / f"{NAME}.json", result)
    write_text(out / f"{NAME}.md", markdown(result))
    typer.echo(markdown(result))


def measure_base(
    folder: Path, texts: Texts, fitted_to: np.ndarray, store: RunStore, only: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the measurements of the base in `folder`.

    Args:
        folder: of the base.
        texts: to read.
        fitted_to: windows to fit schemes to, [rows, window].
        store: of what was measured.
        only: names of starts; None: all of the base's kind.

    Raises:
        UnknownNameError: no such start.
        UnsupportedModelError: as `kind_of`.
    """
    model = hf_posswap.load(folder).eval()
    mechanism = kind_of(model)
    names = [start.name for start in STARTS[mechanism]]
    for name in only or ():
        if name not in names:
            raise UnknownNameError("start", name, names)
    sliding = _value(
        store, "sliding", model, texts, lambda: sliding_losses(model, texts.cut(texts.longest), texts.window)
    )
    inside = _losses(model, texts, texts.window, store)
    rows = []
    for start in (start for start in STARTS[mechanism] if not only or start.name in only):
        for multiple in BEYOND:
            length = multiple * texts.window
            swapped, reason = _swapped(start, folder, length, fitted_to)
            row: dict[str, Any] = {"start": start.name, "scheme": start.scheme, "windows": multiple}
            if swapped is None:
                rows.append(row | {"refused": reason})
                continue
            losses = _losses(swapped, texts, length, store)
            row["nll"] = float(losses.mean())
            row["less_sliding"] = difference(sliding[:, : length - 1].mean(axis=1), losses.mean(axis=1))
            row["in_window"] = difference(
                inside.mean(axis=1), _losses(swapped, texts, texts.window, store).mean(axis=1)
            )
            rows.append(row)
    return {
        "kind": mechanism,
        "parameters": model.num_parameters(),
        "window": texts.window,
        "nll": float(inside.mean()),
        "sliding": {str(m): float(sliding[:, : m * texts.window - 1].mean()) for m in BEYOND},
        "rows": rows,
    }


def kind_of(model: Any) -> str:
    """Return the base's position mechanism: "learned" or "rope".

    Raises:
        UnsupportedModelError: neither, or it is not a causal model.
    """
    report = hf_posswap.describe_positions(model)
    mechanism = "rope" if report.sites["rotary"] != "-" else "learned" if report.native.startswith("learned") else None
    if mechanism is None or not report.geometry.causal:
        raise UnsupportedModelError(f"the study is of causal models with RoPE or a learned table, got {report.native}.")
    return mechanism


def _swapped(start: Start, folder: Path, length: int, fitted_to: np.ndarray) -> tuple[Any, str | None]:
    """Return the base swapped to `start` for `length` tokens; or None, and why the swap was refused."""
    model = hf_posswap.load(folder).eval()
    if start.scheme is None:
        return model, None
    if start.fit or start.name.endswith("centred"):
        hf_posswap.centre_table(model)
    scheme: Any = start.scheme
    try:
        if start.fit and scheme != "rope":
            scheme = hf_posswap.fit_bias(model, scheme, fitted_to)
        options = start.options | ({"factor": length / reach_of(model).window} if start.scaled else {})
        hf_posswap.patch_model(model, scheme, max_length=length, **options)
        if start.fit and scheme == "rope":
            hf_posswap.fit_rotation(model, fitted_to)
    except UnsupportedSwapError as error:
        return None, str(error)
    return model.eval(), None


def _losses(model: Any, texts: Texts, length: int, store: RunStore) -> np.ndarray:
    """Return the losses of the first `length` tokens of each piece, read at once, [rows, length - 1]."""

    def measure() -> np.ndarray:
        return measure_losses(model, texts.cut(texts.longest)[:, :length], [length], one_pass=True)[length]

    return _value(store, f"first {length}", model, texts, measure)


def _value(store: RunStore, quantity: str, model: Any, texts: Texts, measure: Any) -> np.ndarray:
    key = {"what": quantity, "study": NAME, "model": fingerprint(model), "texts": texts.to_dict()}
    return np.asarray(store.value(key, lambda: measure().astype(np.float64)))


def _with_base(path: Path, block: dict[str, Any]) -> dict[str, Any]:
    """Return the results at `path` with `block` added; each base keeps its versions and its method for intervals."""
    previous = read_json(path) if path.is_file() else {"bases": []}
    shared = {key: previous[key] for key in ("intervals", "versions") if key in previous}  # of an older file
    bases = {base["name"]: shared | base for base in previous["bases"]}
    return {"study": NAME, "bases": list((bases | {block["name"]: block}).values())}


app = script(main)

if __name__ == "__main__":
    app()
