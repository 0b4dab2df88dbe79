"""What each program wants to be pasted."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.exports.claims import usual_yarn
from hf_posswap.checkpoints.exports.mechanism import PositionConfig
from hf_posswap.checkpoints.exports.rules import CLAIMS, Judgement, filled, judge, spell_rope
from hf_posswap.checkpoints.overriding_config import (
    ConfigSwap,
    Pasted,
    by_axolotl,
    by_sglang,
    by_transformers,
    by_vllm,
    check_applied,
    nested,
    sglang_length,
    vllm_length,
)
from hf_posswap.compat.transformers_attention import runs_longrope_by_layer_type
from hf_posswap.errors import UnsupportedModelError, UnsupportedSwapError
from hf_posswap.families.rope_config import config_at

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LENGTH = "max_position_embeddings"
_AXOLOTL = "axolotl 0.19.0 installs transformers 5.16.1"
_SAME_CODE = "the program loads the model with transformers, so it computes what patch_model computes"


def transformers(swap: ConfigSwap) -> Pasted:
    """Return the lines that load the unswapped model with the swap."""
    notes: tuple[str, ...] = ()
    if swap.has_longrope_by_layer_type:
        if not runs_longrope_by_layer_type():
            from transformers import __version__ as installed

            advice = "Install transformers 5.21 or newer, or use"
            raise UnsupportedSwapError(_no_longrope(swap, f"transformers {installed} is installed", advice))
        notes = ("transformers 5.21 or newer: older ones stop at the second text beyond the original length.",)
    values = nested(swap.values)
    check_applied(by_transformers, swap.config, values, swap.wanted_rope, swap.instead)
    lines = [f"    {name}={_python(value)}," for name, value in values.items()]
    text = "\n".join(
        [
            f"from transformers import {swap.model_class}",
            "",
            f"model = {swap.model_class}.from_pretrained(",
            f"    {_python(swap.name)},",
            *lines,
            ")",
        ]
    )
    return Pasted(text, values, "exact", "the same code as patch_model's native swap", notes=notes)


def _no_longrope(swap: ConfigSwap, reason: str, advice: str) -> str:
    """Return the message for a transformers that cannot run longrope by layer type, which ends with yarn or ntk."""
    return (
        f"{reason}, which cannot run longrope in a {swap.plan.model}, whose layer types have rope parameters of their "
        f"own: the second text beyond the original length raises UnboundLocalError. {advice} yarn or ntk."
    )


def vllm(swap: ConfigSwap) -> Pasted:
    """Return the command that serves the unswapped model with the swap."""
    pasted = _served("vllm", swap, "--hf-overrides")
    older = _older_vllm(swap) if pasted.verdict == "exact" else None
    return pasted if older is None else dataclasses.replace(pasted, also={"vLLM 0.11.2 and older": older})


def sglang(swap: ConfigSwap) -> Pasted:
    """Return the command that serves the unswapped model with the swap."""
    return _served("sglang", swap, "--json-model-override-args")


_RULES: dict[str, tuple[Callable[..., PreTrainedConfig], Callable[[PreTrainedConfig], float]]] = {
    "vllm": (by_vllm, vllm_length),
    "sglang": (by_sglang, sglang_length),
}


def _served(target: str, swap: ConfigSwap, option: str) -> Pasted:
    position_config = swap.position_config
    verdict, why, command, judgement = _judged(target, position_config)
    if verdict == "impossible":
        raise UnsupportedSwapError(f"{target} cannot run {swap.plan.scheme.name} in a {swap.plan.model}: {why}")
    values, rope_path, length_path = dict(swap.values), swap.path_to("rope_parameters"), swap.path_to(_LENGTH)
    if judgement is not None:
        values[rope_path] = spell_rope(values[rope_path], position_config, judgement)
    apply, most = _RULES[target]
    wanted = swap.wanted_rope | {swap.part: values[rope_path]}
    lengths = [None if judgement is None else judgement.spelling.config.get(_LENGTH)]
    lengths += [values.get(length_path)]
    if position_config.rope_type != "dynamic":  # its angles depend on that length
        lengths.append(swap.length)
    for length in dict.fromkeys(lengths):
        tried = {path: value for path, value in values.items() if path != length_path}
        if length is not None and length != config_at(swap.config, length_path):
            tried[length_path] = length
        applied = check_applied(apply, swap.config, nested(tried), wanted, swap.instead)
        if most(config_at(applied, swap.part)) >= swap.length:
            break
    else:
        raise UnsupportedSwapError(
            f"{target} would take at most {most(config_at(applied, swap.part)):g} tokens of this config with "
            f"{swap.plan.scheme.name}, not {swap.length}: it goes by the lengths in the model's config. Use yarn or "
            f"ntk, or posswap patch and posswap export --target {target}."
        )
    given = nested(tried)
    line = f"{filled(command, position_config, swap.name)} {option} {shlex.quote(json.dumps(given))}"
    notes = () if not swap.part else (f"Judged as the language model inside ({position_config.model_type}).",)
    return Pasted(line, given, verdict, why, notes=notes)


def _judged(target: str, position_config: PositionConfig) -> tuple[str, str, str, Judgement | None]:
    """Return the verdict, the reason and the command of the table of claims; "unknown" where it has no row."""
    try:
        judgement = judge(target, position_config)
    except UnsupportedModelError as error:
        return "unknown", f"{error} Compare its answers with transformers first.", CLAIMS[target][-1].command, None
    why = judgement.why.replace(" It is, in the exported config.", "")
    return judgement.verdict, f"{why} ({judgement.claim.source})", judgement.claim.command, judgement


def _older_vllm(swap: ConfigSwap) -> str | None:
    """Return the command for vLLM with the spelling of transformers 4; None where that has none."""
    position_config, rope = swap.position_config, dict(swap.values[swap.path_to("rope_parameters")])
    rope_types = ("default", "linear", "yarn", "llama3")
    if swap.part or position_config.rope_set or position_config.rope_type not in rope_types or "mrope_section" in rope:
        return None
    if position_config.rope_type == "yarn" and (
        position_config.rope.get("truncate") is False
        or abs(position_config.attention - position_config.usual_attention) > 1e-6
    ):
        return None  # it reads neither
    theta = rope.pop("rope_theta")
    rope.pop("partial_rotary_factor", None)
    for unread in ("attention_factor", "truncate"):
        rope.pop(unread, None)
    multiplied = position_config.rope_type in ("linear", "yarn")  # by the factor, from the original length
    length = {} if multiplied else {"max_position_embeddings": swap.length}
    given = {"rope_scaling": None if rope == {"rope_type": "default"} else rope, "rope_theta": theta, **length}
    command = filled(CLAIMS["vllm"][-1].command, position_config, swap.name)
    return f"{command} --hf-overrides {shlex.quote(json.dumps(given))}"


def trl(swap: ConfigSwap) -> Pasted:
    """Return TRL's arguments in Python, and those of its command."""
    loaded = transformers(swap)
    values = loaded.values
    text = "\n".join(
        [
            "from trl import SFTConfig, SFTTrainer",
            "",
            "args = SFTConfig(",
            f"    max_length={swap.length},",
            f"    model_init_kwargs={_python(values)},",
            ")",
            f"# trainer = SFTTrainer({_python(swap.name)}, args=args, train_dataset=...)",
        ]
    )
    command = shlex.join(
        ["trl", "sft", "--model_name_or_path", swap.name, "--max_length", str(swap.length)]
        + ["--model_init_kwargs", json.dumps(values)]
    )
    notes = ("Give the trainer the model's name, as above: model_init_kwargs are not used for a model object.",)
    return Pasted(text, values, "exact", _SAME_CODE, {"the command": command}, (*loaded.notes, *notes))


