"""One vector for a long text: does it retrieve text from deep inside, and is it better than truncating the text?

    python -m recipes.studies.encoders --base my-encoder --out results
    python -m recipes.studies.encoders --base my-encoder --size gpu --valid books/ --out results

The base is a folder with an encoder of learned positions, such as all-MiniLM-L6-v2. Its table is tiled, interpolated
and extended by the hierarchical rule, without training. RoPE and ALiBi replace it, fitted to it, and are distilled to
the base's own vectors within its window by the recipe `embedding`, for each seed. The model distilled with RoPE is also
read with NTK-aware scaling, as in LongEmbed (https://arxiv.org/abs/2404.12096). Three baselines need no swap: the base
on the text truncated to its window, the mean of its vectors of all windows, and the nearest of these vectors, which
needs one vector per window.

There are two tasks, at 1, 2, 4 and 8 windows: passkeys in filler, and passages removed from real text (Python's
held-out text, or --valid). Each document has one question from each eighth of it. The scores are recall at 1 and 10 and
nDCG at 10, with 95 % intervals over documents; a document's score is the mean over seeds, and differences are paired.

The same command resumes an interrupted run, and trains and reads only what changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import read_documents
from hf_posswap.errors import OptionError, UnknownNameError, UnsupportedModelError
from hf_posswap.evaluation import reach_of
from hf_posswap.evaluation.masked import special_frame
from hf_posswap.evaluation.retrieval import Pooling
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import write_json, write_text
from recipes.studies.encoders_reading import Bench, ReadingMethod
from recipes.studies.encoders_scores import (
    CUT,
    INTERPOLATED,
    MEAN,
    NTK,
    ROPE,
    TaskResult,
    cells_of,
    near_the_base,
    verdicts,
)
from recipes.studies.encoders_table import markdown
from recipes.studies.long_texts import Task, needed, passages, passkeys
from recipes.studies.measuring import INTERVALS, MULTIPLES
from recipes.studies.pictures import draw_ways
from recipes.studies.running import (
    RECIPES,
    Run,
    make_run,
    source_settings,
    study_command,
    tokens_of,
    versions,
    work_folder,
)

T = TypeVar("T")
NAME = "encoders"
QUESTIONS = 8
"""Questions per document: at 8 windows, one of them is answered within the first window."""
_WARMUP = 0.1
_ROPE = {"partial": 0.5}
"""Only the dimensions that are not rotated can be fitted."""
POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "last": "last"}
DISTILLED: dict[str, dict[str, Any]] = {"rope": _ROPE, "alibi": {}}
WAYS = (
    ReadingMethod(CUT, "cut"),
    ReadingMethod(MEAN, "mean of windows"),
    ReadingMethod("nearest window", "nearest window"),
    ReadingMethod("table, tiled", scheme="learned", options={"extend": "tile"}),
    ReadingMethod(INTERPOLATED, scheme="learned", options={"extend": "interpolate"}),
    ReadingMethod("table, hierarchical", scheme="learned", options={"extend": "hierarchical"}),
    ReadingMethod(ROPE, scheme="rope", options=_ROPE, trained="rope"),
    ReadingMethod(NTK, scheme="ntk", options=_ROPE | {"factor": float(MULTIPLES[-1])}, trained="rope"),
    ReadingMethod("alibi, distilled", scheme="alibi", trained="alibi"),
)


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        documents: most of each task.
        steps: of a distillation.
        batch: texts of a step, each as long as the base's window.
        rate: learning rate.
        fit: texts that a scheme is fitted to before it is trained.
        seeds: trainings of each scheme, from seed 0 on.
        device: that reads; training takes what there is.
    """

    documents: int
    steps: int
    batch: int
    rate: float
    fit: int
    seeds: int
    device: str


SIZES = {
    "cpu": Size(documents=8, steps=32, batch=2, rate=2e-4, fit=6, seeds=2, device="cpu"),
    "gpu": Size(documents=32, steps=1000, batch=32, rate=1e-4, fit=32, seeds=3, device="cuda"),
}


