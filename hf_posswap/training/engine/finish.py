"""The end of a run: reload, verify and measure the saved model; write the report and the loss plot; push."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.load import load
from hf_posswap.checkpoints.push import push
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.record.training import TrainingRecord
from hf_posswap.patching.verify.verify_swap import verify_swap
from hf_posswap.training.config import Recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.theirs import result_settings
from hf_posswap.training.engine.log import RunLog
from hf_posswap.training.engine.measuring import held_out_loss, held_out_vectors, kept_of_base
from hf_posswap.training.engine.phase import LOG, PhaseResult, Run
from hf_posswap.training.engine.picture import draw_losses
from hf_posswap.training.engine.recording import leave_record
from hf_posswap.utils.atomic_io import read_json, write_json, write_text
from hf_posswap.utils.format import interval_text
from hf_posswap.utils.user_paths import expand_home, without_folder

REPORT = "report.json"
_UNITS = {
    "next-token": "nats a token",
    "longce": "nats a token, weighted by longce",
    "masked": "nats a masked token",
    "distill": "nats a token, with the teacher's share",
    "embedding": "1 - cosine to the unswapped encoder",
    "contrastive": "nats a text",
}


def finish(recipe: Recipe, run: Run, results: list[PhaseResult], saved: Path) -> dict[str, Any]:
    """Verify and measure the saved model, write the report, and push if requested; return the report.

    A second call repeats only a push that failed.

    Args:
        recipe: as a whole.
        run: the run to finish.
        results: of its phases.
        saved: folder of the finished model.
    """
    path = run.folder / REPORT
    report: dict[str, Any] = read_json(path) if path.is_file() else _report(recipe, run, results, saved)
    if recipe.training.push_to_hub and "pushed" not in report:
        report["pushed"] = _push(recipe, saved)
        _write(run, report)
    for line in as_markdown(report).splitlines():
        run.say(line)
    return report


def _report(recipe: Recipe, run: Run, results: list[PhaseResult], saved: Path) -> dict[str, Any]:
    """Verify and measure the saved model, and write the report before anything is pushed."""
    model = load(saved, dtype="auto", trust_remote_code=recipe.model.trust_remote_code)
    swapped = getattr(unwrap(model), "_posswap", None) is not None
    plan = results[-1].plan
    nll = held_out_loss(recipe, run, model)
    seconds, tokens = (sum(getattr(result, name) for result in results) for name in ("train_runtime", "tokens"))
    report = {
        "model": str(recipe.model.name),
        "saved": str(saved.relative_to(run.folder)),
        "recipe": to_dict(recipe),
        "processes": run.launch.processes,
        "phases": [asdict(result) for result in results],
        "train_runtime": round(seconds, 3),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        "verified": verify_swap(model).checks if swapped else {},
        "nll": nll,
        "kept": kept_of_base(recipe, run, model, tokens),
        "vectors": held_out_vectors(recipe, run, model, reach=None if plan is None else plan["max_length"]),
        "training": leave_record(recipe, results, nll, saved, base=str(without_folder(recipe.model.name))).to_dict(),
        "card": _for_card(recipe),
    }
    curves = [(r.name or "training", RunLog(run.folder / r.name / LOG).entries()) for r in results]
    if importlib.util.find_spec("matplotlib") is not None and any(
        "loss" in entry for _, entries in curves for entry in entries
    ):
        subtitle = f"{without_folder(recipe.model.name)}. {_swap_text(report)}"
        draw_losses(curves, run.folder / "loss.png", below=subtitle, unit=_UNITS[recipe.objective.kind])
    _write(run, report)
    return report


def _write(run: Run, report: dict[str, Any]) -> None:
    write_text(run.folder / "report.md", as_markdown(report))
    write_json(run.folder / REPORT, report)


def _push(recipe: Recipe, saved: Path) -> str | None:
    """Push the saved model; `push` reads the report for the card."""
    training, trusted = recipe.training, recipe.model.trust_remote_code
    assert training.hub_model_id is not None
    private, branch = bool(training.hub_private_repo), training.hub_revision
    return push(saved, training.hub_model_id, private=private, revision=branch, trust_remote_code=trusted).url


def _for_card(recipe: Recipe) -> dict[str, Any]:
    """Return the public facts of the training for the model card."""
    local = expand_home(recipe.model.name).exists()
    return {"base": None if local else recipe.model.name, "recipe": public_recipe(recipe)}


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the public part of `recipe`: no local paths, and no settings of logging and saving."""
    fields = to_dict(recipe)
    public_keys = ("name", "model", "swap", "data", "objective", "trainable", "peft", "stages")
    public = {name: fields[name] for name in public_keys} | {"training": result_settings(recipe.training)}
    del public["data"]["cache"]
    for owner, name in [(public["model"], "name"), (public["model"], "tokenizer")]:
        owner[name] = without_folder(owner[name])
    for source in public["data"]["sources"]:
        source["path"] = without_folder(source["path"])
    return public


