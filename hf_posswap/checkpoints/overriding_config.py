"""The swap as values of a config, and what each program makes of them by its own rule."""

from __future__ import annotations

import copy
import dataclasses
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.rope_config import BY_TYPE, config_at, rope_settings
from hf_posswap.patching.edits.settings import EditConfig
from hf_posswap.patching.plan.swap_plan import SwapPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

Apply = Callable[[Any, dict[str, Any]], Any]
_OF_PROGRAMS: dict[str, set[str]] = {
    "dynamic": {"alpha"},
    "yarn": {"attn_factor", "extrapolation_factor", "apply_yarn_scaling"},
    "longrope": {"short_mscale", "long_mscale"},
}
"""By rope type, the keys that some program reads beyond those of transformers."""


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
    config: PreTrainedConfig
    part: str
    values: dict[str, Any]
    plan: SwapPlan

    @property
    def length(self) -> int:
        return self.plan.max_length

    def path_to(self, name: str) -> str:
        """Return the path of a value in the language model's config."""
        return f"{self.part}.{name}".lstrip(".")

    @property
    def wanted_rope(self) -> dict[str, dict[str, object]]:
        """The rope parameters after the swap, by the path of their sub-config."""
        split = ((path.rpartition("."), value) for path, value in self.values.items())
        return {parent: value for (parent, _, leaf), value in split if leaf == "rope_parameters"}

    @property
    def has_longrope_by_layer_type(self) -> bool:
        """Whether a layer type gets rope parameters of its own with the rope type longrope."""
        sets = (each for rope in self.wanted_rope.values() for each in rope.values() if isinstance(each, dict))
        return any(each.get("rope_type") == "longrope" for each in sets)

    @property
    def position_config(self) -> PositionConfig:
        """The positions after the swap, as the table of claims judges them."""
        swapped = copy.deepcopy(self.config)
        for path, value in self.values.items():
            parent, _, leaf = path.rpartition(".")
            setattr(config_at(swapped, parent), leaf, copy.deepcopy(value))
        config = position_config_of(config_at(swapped, self.part))
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
    values: dict[str, object]
    verdict: str
    why: str
    also: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def config_swap(
    name: str, scheme: str, max_length: int | None, skeleton: PreTrainedModel, plan: SwapPlan, target: str
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


def nested(values: Mapping[str, object]) -> dict[str, object]:
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


def by_transformers(config: PreTrainedConfig, values: Mapping[str, object]) -> object:
    """Return `config` as `from_pretrained` loads it with `values` as arguments."""
    return type(config).from_dict(config.to_dict(), **copy.deepcopy(values))


def by_vllm(config: PreTrainedConfig, values: Mapping[str, object]) -> PreTrainedConfig:
    """Return `config` as vLLM has it after `--hf-overrides`: whole dicts, merged ones in a sub-config."""
    applied = copy.deepcopy(config)
    for name, value in values.items():
        inner = getattr(applied, name, None)
        if isinstance(value, dict) and isinstance(inner, PreTrainedConfig):
            _merge(inner, value)
        else:
            setattr(applied, name, copy.deepcopy(value))
    return applied


def by_sglang(config: PreTrainedConfig, values: Mapping[str, object]) -> PreTrainedConfig:
    """Return `config` as SGLang has it after `--json-model-override-args`: rope parameters are merged."""
    applied = copy.deepcopy(config)
    for name, value in copy.deepcopy(values).items():
        current = getattr(applied, name, None)
        if isinstance(value, dict) and isinstance(current, PreTrainedConfig):
            current.update(value)
        elif name in ("rope_scaling", "rope_parameters") and isinstance(value, dict) and isinstance(current, dict):
            setattr(applied, name, {**current, **value})
        else:
            setattr(applied, name, value)
    return applied


def by_axolotl(config: PreTrainedConfig, values: Mapping[str, object]) -> object:
    """Return `config` as axolotl has it after `overrides_of_model_config`."""
    applied = copy.deepcopy(config)
    for name, value in copy.deepcopy(values).items():
        setattr(applied, name, value)
    return applied


def check_applied(
    apply: Apply,
    config: PreTrainedConfig,
    values: dict[str, object],
    wanted: dict[str, dict[str, object]],
    instead: str,
) -> object:
    """Return the config that a program has after its overrides, if its rope parameters are the wanted ones.

    Args:
        apply: the program's rule.
        config: of the unswapped model.
        values: the overrides, nested as the program takes them.
        wanted: the rope parameters that must result, by the path of their sub-config.
        instead: what to do where others result, as a sentence.

    Raises:
        UnsupportedSwapError: others result.
    """
    applied = apply(config, values)
    for path, rope in wanted.items():
        actual = getattr(config_at(applied, path), "rope_parameters", None)
        problem = _difference(rope, actual)
        if problem is not None:
            raise UnsupportedSwapError(f"overrides would not give this model the swap: {problem}. {instead}")
    return applied


def _difference(wanted: Any, actual: object) -> str | None:
    """Return how rope parameters differ from the wanted ones, keys that their type does not read aside; None: alike."""
    if not isinstance(actual, dict):
        return f"rope_parameters would be {actual!r}"
    if any(isinstance(value, dict) for value in wanted.values()):
        sets = (_difference(value, actual.get(name)) for name, value in wanted.items() if isinstance(value, dict))
        return next((problem for problem in sets if problem is not None), None)
    wrong = {name: actual.get(name) for name, value in wanted.items() if actual.get(name) != value}
    if wrong:
        name, value = next(iter(wrong.items()))
        return f"{name} would be {value!r} instead of {wanted[name]!r}"
    stale = {name for name, value in actual.items() if value is not None} - wanted.keys()
    rope_type = str(wanted.get("rope_type"))
    known = BY_TYPE.get(rope_type, frozenset()) | _OF_PROGRAMS.get(rope_type, set()) | {"partial_rotary_factor"}
    if read := sorted(stale & known):
        return f"{', '.join(read)} of the model's present rope parameters would stay: the program merges both"
    return None


def vllm_length(config: PreTrainedConfig) -> float:
    """Return the most tokens that vLLM 0.33 takes for `--max-model-len`, by the config of the language model."""
    names = (
        "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
        "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
    )  # fmt: skip
    lengths = [getattr(config, name, None) for name in names]
    most = min((length for length in lengths if isinstance(length, int)), default=math.inf)
    factor = 1.0
    if "gemma3" not in config.model_type:
        for rope in rope_settings(config):
            if rope.rope_type not in ("su", "longrope", "llama3", "yarn"):
                factor = rope.values.get("factor") or factor
    return (getattr(config, "model_max_length", None) or most) * factor


def sglang_length(config: PreTrainedConfig) -> float:
    """Return the most tokens that SGLang 0.5.23 takes for `--context-length`, by the config of the language model."""
    names = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
    length = next((value for name in names if (value := getattr(config, name, None)) is not None), 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    whole = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
    return int(length * (1 if whole else rope.get("factor") or 1))


def _merge(target: object, updates: dict[str, object]) -> None:
    for name, value in updates.items():
        inner = target.get(name) if isinstance(target, dict) else getattr(target, name, None)
        if isinstance(value, dict) and (isinstance(inner, dict) or hasattr(inner, "__dict__")):
            _merge(inner, value)
        elif isinstance(target, dict):
            target[name] = value
        else:
            setattr(target, name, value)
