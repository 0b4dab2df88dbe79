"""What is next to a saved model and belongs on its card: the report of its training, and results."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.card_results import EVALUATION, RESULTS, Results, read_results
from hf_posswap.errors import CheckpointError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.utils.atomic_io import read_json

REPORT = "report.json"
"""The report that a training writes into the folder of its run."""
_CONTROLS = ("base", "control")


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
    recipe: dict[str, Any] | None = None
    results: Results = field(default_factory=Results)
    sources: dict[str, str] = field(default_factory=dict)


def find_run_artifacts(folder: Path, plan: SwapPlan | None) -> RunArtifacts:
    """Return the report and results in the folders around the saved model in `folder`.

    The report is that of the run whose model this is. Results are looked for in `results`, in the folder of the run and
    in the one around it, and in a quickstart's folder; they count where they are of a model with this swap and this
    training. Files that cannot be read, or belong to other models, are ignored.

    Args:
        folder: of the model.
        plan: of its swap, as `explain` has it; None: it has none.
    """
    folders = list(folder.resolve().parents[:3])
    run_folder, report = _report_of(folder.resolve(), folders)
    card_facts: Any = report.get("card")
    recipe, base = (card_facts.get("recipe"), card_facts.get("base")) if isinstance(card_facts, dict) else (None, None)
    sources = {"recipe": f"The recipe on the card is that of {run_folder / REPORT}."} if run_folder and recipe else {}
    results, path = _results_of(folder.resolve(), plan, folders)
    if path is not None:
        sources["results"] = f"The results on the card are those of {path}."
    elif run_folder and (measured := _losses(report)):
        results = Results(measured)
        sources["results"] = f"The results on the card are those of {run_folder / REPORT}."
    known = isinstance(base, str)
    return RunArtifacts(base if known else None, recipe if isinstance(recipe, dict) else None, results, sources)


def _report_of(folder: Path, folders: list[Path]) -> tuple[Path | None, dict[str, Any]]:
    for run_folder in folders[:2]:
        report = _object(run_folder / REPORT)
        if isinstance(report.get("saved"), str) and (run_folder / report["saved"]).resolve() == folder:
            return run_folder, report
    return None, {}


def _losses(report: dict[str, Any]) -> dict[str, Any]:
    nll = report.get("nll")
    losses = nll.items() if isinstance(nll, dict) else ()
    return {f"nll_{length}": loss for length, loss in losses if isinstance(loss, int | float)}


def _results_of(folder: Path, plan: SwapPlan | None, folders: list[Path]) -> tuple[Results, Path | None]:
    candidates = [parent / "results" for parent in folders[:2]] + [parent for parent in folders[:2]]
    for candidate in candidates:
        mine = _only_of(_object(candidate / RESULTS), folder, plan)
        if mine is None:
            continue
        try:
            results = read_results(mine)
        except CheckpointError:
            continue
        return Results(results.values, tuple(sorted(candidate.glob("*.png")))), candidate / RESULTS
    return Results(), None


def _only_of(values: dict[str, Any], folder: Path, plan: SwapPlan | None) -> dict[str, Any] | None:
    """Return the results of this model and its baselines; None: they are of other models."""
    models = values.get("models")
    if plan is None or not isinstance(models, dict):
        return None
    if values.get("kind") != EVALUATION:
        return values if folder.parent.name == "models" and folder.name == plan.scheme.name in models else None
    mine = [label for label, model in models.items() if isinstance(model, dict) and _is_this(model.get("plan"), plan)]
    if not mine:
        return None
    keep = {*mine[:1], *_CONTROLS, values.get("base")}
    return {**values, "models": {label: model for label, model in models.items() if label in keep}}


def _is_this(recorded: Any, plan: SwapPlan) -> bool:
    """Return whether the plan in results is that of the model: the same swap, and the same training, if any."""
    if not isinstance(recorded, dict):
        return False
    record = json.loads(json.dumps(plan.record.to_dict()))
    return bool(recorded.get("record") == record and recorded.get("adaptation") == plan.adaptation)


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except CheckpointError:
        return {}
    return content if isinstance(content, dict) else {}