def axolotl(swap: ConfigSwap) -> Pasted:
    """Return axolotl's YAML."""
    if swap.part:
        raise UnsupportedSwapError(
            f"axolotl cannot override {swap.part}, where a {swap.plan.model} has its rope parameters: it would replace "
            f"that config by a plain dict. Save the model with {swap.patched}, and set base_model: DIR."
        )
    if swap.has_longrope_by_layer_type:
        raise UnsupportedSwapError(_no_longrope(swap, _AXOLOTL, "Use"))
    if swap.position_config.rope_type == "dynamic" and swap.length > swap.position_config.original:  # type: ignore[operator]
        raise UnsupportedSwapError(
            "axolotl sets max_position_embeddings to sequence_len, and transformers' rope type dynamic takes the "
            "original length from there: longer texts would have other angles. Use yarn or ntk."
        )
    check_applied(by_axolotl, swap.config, swap.values, swap.wanted_rope, swap.instead)
    given = {"base_model": swap.name, "sequence_len": swap.length, "overrides_of_model_config": swap.values}
    return Pasted(_yaml(given), nested(swap.values), "exact", _SAME_CODE)


def llamafactory(swap: ConfigSwap) -> Pasted:
    """Return LLaMA-Factory's YAML, where what it computes itself is the swap."""
    position_config = swap.position_config
    config, rope = config_at(swap.config, swap.part), position_config.rope
    present = getattr(config, "rope_parameters", None) or {}
    old = present.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = float(math.ceil(swap.length / old))
    computed = f"With cutoff_len: {swap.length} it computes a factor of {factor:g} from {old} tokens"
    problem = _unlike_llamafactory(swap, rope, present, old, factor)
    if problem is not None:
        raise UnsupportedSwapError(
            f"LLaMA-Factory has no key for this swap: {problem}. {computed}. Save the model with {swap.patched}, and "
            f"set model_name_or_path: DIR, cutoff_len: {swap.length}, without rope_scaling."
        )
    given = {"model_name_or_path": swap.name, "rope_scaling": position_config.rope_type, "cutoff_len": swap.length}
    notes = (
        f"{computed}; another cutoff_len changes the factor.",
        "With transformers 5 LLaMA-Factory 0.9.5 stops at rope_scaling: install transformers 4, or save the model with "
        f"{swap.patched} and train DIR without rope_scaling.",
    )
    why = "it computes these parameters itself"
    return Pasted(_yaml(given, flow=False), nested(swap.values), "exact", why, notes=notes)


