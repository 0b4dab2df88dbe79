"""Which of transformers' model classes can be swapped, and why not the others: determined by planning each class."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import PosswapError, SchemeError, UnsupportedSwapError
from hf_posswap.families.base import FAMILIES
from hf_posswap.families.locating import REFUSED, locate
from hf_posswap.patching.inspect.describe import describe_positions, stand_ins
from hf_posswap.patching.plan.plan_swap import plan_swap
from hf_posswap.schemes.base import schemes_for
from hf_posswap.testing.tiny import language_models, tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ASKED: dict[str, dict[str, object]] = {"rope": {"base": 50000.0}, "yarn": {"factor": 4.0}, "alibi": {}, "nope": {}}
"""The schemes that are planned for each text class, with their options; for vision classes, all vision schemes are."""


@dataclass(frozen=True)
class ClassEntry:
    """One model class of transformers.

    Attributes:
        name: of the class.
        model_types: for which the Auto classes select it.
        family: of the class; None: there is none.
        native: its native position mechanism; None: unknown.
        routes: "native", "plugin" or "no" for each planned scheme; empty without a family.
        reason: why it cannot be swapped at all, or why a scheme is "no"; None: all schemes work.
    """

    name: str
    model_types: tuple[str, ...]
    family: str | None
    native: str | None
    routes: dict[str, str]
    reason: str | None

    @property
    def supported(self) -> bool:
        """Whether it supports any scheme."""
        return any(route != "no" for route in self.routes.values())

    def to_dict(self) -> dict[str, object]:
        """Return the entry as JSON."""
        return asdict(self) | {"model_types": list(self.model_types), "supported": self.supported}


def census(names: Iterable[str] | None = None, *, every_scheme: bool = False) -> list[ClassEntry]:
    """Return an entry for each class that transformers' Auto maps name for causal, masked and seq2seq language models.

    Each class is built tiny, on the meta device, and swaps are planned for it; nothing is downloaded or run.

    Args:
        names: of the classes; None: all of them.
        every_scheme: plan every scheme that suits a class, with example options; otherwise those in `ASKED`.

    Example:
        >>> entry = census(["LlamaForCausalLM"])[0]
        >>> entry.family, entry.routes
        ('rotary', {'rope': 'native', 'yarn': 'native', 'alibi': 'plugin', 'nope': 'native'})
    """
    types_of = language_models()
    return [_entry(name, types_of.get(name, ()), every_scheme) for name in sorted(types_of if names is None else names)]


def classes_named(part: str) -> list[str]:
    """Return the classes whose name, model type or family contains `part`, whatever its case, hyphens and underscores.

    Example:
        >>> classes_named("gpt-neox-jap")
        ['GPTNeoXJapaneseForCausalLM']
    """
    wanted = _folded(part)
    types_of = language_models()
    matching = {name for name, types in types_of.items() if any(wanted in _folded(word) for word in (name, *types))}
    of_family = [
        model_type for name, family in FAMILIES.items() if wanted in _folded(name) for model_type in family.model_types
    ]
    matching |= {name for name, types in types_of.items() if set(types) & set(of_family)}
    return sorted(matching) if wanted else []


def known_names() -> list[str]:
    """Return the model types and families by which `classes_named` finds classes."""
    types = {model_type for types in language_models().values() for model_type in types}
    return sorted(types | {name for name, _ in FAMILIES.items()})


def _folded(name: str) -> str:
    return name.casefold().replace("-", "").replace("_", "")


def image_classes() -> list[str]:
    """Return the names of all classes of transformers in the vision families.

    Example:
        >>> "ViTForImageClassification" in image_classes()
        True
    """
    from transformers import CONFIG_MAPPING

    names = set()
    for _, family in FAMILIES.items():
        for model_type in family.model_types if any(stack.image for stack in family.parts) else ():
            home = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
            code = importlib.import_module(home)
            classes = {name: getattr(code, name) for name in code.__all__ if not name.endswith("PreTrainedModel")}
            configs = {name: getattr(cls, "config_class", None) for name, cls in classes.items()}
            names |= {name for name, cls in configs.items() if getattr(cls, "model_type", None) in family.model_types}
    return sorted(names)


def _entry(name: str, model_types: tuple[str, ...], every_scheme: bool) -> ClassEntry:
    try:
        model = tiny_model(name)
    except Exception as error:  # arbitrary code of the class
        known = (REFUSED[model_type] for model_type in model_types if model_type in REFUSED)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        why = next(known, f"transformers cannot build a small one: {reason}")
        return ClassEntry(name, model_types, None, None, {}, why)
    try:
        family, native = locate(model).family.name, describe_positions(model).native
    except PosswapError as error:
        return ClassEntry(name, model_types, None, None, {}, _reason(error, model))
    routes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for scheme, options in _schemes_to_plan(model, every_scheme).items():
        try:
            routes[scheme] = str(plan_swap(model, scheme, **options).route)
        except (UnsupportedSwapError, SchemeError) as error:  # a scheme may not fit the class's own rotation
            routes[scheme] = "no"
            reasons.setdefault(_reason(error, model), scheme)
    why = " ".join(f"{scheme}: {reason}" for reason, scheme in reasons.items())
    return ClassEntry(name, model_types, family, native, routes, why or None)


def _schemes_to_plan(model: PreTrainedModel, every_scheme: bool) -> dict[str, dict[str, Any]]:
    """Return the schemes to plan for `model`, with their options."""
    sites = locate(model)
    images = sites.main.inputs == "images"
    if every_scheme:
        return {name: stand_ins(name, sites.geometry) for name in schemes_for(sites.main.inputs)}
    return dict.fromkeys(schemes_for("images"), {}) if images else ASKED


def _reason(error: PosswapError, model: PreTrainedModel) -> str:
    """Return the specific part of an error message."""
    text = str(error).removeprefix(f"{type(model).__name__}: ")
    text = text.removeprefix(f"model type {model.config.model_type!r} is not supported: ")
    return text.partition(" What works:")[0].partition("\n")[0]
