"""What a run left for the model card: the report of its training, and the results of an evaluation.

Results are read from a file or a folder, and become a table for people and metadata for the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.training import TrainingRecord
from hf_posswap.utils.atomic_io import object_or_empty
from hf_posswap.utils.format import interval_text, is_number, markdown_text, public_name
from hf_posswap.utils.untrusted import read_bounded_json

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

RESULTS = "results.json"
EVALUATION = "hf_posswap evaluation"
"""What results.json of `evaluate` and `compare` says of itself."""
_CONTROLS = ("base", "control")
"""Models of a comparison that a card shows next to its own."""
REPORT = "report.json"
"""The report that a training writes into the folder of its run."""


@dataclass(frozen=True)
class Results:
    """What an evaluation found.

    Attributes:
        values: {metric: number}, or what `evaluate` and `compare` write to results.json.
        pictures: files that show it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Path, ...] = ()


def read_results(source: dict[str, object] | str | Path | None) -> Results:
    """Return the results in `source`: a dict, a JSON file, or a folder with a results.json and pictures.

    Raises:
        CheckpointError: there is none, or it holds neither numbers nor what `evaluate` and `compare` write.
    """
    if source is None:
        return Results()
    if isinstance(source, dict):
        values, pictures = source, []
    else:
        path = Path(source)
        file = path / RESULTS if path.is_dir() else path
        try:
            values = read_bounded_json(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot read the results in {file}: {error}; give a JSON file, or a folder with a {RESULTS}."
            ) from error
        pictures = sorted(path.glob("*.png")) if path.is_dir() else []
    is_evaluation = isinstance(values, dict) and values.get("kind") == EVALUATION
    if not is_evaluation and not (isinstance(values, dict) and all(map(is_number, values.values()))):
        raise CheckpointError(
            "results must be {metric: finite number}, or what posswap quickstart, eval or compare write to "
            "results.json (the folder or the dict)."
        )
    return Results(values, tuple(pictures))


def _entry_of(results: Results, plan: SwapPlan | None, training: TrainingRecord | None) -> str:
    """Return the label of a model in the results of an evaluation, by its swap and its training.

    Args:
        results: of several models.
        plan: of its swap; None: it has none.
        training: that its config records; None: none.

    Raises:
        CheckpointError: no entry is of this model, or several are.
    """
    record = None if plan is None else json.loads(json.dumps(plan.record.to_dict())) | {"max_length": 0}
    trained = None if training is None else str(training)
    matches = []
    for label, model in results.values["models"].items():
        measured = None if model["plan"] is None else model["plan"]["record"] | {"max_length": 0}
        if measured == record and model.get("trained") == trained:
            matches.append(label)
    if len(matches) == 1:
        return str(matches[0])
    swap = "no swap" if plan is None else f"the swap {plan.scheme.name}"
    raise CheckpointError(
        f"this model has {swap} and {f'was trained ({trained})' if trained else 'no recorded training'}, and of the "
        f"models of the results ({', '.join(results.values['models'])}) {', '.join(matches) or 'none'} "
        f"{'have the same: give results that hold one of them' if matches else 'has the same: give its own results'}."
    )


