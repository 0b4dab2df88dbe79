"""Copies the figures behind `posswap advise` from the results of the studies into the package.

    python -m recipes.studies.figures            # after rerunning a study
    python -m recipes.studies.figures --check    # check that the package matches the results

Nothing is measured here: every number is in recipes/studies/results/, and each figure names its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hf_posswap.checkpoints.load import EXAMPLE
from hf_posswap.cli.outcome import script
from hf_posswap.errors import DataError
from hf_posswap.inspection.advice.candidates import CANDIDATES
from hf_posswap.inspection.advice.figures import FILE, Against, Base, Figure
from hf_posswap.patching.inspect.describe import on_meta
from hf_posswap.utils.atomic_io import read_json, write_json
from recipes.studies.measuring import difference
from recipes.studies.real_model import READERS
from recipes.studies.real_model_tables import BASE, CONTROL, SLIDING

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("recipes/studies/results")
PACKAGED = ROOT / "hf_posswap" / "inspection" / "advice" / FILE
_ADAPTED = (
    "adaptation",
    "learned-to-t5/adaptation",
    "to-alibi/adaptation",
    "rope-to-yarn/adaptation",
    "rope-to-abf/adaptation",
)
"""Results of recipes.studies.adaptation."""
_VERDICT = re.compile(
    r"^- (\w+): [^(\n]*reads (\d+)x the window [^(\n]*the sliding window of control "
    r"\(([+-][\d.]+) nats per token, 95 % interval ([+-][\d.]+) to ([+-][\d.]+)",
    re.MULTILINE,
)
"""A verdict of the quickstart's page: scheme, windows, difference and interval."""
_KINDS = {"gpt2": "learned", "llama": "rope", "bert": "encoder"}


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail where they differ.")] = False,
) -> None:
    """Write the figures, or check them."""
    figures = {"figures": [figure.to_dict() for figure in collect()]}
    if not check:
        write_json(PACKAGED, figures)
        typer.echo(f"{len(figures['figures'])} figures in {PACKAGED.relative_to(ROOT)}")
    elif read_json(PACKAGED) != figures:
        raise DataError(f"{PACKAGED.relative_to(ROOT)} does not match the results: python -m recipes.studies.figures")


def collect() -> list[Figure]:
    """Return all figures, study by study."""
    adapted = [figure for name in _ADAPTED for figure in _adaptation(name)]
    return [*adapted, *_effects(), *_untrained(), *_real_models(), *_quickstart()]


