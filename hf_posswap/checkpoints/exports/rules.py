"""How each program reads a checkpoint's positions, and what config.json must say for it.

The verdicts are rows of claims_table; this module has each program's spelling of transformers' settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_posswap.checkpoints.exports.claims import Claim, Verdict
from hf_posswap.checkpoints.exports.claims_table import claim_for, filled
from hf_posswap.checkpoints.exports.mechanism import PositionConfig


@dataclass(frozen=True)
class Spelling:
    """What a program's config must say.

    Attributes:
        rope: values to set in the rope parameters; None removes one.
        config: values to set in the config itself; None removes one.
    """

    rope: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """How a program runs a mechanism.

    Attributes:
        claim: its row of the table.
        why: the row's reason, with the numbers of this checkpoint.
        spelling: what the config must say.
    """

    claim: Claim
    why: str
    spelling: Spelling

    @property
    def verdict(self) -> Verdict:
        return self.claim.verdict

    @property
    def rope(self) -> dict[str, Any]:
        return self.spelling.rope

    @property
    def config(self) -> dict[str, Any]:
        return self.spelling.config


def judge(target: str, position_config: PositionConfig) -> Judgement:
    """Return how the program `target` runs a mechanism.

    Raises:
        UnsupportedModelError: as `claim_for`.
    """
    claim = claim_for(target, position_config)
    spelled = Spelling() if claim.verdict == "impossible" else TARGETS[target](position_config)
    return Judgement(claim, filled(claim.why, position_config), spelled)


def spell_rope(parameters: Any, position_config: PositionConfig, judgement: Judgement) -> dict[str, Any]:
    """Return the rope parameters `parameters` of a config as a program wants them; of other layer types as they are."""
    rope = {name: value for name, value in (position_config.rope | judgement.rope).items() if value is not None}
    return parameters | {position_config.rope_set: rope} if position_config.rope_set else rope


def _unchanged(position_config: PositionConfig) -> Spelling:
    return Spelling()


def _vllm(position_config: PositionConfig) -> Spelling:
    match position_config.rope_type:
        case "linear" if position_config.model_type != "gemma3_text":  # of those it takes the length as it is
            return _multiplied(position_config)
        case "yarn":
            return Spelling({"attention_factor": position_config.attention})
        case "longrope":
            return _mscale(position_config)
    return Spelling()


def _sglang(position_config: PositionConfig) -> Spelling:
    match position_config.rope_type:
        case "linear":
            return _multiplied(position_config)
        case "yarn":
            factor = position_config.attention / position_config.usual_attention
            return Spelling({"attn_factor": factor, "mscale": None, "mscale_all_dim": None})
        case "longrope":
            return _mscale(position_config)
    return Spelling()


def _old_spelling(position_config: PositionConfig) -> Spelling:
    """Return transformers 4's spelling of the rope parameters, for programs that read only that."""
    if position_config.rope_set:  # it had none for layer types
        return Spelling()
    if position_config.kind != "rope":
        return Spelling(config={"n_ctx": position_config.length} if position_config.model_type == "gpt2" else {})
    shared = {
        "rope_theta": position_config.rope.get("rope_theta"),
        "partial_rotary_factor": position_config.rope.get("partial_rotary_factor"),
    }
    scaling = (
        None if position_config.rope_type == "default" else position_config.rope | {"type": position_config.rope_type}
    )
    return Spelling(config=shared | {"rope_scaling": scaling})


def _multiplied(position_config: PositionConfig) -> Spelling:
    """Spell "linear" for a program that takes max_position_embeddings times the factor for the context length."""
    known = position_config.original is not None and position_config.scheme is not None
    return Spelling(config={"max_position_embeddings": position_config.original} if known else {})


def _mscale(position_config: PositionConfig) -> Spelling:
    """Spell "longrope" for a program that computes the attention factor itself unless it is given."""
    return Spelling({"short_mscale": position_config.attention, "long_mscale": position_config.attention})


TARGETS: dict[str, Callable[[PositionConfig], Spelling]] = {
    "transformers": _unchanged,
    "vllm": _vllm,
    "sglang": _sglang,
    "llamacpp": _old_spelling,
    "tgi": _old_spelling,
    "onnx": _unchanged,
    "torch": _unchanged,
    "tei": _unchanged,
    "sentence-transformers": _unchanged,
}
"""The programs that `export` knows, each with its spelling."""