def _unlike_llamafactory(
    swap: ConfigSwap, rope: dict[str, Any], present: dict[str, object], old: int, factor: float
) -> str | None:
    """Return how the swap differs from what LLaMA-Factory computes; None: it does not."""
    rope_type, position_config = rope.get("rope_type"), swap.position_config
    if swap.part or position_config.rope_set:
        return f"it sets rope_scaling of the whole config, and a {swap.plan.model} has rope parameters further in"
    if rope_type == "dynamic":
        return "its dynamic takes the original length from max_position_embeddings, which it multiplies by the factor"
    if rope_type not in ("linear", "yarn", "llama3"):
        return f"it knows linear, yarn and llama3, not {swap.plan.scheme.name}"
    if swap.length <= old:
        return f"it disables scaling where cutoff_len is at most the model's {old} tokens"
    kept = ("rope_theta", "partial_rotary_factor")
    if any(name in rope and rope[name] != present.get(name) for name in kept):
        return f"it keeps the model's base and rotated share, and this swap has {rope.get('rope_theta')}"
    if float(rope["factor"]) != factor:
        return f"this swap has a factor of {rope['factor']:g}"
    if rope.get("original_max_position_embeddings", old) != old:
        return f"this swap has an original length of {rope['original_max_position_embeddings']}"
    if rope_type == "yarn" and not usual_yarn(position_config):
        return "it has no key for YaRN's betas, attention factor or truncate"
    if rope_type == "llama3" and (rope["low_freq_factor"], rope["high_freq_factor"]) != (1.0, 4.0):
        return "it fixes llama3's low_freq_factor at 1 and high_freq_factor at 4"
    return None


def verl(swap: ConfigSwap) -> Pasted:
    """Return the command that writes the config, and verl's keys for the trainer and the rollout."""
    served, loaded = vllm(swap), transformers(swap)
    folder = f"{swap.name.rstrip('/').rpartition('/')[2]}-{swap.plan.scheme.name}-config"
    arguments = ", ".join([_python(swap.name), *(f"{name}={_python(value)}" for name, value in loaded.values.items())])
    saved = f"AutoConfig.from_pretrained({arguments}).save_pretrained({_python(folder)})"
    code = f"from transformers import AutoConfig; {saved}"
    keys = [
        f"actor_rollout_ref.model.path={_hydra(swap.name)}",
        f"actor_rollout_ref.model.hf_config_path={_hydra(folder)}",
        f"actor_rollout_ref.rollout.max_model_len={swap.length}",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides={_hydra(json.dumps(served.values))}",
    ]
    text = f"{shlex.join(['python', '-c', code])}\n{shlex.join(['python', '-m', 'verl.trainer.main_ppo', *keys])}"
    notes = (
        *loaded.notes,
        "model.override_config cannot hold rope parameters: verl 0.9.1 raises AttributeError.",
        f"Copy the model's generation_config.json into {folder} if it has one: verl reads it there.",
        "engine_kwargs.vllm.hf_overrides replaces the overrides that verl's own quantization sets.",
        "A critic has its own critic.model.path and critic.model.hf_config_path.",
    )
    return Pasted(text, loaded.values, served.verdict, f"in the rollout: {served.why}", notes=notes)


def _python(value: object) -> str:
    """Return `value` as Python, with double quotes: inside a shell's single ones they stay readable."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(name)}: {_python(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_python, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _hydra(value: str) -> str:
    """Return `value` for Hydra, which reads a quoted value as a string."""
    if re.fullmatch(r"[\w./-]*[A-Za-z_/-][\w./-]*", value) and value not in ("null", "true", "false"):
        return value
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)  # a backslash counts in front of a quote alone
    ending = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * ending}'"


def _yaml(values: Mapping[str, object], *, flow: bool | None = None) -> str:
    import yaml

    return str(yaml.safe_dump(values, sort_keys=False, default_flow_style=flow, width=100)).rstrip()


WRITERS: dict[str, Callable[[ConfigSwap], Pasted]] = {
    "transformers": transformers,
    "vllm": vllm,
    "sglang": sglang,
    "trl": trl,
    "verl": verl,
    "axolotl": axolotl,
    "llamafactory": llamafactory,
}
"""The writer of each program."""
