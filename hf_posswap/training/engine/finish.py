"""The end of a run: reload, verify and measure the saved model; write its record, report and loss plot; push."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.checkpoints.load import load
from hf_posswap.checkpoints.manifest import write_listed_json
from hf_posswap.checkpoints.push import push
from hf_posswap.checkpoints.run_artifacts import REPORT
from hf_posswap.evaluation import near_the_base
from hf_posswap.families.locating import locate
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.record.adapter_marks import SIDECAR
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.patching.record.training import NAME, TrainingRecord, plain_name, swap_digest
from hf_posswap.patching.verify.verify_swap import verify_swap
from hf_posswap.training.config import Recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.theirs import result_settings
from hf_posswap.training.data import TokenData, build_data
from hf_posswap.training.engine.arguments import on_cpu
from hf_posswap.training.engine.log import RunLog, draw_losses
from hf_posswap.training.engine.phase import DONE, LOG, PhaseResult, Run
from hf_posswap.training.engine.preparing import load_model, load_recipe_tokenizer
from hf_posswap.training.engine.services import lengths_of, measure_of, vector_lengths
from hf_posswap.training.trainer_proof import versions
from hf_posswap.utils.atomic_io import read_json, read_object, write_json, write_text
from hf_posswap.utils.format import interval_text
from hf_posswap.utils.user_paths import expand_home, without_folder

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HeldOut = Callable[[bool], tuple["PreTrainedTokenizerBase", TokenData]]
"""Returns the tokenizer and the data with held-out documents, for a causal model or another; each once."""
_HOLDERS = {"config.json": (NAME, "posswap"), SIDECAR: ("training", "record")}
"""Files that hold a record: its key, and the key of the swap."""
_NONE = (None, "", "")
_BASE = "weights of the base"
_DATA = "documents of "
_DESTINATION = ("hub_model_id", "hub_revision")
_UNITS = {
    "next-token": "nats a token",
    "longce": "nats a token, weighted by longce",
    "masked": "nats a masked token",
    "distill": "nats a token, with the teacher's share",
    "embedding": "1 - cosine to the unswapped encoder",
    "contrastive": "nats a text",
}


def leave_record(
    recipe: Recipe, results: Sequence[PhaseResult], nll: Mapping[str, float | None], saved: Path, *, base: str
) -> TrainingRecord:
    """Write the record of a training into the config.json of its finished model, and return it.

    For an adapter, the record goes into the sidecar file with the swap of its base; without a swap there is no sidecar,
    and the record is only in the report.

    Args:
        recipe: as a whole.
        results: of its phases.
        nll: nats a token of held-out documents, by length.
        saved: folder of the finished model.
        base: public name of the base model.
    """
    identity = read_object(saved.parent / DONE, identity=dict)["identity"]
    path, name, swap = next(
        ((saved / file, *keys) for file, keys in _HOLDERS.items() if (saved / file).is_file()), _NONE
    )
    values = {} if path is None else read_json(path)
    swap_values = values.get(swap)
    digests = [value for key, value in identity.items() if key.startswith(_DATA)]  # independent of the file names
    record = TrainingRecord(
        base=plain_name(base),
        base_weights=identity[_BASE],
        recipe=None if recipe.name is None else plain_name(recipe.name),
        objective=recipe.objective.kind,
        what=recipe.what,
        steps=sum(result.steps for result in results),
        tokens=sum(result.tokens for result in results),
        data=hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16],
        held_out={length: float(loss) for length, loss in nll.items() if loss is not None},
        swap=None if swap_values is None else swap_digest(SwapRecord.from_dict(swap_values)),
        software=versions(),
    )
    if path is not None:
        write_listed_json(path, {**values, name: record.to_dict()})
    return record


def held_out_loss(recipe: Recipe, run: Run, model: PreTrainedModel, held_out: _HeldOut) -> dict[str, float | None]:
    """Return the loss at each length of the recipe; None for a length beyond the model's.

    Without lengths in the recipe, one is chosen (`own_length`), but encoders and sharded models are not measured.

    Args:
        recipe: as a whole.
        run: the run to finish.
        model: the finished model, reloaded.
        held_out: reads the documents.
    """
    is_default = not recipe.evaluation.lengths
    if is_default and (not recipe.objective.predicts_next_token or run.services.evaluate is None or run.launch.shards):
        return {}
    assert run.services.evaluate is not None
    _, data = held_out(True)
    lengths = lengths_of(recipe, data.held_out, whole=data.held_out_counted is not None)
    if not lengths:
        return {}
    measure = measure_of(recipe, run.services, _on_device(model, recipe), data.held_out, data.held_out_counted)
    loss_by_length = measure()
    return {str(length): loss_by_length.get(length) for length in lengths}


def kept_of_base(
    recipe: Recipe,
    run: Run,
    model: PreTrainedModel,
    tokens: int,
    held_out: _HeldOut,
    nll: Mapping[str, float | None],
) -> dict[str, Any] | None:
    """Return how much of the base a distilled model keeps in the base's window; None: that is not measured.

    "kept" is exp(the base's loss less the model's), the base's perplexity divided by the model's: the share of the
    base's probability of the next token, as the geometric mean. Sharded models are not measured.

    Args:
        recipe: as a whole.
        run: the run to finish.
        model: the finished model, reloaded.
        tokens: that it was trained on.
        held_out: reads the documents.
        nll: of the model, from `held_out_loss`; it is not measured again at the one length that is the same.
    """
    if recipe.objective.kind != "distill" or run.services.evaluate is None or run.launch.shards:
        return None
    _, data = held_out(True)
    documents, counted, base = data.held_out, data.held_out_counted, load_model(recipe)
    window = locate(unwrap(base)).geometry.original_length
    inside = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, length=min(window, recipe.data.length), cut=(1,)),
        evaluation=dataclasses.replace(recipe.evaluation, lengths=()),
    )
    losses_by_model = [measure_of(inside, run.services, _on_device(base, recipe), documents, counted)()]
    measured, needed = (lengths_of(each, documents, whole=counted is not None) for each in (recipe, inside))
    if measured == needed:
        losses_by_model.append({int(length): loss for length, loss in nll.items() if loss is not None})
    else:
        losses_by_model.append(measure_of(inside, run.services, _on_device(model, recipe), documents, counted)())
    if not losses_by_model[0] or losses_by_model[0].keys() != losses_by_model[1].keys():
        return None
    ((length, before),), ((_, after),) = (losses.items() for losses in losses_by_model)
    if counted is None:
        read = sum(len(document) >= length for document in documents)
    else:
        read = sum(bool(flags[1:length].any()) for flags in counted)
    loss = {"base": before, "nll": after, "kept": math.exp(before - after)}
    return {"length": length, "documents": min(read, recipe.evaluation.documents), "tokens": tokens} | loss


def held_out_vectors(
    recipe: Recipe, run: Run, model: PreTrainedModel, held_out: _HeldOut, *, reach: int | None
) -> list[dict[str, object]]:
    """Return the similarity of an encoder's vectors to those of its base, a row per length.

    Causal and sharded models are not measured.

    Args:
        recipe: as a whole.
        run: the run to finish.
        model: the finished model, reloaded.
        held_out: reads the documents.
        reach: tokens that it is meant for; None: those of its base.
    """
    if recipe.objective.predicts_next_token or run.services.evaluate is None or run.launch.shards:
        return []
    tokenizer, data = held_out(False)
    documents = data.held_out
    base = load_model(recipe)
    window = locate(unwrap(base)).geometry.original_length
    trained_lengths = (*recipe.data.lengths, *(stage.length for stage in recipe.stages if stage.length))
    longest = min(reach or window, max(window, *trained_lengths))
    lengths = vector_lengths(documents, window, longest, recipe.evaluation.documents)
    long = [document for document in documents if lengths and len(document) >= lengths[-1]]
    if not long:
        return []
    placed = unwrap(_on_device(model, recipe)), unwrap(_on_device(base, recipe))
    scores = near_the_base(*placed, tokenizer, long[: recipe.evaluation.documents], lengths)
    return [dataclasses.asdict(score) for score in scores]


def _held_out(recipe: Recipe, causal: bool) -> tuple[PreTrainedTokenizerBase, TokenData]:
    """Return the tokenizer, and data with the held-out documents, uncut."""
    tokenizer = load_recipe_tokenizer(recipe)
    plain = dataclasses.replace(recipe.data, packing="none", separator=None, cut=(1,))
    return tokenizer, build_data(plain, tokenizer, causal=causal, scheme_length=plain.length)


def _on_device(model: nn.Module, recipe: Recipe) -> Any:
    return model if on_cpu(recipe) else model.to("cuda" if torch.cuda.is_available() else "mps")


def finish(recipe: Recipe, run: Run, results: list[PhaseResult], saved: Path) -> dict[str, object]:
    """Verify and measure the saved model, write the report, and push if requested; return the report.

    The report of an earlier call is reused if it is of this training, by the identity in done.json and the results of
    the phases, and `evaluation` is unchanged; one without an identity, of an older release, is not. Then a second call
    repeats a push that failed, and pushes to another repository or branch.

    Args:
        recipe: as a whole.
        run: the run to finish.
        results: of its phases.
        saved: folder of the finished model.
    """
    fields = to_dict(recipe)
    path, identity = run.folder / REPORT, read_object(saved.parent / DONE, identity=dict)["identity"]
    report = read_object(path, recipe=dict) if path.is_file() else {"recipe": {}}
    is_same_training = report.get("identity") == identity and report.get("phases") == [asdict(each) for each in results]
    if not is_same_training or report["recipe"].get("evaluation") != fields["evaluation"]:
        report = _report(recipe, run, results, saved)
    destination, before = fields["training"], report["recipe"]["training"]
    is_pushed = "pushed" in report and all(destination[key] == before.get(key) for key in _DESTINATION)
    if recipe.training.push_to_hub and not is_pushed:
        training, trusted = recipe.training, recipe.model.trust_remote_code
        assert training.hub_model_id is not None
        private, branch = bool(training.hub_private_repo), training.hub_revision
        pushed = push(saved, training.hub_model_id, private=private, revision=branch, trust_remote_code=trusted)
        report |= {"pushed": pushed.url, "recipe": fields}  # `push` reads the report for the card
        _write(run, report)
    for line in as_markdown(report).splitlines():
        run.say(line)
    return report


def _report(recipe: Recipe, run: Run, results: list[PhaseResult], saved: Path) -> dict[str, object]:
    """Verify and measure the saved model, and write the report before anything is pushed."""
    model = load(saved, dtype="auto", trust_remote_code=recipe.model.trust_remote_code)
    swapped = getattr(unwrap(model), "_posswap", None) is not None
    plan = results[-1].plan
    held_out: _HeldOut = functools.cache(functools.partial(_held_out, recipe))
    nll = held_out_loss(recipe, run, model, held_out)
    seconds, tokens = (sum(getattr(result, name) for result in results) for name in ("train_runtime", "tokens"))
    local = expand_home(recipe.model.name).exists()
    report = {
        "model": str(recipe.model.name),
        "saved": str(saved.relative_to(run.folder)),
        "recipe": to_dict(recipe),
        "identity": read_object(saved.parent / DONE, identity=dict)["identity"],
        "processes": run.launch.processes,
        "phases": [asdict(result) for result in results],
        "train_runtime": round(seconds, 3),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        "verified": verify_swap(model).checks if swapped else {},
        "nll": nll,
        "kept": kept_of_base(recipe, run, model, tokens, held_out, nll),
        "vectors": held_out_vectors(recipe, run, model, held_out, reach=None if plan is None else plan["max_length"]),
        "training": leave_record(recipe, results, nll, saved, base=str(without_folder(recipe.model.name))).to_dict(),
        "card": {"base": None if local else recipe.model.name, "recipe": public_recipe(recipe)},
    }
    curves = [(r.name or "training", RunLog(run.folder / r.name / LOG).entries()) for r in results]
    if importlib.util.find_spec("matplotlib") is not None and any(
        "loss" in entry for _, entries in curves for entry in entries
    ):
        subtitle = f"{without_folder(recipe.model.name)}. {_swap_text(report)}"
        draw_losses(curves, run.folder / "loss.png", below=subtitle, unit=_UNITS[recipe.objective.kind])
    _write(run, report)
    return report


def _write(run: Run, report: dict[str, object]) -> None:
    write_text(run.folder / "report.md", as_markdown(report))
    write_json(run.folder / REPORT, report)


def public_recipe(recipe: Recipe) -> dict[str, object]:
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
    rows = ["| phase | steps | tokens | loss of the first step | last logged loss |", "|---|---|---|---|---|"]
    for phase in report["phases"]:
        losses = " | ".join("" if phase[n] is None else f"{phase[n]:.3f}" for n in ("first_loss", "last_loss"))
        rows.append(f"| {phase['name'] or 'training'} | {phase['steps']} | {phase['tokens']:,} | {losses} |")
    record = report.get("training")  # not in the reports of older runs
    recorded = "" if record is None else f", which records {TrainingRecord(**record)}"
    lines = [
        f"# {_swap_text(report)}",
        "",
        f"Started from {report['model']}; saved in `{report['saved']}`{recorded}.",
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


def _swap_text(report: dict[str, Any]) -> str:
    plan = report["phases"][-1]["plan"]
    if plan is None:
        return "No swap: the control"
    return f"Swapped to {plan['scheme']['name']}, for {plan['max_length']:,} tokens"
