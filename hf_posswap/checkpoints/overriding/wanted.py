"""The swap as values of a config, and what a program's writer returns."""

from __future__ import annotations

import copy
import dataclasses
import shlex
from dataclasses import dataclass, field
from typing import Any

from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.rope_config import config_at
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.plan.swap_plan import SwapPlan


@dataclass(frozen=True)
class ConfigSwap:
    """A swap that the config of the unswapped model can express.

    Attributes:
        name: of the model, for commands.
        scheme: as text, for commands.
        max_length: as requested, in tokens; None: what the scheme or the model reaches.
        model_class: the model's class in transformers, by name.
        config: of the unswapped model.
        part: path of the language model's config in it; "" if it is the config itself.
        values: config values of the swap, by path.
        plan: the swap's plan.
    """

    name: str
    scheme: str
    max_length: int | None
    model_class: str
    config: Any
    part: str
    values: dict[str, Any]
    plan: SwapPlan

    @property
    def length(self) -> int:
        return self.plan.max_length

    @property
    def rope_path(self) -> str:
        return f"{self.part}.rope_parameters".lstrip(".")

    @property
    def length_path(self) -> str:
        return f"{self.part}.max_position_embeddings".lstrip(".")

    @property
    def wanted_rope(self) -> dict[str, dict[str, Any]]:
        """The rope parameters after the swap, by the path of their sub-config."""
        split = ((path.rpartition("."), value) for path, value in self.values.items())
        return {parent: value for (parent, _, leaf), value in split if leaf == "rope_parameters"}

    @property
    def has_longrope_by_layer_type(self) -> bool:
        """Whether a layer type gets rope parameters of its own with the rope type longrope."""
        sets = (each for rope in self.wanted_rope.values() for each in rope.values() if isinstance(each, dict))
        return any(each.get("rope_type") == "longrope" for each in sets)

    @property
    def swapped_config(self) -> Any:
        """A copy of the config with the values of the swap."""
        config = copy.deepcopy(self.config)
        for path, value in self.values.items():
            parent, _, leaf = path.rpartition(".")
            setattr(config_at(config, parent), leaf, copy.deepcopy(value))
        return config

    @property
    def position_config(self) -> PositionConfig:
        """The positions after the swap, as the table of claims judges them."""
        config = position_config_of(config_at(self.swapped_config, self.part))
        original = config.original or min(self.plan.sites.geometry.original_length, self.length)
        whole = self.config
        dtype = getattr(whole, "dtype", None)
        return dataclasses.replace(
            config,
            length=self.length,
            original=original,
            scheme=self.plan.scheme.name,
            settings=self.plan.scheme.to_dict(),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            architecture=next(iter(getattr(whole, "architectures", None) or ()), "") or self.model_class,
        )

    @property
    def instead(self) -> str:
        """What to do where a program has no setting for the swap, as a sentence."""
        return f"Save the model with {self.patched}, and give the program that folder: it is a stock checkpoint."

    @property
    def patched(self) -> str:
        """The command that saves the swapped model, which every program then loads by its folder."""
        how = [] if self.max_length is None else ["--max-length", str(self.max_length)]
        return shlex.join(["posswap", "patch", self.name, self.scheme, *how, "-o", "DIR"])


@dataclass(frozen=True)
class Pasted:
    """What a program's writer returns.

    Attributes:
        text: to paste.
        values: overrides of the config, nested.
        verdict: as in the table of claims, or "unknown".
        why: the reason.
        also: text for other versions or commands, by what it is for.
        notes: for the user.
    """

    text: str
    values: dict[str, Any]
    verdict: str
    why: str
    also: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def config_swap(
    name: str, scheme: str, max_length: int | None, skeleton: Any, plan: SwapPlan, target: str
) -> ConfigSwap:
    """Return the swap as config values.

    Raises:
        UnsupportedSwapError: a config alone does not express it.
    """
    values = {edit.path: edit.value for edit in plan.edits if isinstance(edit, EditConfig)}
    model_class, part = type(skeleton).__name__, plan.sites.main.config
    swap = ConfigSwap(name, scheme, max_length, model_class, skeleton.config, part, values, plan)
    if plan.route != "native":
        raise UnsupportedSwapError(
            f"no setting of {target} expresses {plan.scheme.name} in a {plan.model}: it needs hf_posswap wherever the "
            f"model runs. Save it with {swap.patched}, then {_what_next(target)}"
        )
    others = dict.fromkeys(edit.path for edit in plan.edits if edit.site not in ("rotary", "config"))
    if others or not swap.wanted_rope:
        location = next(iter(others), "nothing in the config")
        raise UnsupportedSwapError(
            f"no setting of {target} expresses {plan.scheme.name} in a {plan.model}: it changes {location}, which a "
            f"config does not hold. {swap.instead}"
        )
    return swap


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return values by path as a mapping of mappings.

    Example:
        >>> nested({"text_config.max_position_embeddings": 64, "x": 1})
        {'text_config': {'max_position_embeddings': 64}, 'x': 1}
    """
    whole: dict[str, Any] = {}
    for path, value in values.items():
        *parents, leaf = path.split(".")
        inner = whole
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = copy.deepcopy(value)
    return whole


def _what_next(target: str) -> str:
    if target in ("vllm", "sglang"):
        return f"ask posswap export DIR --target {target} whether it serves that folder (see the page Serving)."
    if target == "transformers":
        return "load it with hf_posswap.load(DIR)."
    return "train it in a process that runs import hf_posswap (the page In your own loop), not by a setting."