def _load_result(name: str) -> tuple[str, dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    return path.as_posix(), read_json(ROOT / path)


def _from(change: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a measured difference that a figure needs."""
    return {key: change[key] for key in ("difference", "low", "high", "documents")}


def _adaptation(name: str) -> Iterator[Figure]:
    source, result = _load_result(name)
    mechanisms = {
        candidate.recipe: mechanism for mechanism, candidates in CANDIDATES.items() for candidate in candidates
    }
    for row in result["rows"]:
        base = Base(
            result["base"]["name"], mechanisms[row["recipe"]], result["base"]["parameters"], result["base"]["window"]
        )
        windows = result["texts"]["tokens of a piece"] // base.window
        shared: dict[str, Any] = {"source": source, "subject": row["recipe"], "base": base, "tokens": result["tokens"]}
        for whose in ("base", "control"):
            fields = _from(row[f"from_sliding_{whose}"])
            yield Figure(against="sliding window", windows=windows, whose=f"{whose}'s", **fields, **shared)
        yield Figure(against="control in the window", windows=1, **_from(row["from_control"]), **shared)
        yield Figure(against="base in the window", windows=1, **_from(row["from_base"]), **shared)
        yield Figure(against="same tokens alone", windows=windows, **_from(row["far_text"]), **shared)


def _effects() -> Iterator[Figure]:
    source, result = _load_result("effects")
    for row in result["rows"]:
        if row["measure"] == "1 - cosine":  # no loss in nats
            continue
        texts, mechanism = row["texts"], _KINDS[row["base"]]
        base = Base(f"a small {row['base']}", mechanism, row["parameters"], texts["window"])
        shared: dict[str, Any] = {"source": source, "subject": row["recipe"], "base": base, "tokens": row["tokens"]}
        shared["remark"] = f"a demonstration: {row['demonstration']}" if row["demonstration"] else ""
        yield Figure(against="control in the window", windows=1, **_from(row["in_window"]), **shared)
        if "last_window" in row:
            windows = texts["tokens of a piece"] // texts["window"]
            yield Figure(against="same tokens alone", windows=windows, **_from(row["last_window"]), **shared)


def _untrained() -> Iterator[Figure]:
    source, result = _load_result("untrained")
    for block in result["bases"]:
        base = Base(block["name"], block["kind"], block["parameters"], block["window"])
        for row in block["rows"]:
            if "refused" in row:
                continue
            shared: dict[str, Any] = {"source": source, "subject": row["start"], "base": base, "tokens": 0}
            shared["windows"] = row["windows"]
            yield Figure(against="sliding window", whose="base's", **_from(row["less_sliding"]), **shared)
            yield Figure(against="base in the window", **_from(row["in_window"]), **shared)


def _real_models() -> Iterator[Figure]:
    """Yield, for each length, what a swap of a pretrained model loses in all and in the window, trained or not."""
    for name in ("beyond-16k", "beyond-32k"):
        source, result = _load_result(f"real-model/{name}")
        model = result["model"]
        base = Base(model["name"].partition(".")[0], "rope", model["parameters"], model["window"])
        books: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        for unit in result["units"]:
            books.setdefault((unit["reader"], unit.get("tokens", 0)), {})[unit["document"]] = np.array(unit["nll"])
        whole = {key: read for key, read in books.items() if len(read) == len(books[BASE, 0])}
        window = base.window // result["block"]
        swaps = {reader.name: reader for reader in READERS if reader.scheme and not reader.searched}
        for (reader_name, tokens), new in whole.items():
            if reader_name not in swaps:
                continue
            reader = swaps[reader_name]
            compared: list[tuple[Against, str, int, int | None, str]] = [
                ("sliding window", SLIDING, 0, None, "base's"),
                ("base in the window", BASE, 0, window, ""),
            ]
            if tokens:
                compared += [
                    ("sliding window", CONTROL, tokens, None, "control's"),
                    ("control in the window", CONTROL, tokens, window, ""),
                ]
            for against, other, read_by_it, blocks, whose in compared:
                if (other, read_by_it) not in whole:
                    continue
                losses, old = (
                    np.array([read[book][:blocks].mean() for book in new]) for read in (new, whole[other, read_by_it])
                )
                yield Figure(
                    source=source,
                    subject=reader.recipe or (reader.name.replace(" ", "-") if reader.options else str(reader.scheme)),
                    against=against,
                    base=base,
                    windows=result["length"] // base.window,
                    tokens=tokens,
                    whose=whose,
                    remark="LoRA" if reader.settings else "",
                    **_from(difference(old, losses)),
                )


def _quickstart() -> Iterator[Figure]:
    """Yield the quickstart page's comparison of each swap with the sliding window of its control."""
    path = RESULTS / "quickstart.md"
    page = (ROOT / path).read_text(encoding="utf-8")
    steps = re.search(r"(\d+) steps of ([\d,]+) tokens", page)
    documents = re.search(r"on (\d+) documents", page)
    verdicts = _VERDICT.findall(page)
    if steps is None or documents is None or not verdicts:
        raise DataError(f"{path} is not written as this script reads it: make the two agree.")
    shipped = on_meta(EXAMPLE)
    base = Base("the quickstart's GPT-2", "learned", shipped.num_parameters(), shipped.config.n_positions)
    for scheme, windows, apart, low, high in verdicts:
        yield Figure(
            path.as_posix(),
            {"rope": "learned-to-rope", "alibi": "to-alibi"}[scheme],
            "sliding window",
            base,
            int(windows),
            float(apart),
            float(low),
            float(high),
            int(steps[1]) * int(steps[2].replace(",", "")),
            int(documents[1]),
            whose="control's",
            remark="rates were chosen on the same documents",
        )


app = script(main)

if __name__ == "__main__":
    app()
