"""What a run left for the model card: the report of its training, and the results of an evaluation.

Results are read from a file or a folder, and become a table for people and metadata for the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.utils.atomic_io import object_or_empty
from hf_posswap.utils.format import interval_text, is_number, markdown_text, public_name
from hf_posswap.utils.untrusted import read_bounded_json

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

RESULTS = "results.json"
EVALUATION = "hf_posswap evaluation"
"""What results.json of `evaluate` and `compare` says of itself."""
_OTHERS = ("base", "control")  # of a quickstart: shown with the model
REPORT = "report.json"
"""The report that a training writes into the folder of its run."""
_CONTROLS = ("base", "control")


@dataclass(frozen=True)
class Results:
    """What an evaluation found.

    Attributes:
        values: {metric: number}, or the results.json of a quickstart.
        pictures: files that show it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Path, ...] = ()


def read_results(source: dict[str, object] | str | Path | None) -> Results:
    """Return the results in `source`: a dict, a JSON file, or a folder with a results.json and pictures.

    What `compare` and `evaluate` write becomes what a quickstart writes: perplexities by length, by scheme.

    Raises:
        CheckpointError: there is none, or it holds neither numbers nor what a quickstart writes.
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
    if isinstance(values, dict) and values.get("kind") == EVALUATION:
        with _refusing_damaged():
            values = _by_scheme(values)
    if not isinstance(values, dict) or not (_is_quickstart(values) or all(map(is_number, values.values()))):
        raise CheckpointError(
            "results must be {metric: finite number}, or what posswap quickstart, eval or compare write to "
            "results.json (the folder or the dict)."
        )
    return Results(values, tuple(pictures))


def _by_scheme(results: dict[str, Any]) -> dict[str, object]:
    """Return the perplexities of an evaluation under the names of the schemes, the model they are held against as base.

    Raises:
        CheckpointError: it holds no perplexities.
    """
    models: dict[str, object] = {}
    for label, model in results["models"].items():
        plan = model.get("plan")
        other = _OTHERS[0] if label == results["base"] and label not in _OTHERS else label
        name = plan["scheme"]["name"] if plan else other
        cannot = [{"length": int(length), "cannot_run": why} for length, why in model["cannot_run"].items()]
        scores = model.get("ppl_prefix") or model.get("mlm_pos", {}).get("lengths", [])
        rows = sorted([*scores, *cannot], key=lambda row: row["length"])
        if rows:
            verdict = _conclusion(model, results["base"]) or _nearness(model.get("vectors"), results["base"])
            models.setdefault(name, {"lengths": rows, "verdict": verdict})
    if not models:
        raise CheckpointError(
            "the results hold no perplexities (metric ppl_prefix, or mlm_pos of encoders), which a model card shows."
        )
    data = {"text": public_name(results["data"]["source"])}
    return {"models": models, "lengths": results["lengths"], "data": data, "notes": results.get("notes", [])}


def _conclusion(model: dict[str, Any], base: str) -> str | None:
    """Return the conclusion that the comparison wrote about a model, or the verdict in older results, or None."""
    conclusion = model.get("conclusion")
    if isinstance(conclusion, dict):
        return " ".join(text for text in (conclusion["text"], conclusion["inside"]) if text)
    loss = (model.get("short_reg") or {}).get("loss")
    if not isinstance(loss, dict) or not is_number(loss.get("difference")) or "verdict" not in loss:
        return None
    return f"Inside the window, compared with {base}: {loss['difference']:+.3f} nats per token, {loss['verdict']}."


def _nearness(rows: Any, base: str) -> str | None:
    """Return how near an encoder's vectors are to the base's, by length, as text; None: it was not measured."""
    if not rows:
        return None
    cosines = ", ".join(f"{row['cosine']:.3f} at {row['length']:,} tokens" for row in rows)
    return f"Mean cosine of its vectors to those of {base}: {cosines}."


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


def _is_quickstart(values: Mapping[str, object]) -> bool:
    return isinstance(values.get("models"), dict) and isinstance(values.get("lengths"), list)


@_refusing_damaged()
def evaluation(results: Results, scheme: str | None, task: str) -> tuple[str, list[EvalResult]]:
    """Return the evaluation of the model with `scheme` (None: no swap), as Markdown and as metadata for `task`.

    Raises:
        CheckpointError: a quickstart's results hold no model with that scheme, or cannot be read.
    """
    if not results.values:
        return "", []
    if not _is_quickstart(results.values):
        rows = [[name, f"{value:.6g}"] for name, value in results.values.items()]
        return table(["metric", "value"], rows), [_entry(name, v, "custom", task) for name, v in results.values.items()]
    models, name = results.values["models"], scheme or _OTHERS[0]
    if name not in models:
        raise CheckpointError(
            f"the results hold no model called {name!r}, only {', '.join(models)}: give the results of this model."
        )
    shown = [name, *(other for other in _OTHERS if other in models and other != name)]
    head = ["perplexity at", *(str(length) for length in results.values["lengths"])]
    text = table(head, [[other, *map(_score, models[other]["lengths"])] for other in shown])
    data = results.values.get("data", {}).get("text", "text")
    note = f"Text: {markdown_text(data)}. In brackets: 95 % interval over documents."
    if verdict := models[name].get("verdict"):
        text = f"{markdown_text(verdict)}\n\n{text}"
    note = "\n\n".join([note, *(f"> {markdown_text(each)}" for each in results.values.get("notes", []))])
    scores = [row for row in models[name]["lengths"] if "cannot_run" not in row]
    entries = [_entry(f"perplexity at {row['length']} tokens", row["perplexity"], data, task) for row in scores]
    return f"{text}\n\n{note}", entries


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
    card_facts = report.get("card")
    recipe, base = (card_facts.get("recipe"), card_facts.get("base")) if isinstance(card_facts, dict) else (None, None)
    sources = {"recipe": f"The recipe on the card is that of {run_folder / REPORT}."} if run_folder and recipe else {}
    losses = report["nll"].items() if isinstance(report.get("nll"), dict) else ()
    measured = {f"nll_{length}": loss for length, loss in losses if isinstance(loss, int | float)}
    results, path = _results_of(folder.resolve(), plan, folders)
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


def _results_of(folder: Path, plan: SwapPlan | None, folders: list[Path]) -> tuple[Results, Path | None]:
    candidates = [parent / "results" for parent in folders[:2]] + [parent for parent in folders[:2]]
    for candidate in candidates:
        mine = _only_of(object_or_empty(candidate / RESULTS), folder, plan)
        if mine is None:
            continue
        try:
            results = read_results(mine)
        except CheckpointError:
            continue
        return Results(results.values, tuple(sorted(candidate.glob("*.png")))), candidate / RESULTS
    return Results(), None


def _only_of(values: dict[str, object], folder: Path, plan: SwapPlan | None) -> dict[str, object] | None:
    """Return the results of this model and its baselines; None: they are of other models."""
    models = values.get("models")
    if plan is None or not isinstance(models, dict):
        return None
    if values.get("kind") != EVALUATION:
        return values if folder.parent.name == "models" and folder.name == plan.scheme.name in models else None
    record = json.loads(json.dumps(plan.record.to_dict()))
    plans = {label: model.get("plan") for label, model in models.items() if isinstance(model, dict)}
    mine = [  # of the same swap, and the same training, if any
        label
        for label, recorded in plans.items()
        if isinstance(recorded, dict)
        and recorded.get("record") == record
        and recorded.get("adaptation") == plan.adaptation
    ]
    if not mine:
        return None
    keep = {*mine[:1], *_CONTROLS, values.get("base")}
    return {**values, "models": {label: model for label, model in models.items() if label in keep}}