def main(
    context: typer.Context,
    base: Annotated[Path, typer.Option(help="A folder with an encoder of learned positions.")],
    out: Annotated[Path, typer.Option(help="The folder for JSON, table and picture.")],
    size: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu",
    train: Annotated[list[str] | None, typer.Option(help="As data.sources[].path; Python's own otherwise.")] = None,
    valid: Annotated[list[Path] | None, typer.Option(help="Texts to find; Python's own otherwise.")] = None,
    pooling: Annotated[str, typer.Option(help="Of the base: mean, cls or last.")] = "mean",
    documents: Annotated[int | None, typer.Option(min=2, max=35, help="Of each task; otherwise by size.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Ways to measure, by name; otherwise all.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the distillation.")] = None,
    work: Annotated[Path | None, typer.Option(help="The folder for trainings; in the user's cache otherwise.")] = None,
) -> None:
    """Distil, read long texts by every method, and report retrieval scores."""
    sizes, pooled = _named("size", size, SIZES), _named("pooling", pooling, POOLINGS)
    sizes = dataclasses.replace(sizes, documents=documents or sizes.documents)
    if sizes.device == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"--size {size} reads on a GPU, and torch finds none here: use --size cpu.")
    ways = _ways(only)
    work_dir = work_folder(work)
    folder = base.expanduser().resolve()
    model = hf_posswap.load(folder)
    reach = reach_of(model)
    if reach.causal or reach.limit is None:
        raise UnsupportedModelError(f"the study is of encoders with a learned table, got {type(model).__name__}.")
    tokenizer = load_tokenizer(folder, instead="save it with the model")
    longest = MULTIPLES[-1] * reach.window
    texts = read_documents(valid, tokenizer, length=needed(longest, QUESTIONS), limit=sizes.documents)
    tasks = list(_tasks(tokenizer, texts.tokens, reach.window, sizes.documents))
    shared = [f"model.name={folder}", source_settings(train or ["python"]), *_sized(sizes, reach.window)]
    runs = {scheme: list(_runs(scheme, [*shared, *(settings or ())], sizes.seeds, work_dir)) for scheme in DISTILLED}
    bench = Bench(folder, tasks, reach.window, special_frame(tokenizer), pooled, sizes.device, work_dir)
    results = {way.name: [bench.read(way, model) for model in _models(way, runs)] for way in ways}
    rows = _rows(ways, results, reach.window)
    places = {work_dir: "$WORK", folder: "$BASE", base: "$BASE", **_folders_of((*(train or ()), *(valid or ())))}
    result = {
        "study": NAME,
        "intervals": INTERVALS,
        "versions": versions(),
        "base": {"name": base.name, "parameters": model.num_parameters(), "window": reach.window},
        "size": size,
        "tokens": max(tokens_of(run.recipe) for of_scheme in runs.values() for run in of_scheme),
        "seeds": sizes.seeds,
        "texts": {
            "source": ", ".join(path.name for path in valid or ()) or texts.source,
            "said": texts.said,
            "digest": texts.to_dict()["digest"],
        },
        "rows": rows,
        "verdicts": list(verdicts(rows, longest)),
        "command": study_command(NAME, context.params, places),
        "commands": [of_scheme[0].command(places) for of_scheme in runs.values()],
    }
    write_json(out / f"{NAME}.json", result)
    write_text(out / f"{NAME}.md", markdown(result))
    draw_ways(result, out / f"{NAME}.png")
    typer.echo(markdown(result))


def _named(category: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise UnknownNameError(category, name, known)
    return known[name]


def _ways(only: Sequence[str] | None) -> list[ReadingMethod]:
    """Return the methods to measure, always with the baselines."""
    known = {way.name: way for way in WAYS}
    selected = {_named("way", name, known).name for name in only or known} | {CUT, MEAN}
    return [way for way in WAYS if way.name in selected]


def _rows(
    ways: Sequence[ReadingMethod], results: Mapping[str, Sequence[Sequence[TaskResult]]], window: int
) -> list[dict[str, Any]]:
    """Return the results of each method over all seeds."""
    (cut,), (mean,) = results[CUT], results[MEAN]
    return [
        {
            "way": way.name,
            "vectors": way.reads,
            "distilled": way.trained is not None,
            "near": near_the_base(results[way.name], cut, window),
            "cells": cells_of(results[way.name], cut, mean, window),
        }
        for way in ways
    ]


def _tasks(tokenizer: Any, rows: np.ndarray, window: int, documents: int) -> Iterator[Task]:
    """Yield both tasks at every length."""
    lengths = [multiple * window for multiple in MULTIPLES]
    yield from (passkeys(tokenizer, length, documents, QUESTIONS) for length in lengths)
    yield from (passages(tokenizer, rows, length, QUESTIONS) for length in lengths)


def _sized(size: Size, window: int) -> list[str]:
    """Return the settings of the recipe `embedding` for `size`, on texts of the base's window."""
    return [
        f"data.length={window}",
        f"swap.max_length={MULTIPLES[-1] * window}",
        f"swap.fit={size.fit}",
        f"training.max_steps={size.steps}",
        f"training.warmup_steps={int(_WARMUP * size.steps)}",
        f"training.learning_rate={size.rate}",
        f"training.per_device_train_batch_size={size.batch}",
    ]


def _runs(scheme: str, settings: Sequence[str], seeds: int, work_dir: Path) -> Iterator[Run]:
    """Yield the distillations of a scheme, by seed."""
    fields = ", ".join(f"{name}: {value}" for name, value in ({"name": scheme} | DISTILLED[scheme]).items())
    for seed in range(seeds):
        seeded = [f"swap.scheme={{{fields}}}", f"data.seed={seed}", f"training.seed={seed}"]
        yield make_run(RECIPES / "embedding.yaml", [*settings, *seeded], work_dir)


def _models(way: ReadingMethod, runs: Mapping[str, Sequence[Run]]) -> Iterator[Path | None]:
    """Yield the distilled models that the method uses, trained now if missing; None: it uses the base's weights."""
    if way.trained is None:
        typer.echo(way.name)
        yield None
        return
    for run in runs[way.trained]:
        typer.echo(f"{way.name}, seed {run.recipe.training.seed}: {tokens_of(run.recipe):,} tokens")
        run.finish()
        yield run.model


def _folders_of(paths: Sequence[str | Path]) -> dict[Path, str]:
    """Return the placeholder for the folders of the texts."""
    parents = {Path(path).parent for path in paths}
    return {parent: "$TEXT" for parent in parents if parent.parts}


app = script(main)

if __name__ == "__main__":
    app()
