"""What lies beside a saved model and belongs on its card: the report of the training that made it, and results."""

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
"""What a training writes into the folder of its run."""
_CONTROLS = ("base", "control")


@dataclass(frozen=True)
class Beside:
    """What was found.

    Attributes:
        base: Hub id of the model that the training began with; None: not known.
        recipe: of the training, as others may see it; None: none was found.
        results: of an evaluation of this very model, or what the training measured at its end.
        said: where "recipe" and "results" were found, in sentences.
    """

    base: str | None = None
    recipe: dict[str, Any] | None = None
    results: Results = field(default_factory=Results)
    said: dict[str, str] = field(default_factory=dict)


def found_beside(folder: Path, plan: SwapPlan | None) -> Beside:
    """Return what the folders around the saved model in `folder` say of it.

    The report is that of the run whose model this is. Results are looked for in `results`, in the folder of the run and
    in the one around it, and in a quickstart's folder; they count where they are of a model with this swap and this
    training. What cannot be read, or is of other models, counts as not there.

    Args:
        folder: of the model.
        plan: of its swap, as `explain` has it; None: it has none.
    """
    places = list(folder.resolve().parents[:3])
    place, report = _report_of(folder.resolve(), places)
    told: Any = report.get("card")
    recipe, base = (told.get("recipe"), told.get("base")) if isinstance(told, dict) else (None, None)
    said = {"recipe": f"The recipe on the card is that of {place / REPORT}."} if place and recipe else {}
    results, path = _results_of(folder.resolve(), plan, places)
    if path is not None:
        said["results"] = f"The results on the card are those of {path}."
    elif place and (measured := _losses(report)):
        results = Results(measured)
        said["results"] = f"The results on the card are those of {place / REPORT}."
    known = isinstance(base, str)
    return Beside(base if known else None, recipe if isinstance(recipe, dict) else None, results, said)


def _report_of(folder: Path, places: list[Path]) -> tuple[Path | None, dict[str, Any]]:
    for place in places[:2]:
        held = _object(place / REPORT)
        if isinstance(held.get("saved"), str) and (place / held["saved"]).resolve() == folder:
            return place, held
    return None, {}


def _losses(report: dict[str, Any]) -> dict[str, Any]:
    held = report.get("nll")
    losses = held.items() if isinstance(held, dict) else ()
    return {f"nll_{length}": loss for length, loss in losses if isinstance(loss, int | float)}


def _results_of(folder: Path, plan: SwapPlan | None, places: list[Path]) -> tuple[Results, Path | None]:
    candidates = [place / "results" for place in places[:2]] + [place for place in places[:2]]
    for candidate in candidates:
        mine = _only_of(_object(candidate / RESULTS), folder, plan)
        if mine is None:
            continue
        try:
            found = read_results(mine)
        except CheckpointError:
            continue
        return Results(found.values, tuple(sorted(candidate.glob("*.png")))), candidate / RESULTS
    return Results(), None


def _only_of(values: dict[str, Any], folder: Path, plan: SwapPlan | None) -> dict[str, Any] | None:
    """Return the results of this model, and of those that it is held against; None: they are of others."""
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


def _is_this(held: Any, plan: SwapPlan) -> bool:
    """Return whether the plan in results is that of the model: the same swap, and the same training, if any."""
    if not isinstance(held, dict):
        return False
    own = json.loads(json.dumps(plan.record.to_dict()))
    return bool(held.get("record") == own and held.get("adaptation") == plan.adaptation)


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        held = read_json(path)
    except CheckpointError:
        return {}
    return held if isinstance(held, dict) else {}
