"""What is compared: the base, a control that is only trained further, and copies with another position mechanism."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hf_posswap
from hf_posswap.errors import DataError, SchemeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.quickstart.base import Base, mean_tail, on_device
from hf_posswap.quickstart.settings import QuickstartSettings
from hf_posswap.training import TrainSettings, Windows, train
from hf_posswap.utils.atomic_io import read_json, write_json
from hf_posswap.utils.progress import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE, CONTROL = "base", "control"
_NOTE_FILE = "adaptation.json"
_SMALL_MODEL = 20_000_000
_WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class Variant:
    """One model of the comparison.

    Attributes:
        name: of its folder and its line in every table.
        scheme: what replaces the mechanism; None: the model's own stays.
        options: fields of the scheme.
        adapted: whether it is trained; only the base is not.
    """

    name: str
    scheme: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    adapted: bool = True


_FOR_A_TABLE = (
    Variant("rope", "rope"),
    Variant("alibi", "alibi"),
    Variant("sinusoidal", "sinusoidal"),
    Variant("learned", "learned", {"extend": "tile"}),
)
_FOR_ROTARY = (Variant("yarn", "yarn"), Variant("ntk", "ntk"), Variant("alibi", "alibi"), Variant("nope", "nope"))


def choose_variants(model: PreTrainedModel, max_length: int) -> tuple[list[Variant], dict[str, str]]:
    """Return what to compare for `model`, base and control first, and why the others were left out, by name.

    Args:
        model: unswapped.
        max_length: tokens that the swapped models are meant for.

    Raises:
        DataError: no swap is possible at all.
    """
    has_table = hf_posswap.describe_positions(model).sites["embedding"] != "-"
    kept, left_out = [], {}
    for variant in _FOR_A_TABLE if has_table else _FOR_ROTARY:
        assert variant.scheme is not None
        try:
            hf_posswap.plan_swap(model, variant.scheme, max_length=max_length, **variant.options)
            kept.append(variant)
        except (UnsupportedSwapError, UnsupportedModelError, SchemeError) as error:
            left_out[variant.name] = str(error)
    if not kept:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise DataError(f"no swap can be made in {type(model).__name__}: {reasons}")
    return [Variant(BASE, adapted=False), Variant(CONTROL), *kept], left_out


def adapted_model(
    variant: Variant,
    base: Base,
    windows: Windows,
    settings: QuickstartSettings,
    out: Path,
    reporter: Reporter,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return `variant` of the base, swapped and adapted now or in an earlier run, and a note of what was done.

    Args:
        variant: which.
        base: to copy; it stays as it is.
        windows: the batches, the same for every variant.
        settings: of the quickstart.
        out: its folder; the checkpoint goes to models/NAME.
        reporter: of progress.

    Raises:
        NumericError: the loss is no longer a number.
        CheckpointError: the folder cannot be written, or what an earlier run left there cannot be read.
    """
    if not variant.adapted:
        return base.model, {"scheme": None, "steps": 0}
    folder = out / "models" / variant.name
    if (folder / _NOTE_FILE).exists():
        note = read_json(folder / _NOTE_FILE)
        reporter.line(f"{variant.name}: adapted earlier, from {folder}")
        kept = hf_posswap.load(folder, trust_remote_code=settings.trust_remote_code)
        return on_device(kept, base.model.device), note
    model = copy.deepcopy(base.model)
    note = {"scheme": None, "route": "native"}
    if variant.scheme is not None:
        hf_posswap.patch_model(model, variant.scheme, max_length=max_length(base, settings), **variant.options)
        plan = hf_posswap.swap_plan(model)
        note = {"scheme": plan.scheme.to_dict(), "route": plan.route, "plan": plan.to_dict()}
        note["checks"] = dict(hf_posswap.verify_swap(model).checks)
    state = out / "parts" / f"{variant.name}.state.pt"
    trained_note = _adapt(model, variant.name, windows, settings, state, reporter)
    hf_posswap.save(model, folder, tokenizer=base.tokenizer, overwrite=True)
    write_json(folder / _NOTE_FILE, note | trained_note)  # last: it says that all is there
    state.unlink(missing_ok=True)
    return model, note | trained_note


def max_length(base: Base, settings: QuickstartSettings) -> int:
    """Return the longest length that is measured, in tokens."""
    return base.window * max(settings.multiples)


def learning_rate(model: PreTrainedModel, settings: QuickstartSettings) -> float:
    """Return the rate to adapt with: larger models want smaller steps; of the small GPT-2 its own rate is known."""
    if settings.learning_rate is not None:
        return settings.learning_rate
    if settings.model is None:
        return settings.base.learning_rate / 3
    return 1e-3 if sum(p.numel() for p in model.parameters()) <= _SMALL_MODEL else 1e-4


def _adapt(
    model: PreTrainedModel, name: str, windows: Windows, settings: QuickstartSettings, state: Path, reporter: Reporter
) -> dict[str, Any]:
    schedule = TrainSettings(
        steps=settings.steps,
        learning_rate=learning_rate(model, settings),
        warmup=round(_WARMUP_SHARE * settings.steps),
        seed=settings.seed,
    )
    with reporter.task(f"{name}: adapting", settings.steps) as task:

        def on_step(step: int, loss: float) -> None:
            task.skip(step - 1)
            task.advance(windows.batch * windows.length, loss)

        trained = train(model, windows, schedule, resume=state, on_step=on_step)
    loss = mean_tail(trained.losses)
    reporter.line(
        f"{name}: adapted {settings.steps} steps in {trained.seconds:.0f} s, loss {trained.losses[0]:.3f} -> {loss:.3f}"
    )
    return {
        "steps": settings.steps,
        "tokens": settings.steps * windows.batch * windows.length,
        "training": dataclasses.asdict(schedule),
        "first_loss": trained.losses[0],
        "last_loss": loss,
        "seconds": round(trained.seconds, 1),
    }