def _lengths(results: Results, label: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of perplexities of a model by length, those that it cannot read too, and its verdict."""
    model = results.values["models"][label]
    cannot = [{"length": int(length), "cannot_run": why} for length, why in model["cannot_run"].items()]
    scores = model.get("ppl_prefix") or model.get("mlm_pos", {}).get("lengths", [])
    conclusion, vectors = model.get("conclusion") or {}, model.get("vectors") or []
    verdict = " ".join(conclusion[name] for name in ("text", "inside") if conclusion.get(name))
    cosines = ", ".join(f"{row['cosine']:.3f} at {row['length']:,} tokens" for row in vectors)
    if cosines and not verdict:  # of an encoder
        verdict = f"Mean cosine of its vectors to those of {results.values['base']}: {cosines}."
    return sorted([*scores, *cannot], key=lambda row: row["length"]), verdict


@contextmanager
def _refusing_damaged() -> Iterator[None]:
    """Turn whatever results that were edited or cut raise inside the block, or the function, into a CheckpointError."""
    try:
        yield
    except PosswapError:
        raise
    except Exception as error:  # anything may be missing, or of another kind
        raise CheckpointError(
            f"the results cannot be read ({type(error).__name__}: {str(error)[:200] or 'no more is known'}): they were "
            "edited, or are not whole. Make them again."
        ) from error


@_refusing_damaged()
def evaluation(
    results: Results, plan: SwapPlan | None, training: TrainingRecord | None, task: str
) -> tuple[str, list[EvalResult]]:
    """Return the evaluation of one model, as Markdown and as metadata for `task`.

    Args:
        results: numbers, or those of several models.
        plan: of the model's swap; None: it has none.
        training: that its config records; None: none.
        task: of the metadata.

    Raises:
        CheckpointError: the results are not of this model, hold no perplexities, or cannot be read.
    """
    if results.values.get("kind") != EVALUATION:
        cells = [[name, f"{value:.6g}"] for name, value in results.values.items()]
        entries = [_entry(name, value, "custom", task) for name, value in results.values.items()]
        return (table(["metric", "value"], cells) if cells else ""), entries
    mine, data = _entry_of(results, plan, training), public_name(results.values["data"]["source"])
    rows, verdict = _lengths(results, mine)
    if not rows:
        raise CheckpointError(
            f"the results hold no perplexities of {mine} (metric ppl_prefix, or mlm_pos of encoders), which a model "
            "card shows."
        )
    perplexities = {f"perplexity at {row['length']} tokens": row.get("perplexity") for row in rows}
    entries = [_entry(name, value, data, task) for name, value in perplexities.items() if value is not None]
    notes = [f"> {markdown_text(each)}" for each in results.values.get("notes", [])]
    note = f"Text: {markdown_text(data)}. In brackets: 95 % interval over documents."
    texts = [markdown_text(verdict), _with_controls(results, mine, plan), note, *notes]
    return "\n\n".join(text for text in texts if text), entries


def _with_controls(results: Results, mine: str, plan: SwapPlan | None) -> str:
    """Return the table of the perplexities of a model, by its label, with those of the base and the control."""
    controls = [label for label in results.values["models"] if label in (results.values["base"], *_CONTROLS)]
    names = {label: label if label in _CONTROLS else "base" for label in controls}
    name = names.pop(mine, "unswapped")
    names = {mine: name if plan is None else plan.scheme.name, **names}
    head = ["perplexity at", *map(str, results.values["lengths"])]
    return table(head, [[name, *map(_score, _lengths(results, label)[0])] for label, name in names.items()])


def _score(row: dict[str, object]) -> str:
    if "cannot_run" in row:
        return "cannot run"
    return f"{row['perplexity']:.3f} ({interval_text(row, '.3f')})"


def _entry(name: str, value: float, dataset: str, task: str) -> EvalResult:
    from huggingface_hub import EvalResult

    metric = "perplexity" if name.startswith("perplexity") else name.split("@")[0].split(" ")[0]
    return EvalResult(
        task_type=task,
        dataset_type="custom",
        dataset_name=dataset,
        metric_type=metric,
        metric_name=name,
        metric_value=float(value),
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


@dataclass(frozen=True)
class RunArtifacts:
    """The report and results of a run.

    Attributes:
        base: Hub id of the model that was trained; None: unknown.
        recipe: of the training, without private paths; None: none was found.
        results: of an evaluation of this very model, or what the training measured at its end.
        sources: where "recipe" and "results" were found, as sentences.
    """

    base: str | None = None
    recipe: dict[str, object] | None = None
    results: Results = field(default_factory=Results)
    sources: dict[str, str] = field(default_factory=dict)


def find_run_artifacts(folder: Path, plan: SwapPlan | None, training: TrainingRecord | None) -> RunArtifacts:
    """Return the report and results in the folders around the saved model in `folder`.

    The report is that of the run whose model this is. Results are looked for in `results`, in the folder of the run and
    in the one around it; they count where one model of them has this swap and this training. Files that cannot be read,
    or belong to other models, are ignored.

    Args:
        folder: of the model.
        plan: of its swap, as `explain` has it; None: it has none.
        training: that its config records; None: none.
    """
    folders = list(folder.resolve().parents[:3])
    run_folder, report = _report_of(folder.resolve(), folders)
    card_facts = report.get("card")
    recipe, base = (card_facts.get("recipe"), card_facts.get("base")) if isinstance(card_facts, dict) else (None, None)
    sources = {"recipe": f"The recipe on the card is that of {run_folder / REPORT}."} if run_folder and recipe else {}
    losses = report["nll"].items() if isinstance(report.get("nll"), dict) else ()
    measured = {f"nll_{length}": loss for length, loss in losses if isinstance(loss, int | float)}
    results, path = _results_of(plan, training, folders)
    if path is not None:
        sources["results"] = f"The results on the card are those of {path}."
    elif run_folder and measured:
        results = Results(measured)
        sources["results"] = f"The results on the card are those of {run_folder / REPORT}."
    known = isinstance(base, str)
    return RunArtifacts(base if known else None, recipe if isinstance(recipe, dict) else None, results, sources)


def _report_of(folder: Path, folders: list[Path]) -> tuple[Path | None, dict[str, Any]]:
    for run_folder in folders[:2]:
        report = object_or_empty(run_folder / REPORT)
        if isinstance(report.get("saved"), str) and (run_folder / report["saved"]).resolve() == folder:
            return run_folder, report
    return None, {}


def _results_of(
    plan: SwapPlan | None, training: TrainingRecord | None, folders: list[Path]
) -> tuple[Results, Path | None]:
    for candidate in [*(parent / "results" for parent in folders[:2]), *folders[:2]]:
        values = object_or_empty(candidate / RESULTS)
        if values.get("kind") != EVALUATION:
            continue
        results = Results(values, tuple(sorted(candidate.glob("*.png"))))
        with suppress(CheckpointError):
            evaluation(results, plan, training, "other")
            return results, candidate / RESULTS
    return Results(), None
