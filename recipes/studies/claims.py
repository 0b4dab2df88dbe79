"""Tests famous claims about positions on small models trained from random weights with each scheme.

    python -m recipes.studies.claims --out results                 # an hour of one CPU core
    python -m recipes.studies.claims --size gpu --out results      # larger models, longer trainings, 5 seeds

There are four materials: Python's own text; puzzles and passkeys (recipes/studies/puzzles.py); copying; sorting. On
each, a model is trained from scratch with learned positions, sinusoids, RoPE, ALiBi and none, for each seed, and for
seed 0 also at a second learning rate. Each claim is then judged by intervals over seeds and, for text, over documents:
it holds, it does not hold, or these trainings cannot decide it. The same command resumes an interrupted run.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import hf_posswap
from hf_posswap.cli.outcome import script
from hf_posswap.comparison import read_documents
from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.evaluation import RunStore, reach_of
from hf_posswap.evaluation.passkey import PasskeyTask
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.utils.atomic_io import cache_folder, writable_folder, write_json, write_text
from recipes.studies.claims_judging import BEYOND, CLAIMS, INSIDE, Measured, judge
from recipes.studies.claims_measuring import DEPTHS, answers, curve_of, needles, readings, share_needed
from recipes.studies.claims_page import markdown
from recipes.studies.claims_picture import draw_claims
from recipes.studies.claims_runs import MATERIALS, SIZES, Sizes, Training, trainings
from recipes.studies.measuring import INTERVALS, MULTIPLES, Texts
from recipes.studies.running import Run, study_command, tokens_of, versions

NAME = "claims"
_NEEDLE_WINDOWS = (0.5, *MULTIPLES)


class Size(StrEnum):
    """The names of `SIZES`."""

    CPU = "cpu"
    GPU = "gpu"
    SMOKE = "smoke"


def main(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The folder for JSON, table and picture.")],
    size: Annotated[Size, typer.Option(help="Of models and trainings.")] = Size.CPU,
    only: Annotated[
        list[str] | None, typer.Option(help="A material to train on and to judge claims about: text, needles, copy ...")
    ] = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="Train nothing; judge by what is finished, and say what is missing.")
    ] = False,
    work: Annotated[Path | None, typer.Option(help="The folder for trainings; in the user's cache otherwise.")] = None,
) -> None:
    """Train with each scheme, measure, and judge the claims."""
    work_dir = writable_folder((work or cache_folder(None) / "studies" / NAME).expanduser().resolve())
    for name in only or ():
        if name not in MATERIALS:
            raise UnknownNameError("material", name, MATERIALS)
    sizes = SIZES[size]
    finished_trainings = []
    for training in trainings(sizes, work_dir, [name for name in MATERIALS if not only or name in only]):
        if not finished:
            other = ", at the other rate" if training.other else ""
            typer.echo(f"{training.material}, {training.scheme}, seed {training.seed}{other}")
            training.run.finish()
        if (training.run.folder / "report.json").is_file():
            finished_trainings.append(training)
    with RunStore(work_dir / "measured" / size) as store:
        measured = [measure(training, sizes, store) for training in finished_trainings]
    command = study_command(NAME, context.params, {work_dir: "$WORK"})
    save(result_of(sizes, finished_trainings, measured) | {"size": str(size), "command": command}, out)


def save(result: dict[str, Any], out: Path) -> None:
    """Write JSON, table and picture, and show the table."""
    write_json(out / f"{NAME}.json", result)
    write_text(out / f"{NAME}.md", markdown(result))
    draw_claims(result, out / f"{NAME}.png")
    typer.echo(markdown(result))


def measure(training: Training, sizes: Sizes, store: RunStore) -> dict[str, Any]:
    """Return the measurements of a finished training: its curve and losses, or its shares of right answers."""
    model = hf_posswap.load(training.run.model).eval()
    tokenizer = load_tokenizer(training.run.model, instead="save it with the model")
    if isinstance(training.run, Run) and training.material == "text":
        documents = read_documents(None, tokenizer, length=sizes.longest, limit=sizes.documents)
        texts = Texts(documents, sizes.window, tokenizer)
        losses = {key: row.tolist() for key, row in readings(model, texts, store).items()}
        return {"curve": [loss for _, loss in curve_of(training.run)], "losses": losses, "texts": texts.to_dict()}
    if training.material == "needles":
        task = PasskeyTask(tokenizer, header=False)
        limit = reach_of(model).limit
        lengths = {f"{m:g}": round(m * sizes.window) for m in _NEEDLE_WINDOWS}
        runs = {m: n for m, n in lengths.items() if n >= task.shortest and (limit is None or n <= limit)}
        hits = needles(model, task, runs, sizes.trials, store)
        return {"shares": {m: number / (sizes.trials * len(DEPTHS)) for m, number in hits.items()}}
    longest, trials = sizes.tasks.longest, sizes.tasks.trials
    right_counts = answers(model, tokenizer, training.material, range(1, 2 * longest + 1), trials, store)
    shares = {length: number / trials for length, number in right_counts.items()}
    length_ranges = {INSIDE: range(1, longest + 1), BEYOND: range(longest + 1, 2 * longest + 1)}
    return {
        "shares": shares | {name: float(np.mean([shares[str(n)] for n in ns])) for name, ns in length_ranges.items()}
    }


def result_of(sizes: Sizes, done: list[Training], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results: the trainings, the claims with their verdicts, and the measurements of each seed.

    Args:
        sizes: of the study.
        done: finished trainings; a scheme counts only if its trainings of all seeds are finished.
        measured: the measurements of each training.

    Raises:
        DataError: no scheme counts.
    """
    seeds = [_of_seed(zip(done, measured, strict=True), seed, other=False) for seed in range(sizes.seeds)]
    elsewhere = _of_seed(zip(done, measured, strict=True), 0, other=True)
    texts = [result["texts"] for result in measured if "texts" in result]
    complete = set.intersection(*({(material, s) for material, of in seed.items() for s in of} for seed in seeds))
    if not complete:
        raise DataError("no scheme is trained on every seed yet: leave --finished out.")
    seeds = [{m: {s: of[s] for s in of if (m, s) in complete} for m, of in seed.items()} for seed in seeds]
    judged = [claim for claim in CLAIMS if {pair for claim_part in claim.parts for pair in claim_part.of} <= complete]
    return {
        "study": NAME,
        "intervals": INTERVALS,
        "versions": versions(),
        "seeds": sizes.seeds,
        "window": sizes.window,
        "trained": {training.material: _trained(training, sizes) for training in done},
        "longest": sizes.tasks.longest,
        "trials": {"needles": sizes.trials * len(DEPTHS), "tasks": sizes.tasks.trials},
        "texts": texts[0] if texts else None,
        "claims": [judge(claim, seeds, elsewhere) for claim in judged],
        "left out": [claim.said for claim in CLAIMS if claim not in judged],
        "needed": _needed(seeds) if ("text", "rope") in complete else {},
        "text": {scheme: _text(scheme, seeds) for scheme in seeds[0].get("text", ())},
        "shares": {
            material: _shares(material, seeds) for material in seeds[0] if material != "text" and seeds[0][material]
        },
    }