def as_markdown(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    rows = ["| phase | steps | tokens | first loss | last loss |", "|---|---|---|---|---|"]
    for phase in report["phases"]:
        losses = " | ".join("" if phase[n] is None else f"{phase[n]:.3f}" for n in ("first_loss", "last_loss"))
        rows.append(f"| {phase['name'] or 'training'} | {phase['steps']} | {phase['tokens']:,} | {losses} |")
    lines = [
        f"# {_swap_text(report)}",
        "",
        f"Started from {report['model']}; saved in `{report['saved']}`{_record_text(report)}.",
        "",
        *rows,
        "",
        f"{report['train_runtime']:,.0f} s of training, {report['tokens_per_second']:,.0f} tokens a second.",
    ]
    for phase in report["phases"]:
        lines += ["", *(f"- {gate}" for gate in phase["gates"])]
    if report["nll"]:
        lines += ["", "| tokens read | nats a token |", "|---|---|"]
        counts_parts = any("tokens_counted" in source for source in report["phases"][-1]["data"].get("sources", []))
        missing = "the model ends before it" + (", or the loss counts no token before it" if counts_parts else "")
        shown = {length: missing if nll is None else f"{nll:.4f}" for length, nll in report["nll"].items()}
        lines += [f"| {length} | {nll} |" for length, nll in shown.items()]
    if (kept := report.get("kept")) is not None:
        lines += [
            "",
            f"**Keeps {kept['kept']:.1%} of the base in its window** after {kept['tokens']:,} tokens: perplexity "
            f"{math.exp(kept['nll']):.2f}, the base's {math.exp(kept['base']):.2f}, on {kept['length']} tokens of "
            f"{kept['documents']} held-out documents.",
        ]
    if report.get("vectors"):  # not in the reports of older runs
        lines += ["", "| tokens read | by the base | cosine of vectors to the base's |", "|---|---|---|"]
        lines += [
            f"| {row['length']} | {row['base_reads']} | {row['cosine']:.4f} ({interval_text(row, '.4f')}) |"
            for row in report["vectors"]
        ]
    if report["verified"]:
        lines += ["", "The saved model, loaded again: " + "; ".join(f"{k}: {v}" for k, v in report["verified"].items())]
    if report.get("pushed"):
        lines += ["", f"Pushed: {report['pushed']}"]
    return "\n".join(lines) + "\n"


def _record_text(report: dict[str, Any]) -> str:
    record = report.get("training")  # not in the reports of older runs
    return "" if record is None else f", which records {TrainingRecord(**record)}"


def _swap_text(report: dict[str, Any]) -> str:
    plan = report["phases"][-1]["plan"]
    if plan is None:
        return "No swap: the control"
    return f"Swapped to {plan['scheme']['name']}, for {plan['max_length']:,} tokens"