def _trained(training: Training, sizes: Sizes) -> dict[str, Any]:
    """Return the model size of a training, the amount that it read, and its two learning rates."""
    run, amount = training.run, sizes.amount(training.material)
    read_amount = {"tokens": tokens_of(run.recipe)} if isinstance(run, Run) else {"examples": run.steps * run.batch}
    return {
        "parameters": hf_posswap.load(run.model).num_parameters(),
        "rates": [amount.rate, amount.other_rate],
    } | read_amount


def _of_seed(measured: Iterable[tuple[Training, dict[str, Any]]], seed: int, *, other: bool) -> Measured:
    """Return what was measured of one seed at one rate, by material and scheme."""
    by_material: Measured = {}
    for training, values in measured:
        if (training.seed, training.other) == (seed, other):
            by_material.setdefault(training.material, {})[training.scheme] = values
    return by_material


def _needed(seeds: list[Measured]) -> dict[str, list[float | None]]:
    """Return the share of the tokens after which RoPE is as low as another scheme at its end, of each seed."""
    curves = [{scheme: np.array(measured["curve"]) for scheme, measured in of["text"].items()} for of in seeds]
    return {scheme: [share_needed(of["rope"], of[scheme]) for of in curves] for scheme in curves[0] if scheme != "rope"}


def _text(scheme: str, seeds: list[Measured]) -> dict[str, Any]:
    """Return the mean curve of a scheme and its mean loss by windows read at once, of each seed."""
    seed_results = [of["text"][scheme] for of in seeds]
    losses = {
        windows: [float(np.mean(of["losses"][windows])) for of in seed_results] for windows in seed_results[0]["losses"]
    }
    return {"curve": np.mean([of["curve"] for of in seed_results], axis=0).tolist(), "losses": losses}


def _shares(material: str, seeds: list[Measured]) -> dict[str, Any]:
    """Return the shares of right answers by scheme and length, of each seed."""
    schemes = seeds[0][material]
    return {
        scheme: {length: [of[material][scheme]["shares"][length] for of in seeds] for length in scheme_result["shares"]}
        for scheme, scheme_result in schemes.items()
    }


app = script(main)

if __name__ == "__main__":
    app()
