"""What each program makes of a checkpoint's positions, and what its config.json must say for it.

The verdicts are rows of the table in claims_table; here is how each program spells what transformers spells its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_posswap.checkpoints.exports.claims import Claim, Verdict
from hf_posswap.checkpoints.exports.claims_table import claim_for, filled
from hf_posswap.checkpoints.exports.mechanism import Stated


@dataclass(frozen=True)
class Spelling:
    """What a program's config must say.

    Attributes:
        rope: values to write into the rope parameters; None takes one out.
        config: values to write beside them; None takes one out.
    """

    rope: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """What a program makes of a mechanism.

    Attributes:
        claim: the row of the table that is about it.
        why: of the row, with the numbers of this checkpoint.
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


def judge(target: str, stated: Stated) -> Judgement:
    """Return what the program `target` makes of a mechanism.

    Raises:
        UnsupportedModelError: as `claim_for`.
    """
    claim = claim_for(target, stated)
    spelled = Spelling() if claim.verdict == "impossible" else TARGETS[target](stated)
    return Judgement(claim, filled(claim.why, stated), spelled)


def _as_it_is(stated: Stated) -> Spelling:
    return Spelling()


def _vllm(stated: Stated) -> Spelling:
    match stated.rope_type:
        case "linear":
            return _multiplied(stated)
        case "yarn":
            return Spelling({"attention_factor": stated.attention})
        case "longrope":
            return _mscale(stated)
    return Spelling()


def _sglang(stated: Stated) -> Spelling:
    match stated.rope_type:
        case "linear":
            return _multiplied(stated)
        case "yarn":
            factor = stated.attention / stated.usual_attention
            return Spelling({"attn_factor": factor, "mscale": None, "mscale_all_dim": None})
        case "longrope":
            return _mscale(stated)
    return Spelling()


def _old_spelling(stated: Stated) -> Spelling:
    """Return the old spelling of the rope parameters, for programs that read no other; it says nothing else."""
    if stated.kind != "rope":
        return Spelling(config={"n_ctx": stated.length} if stated.model_type == "gpt2" else {})
    shared = {
        "rope_theta": stated.rope.get("rope_theta"),
        "partial_rotary_factor": stated.rope.get("partial_rotary_factor"),
    }
    scaling = None if stated.rope_type == "default" else stated.rope | {"type": stated.rope_type}
    return Spelling(config=shared | {"rope_scaling": scaling})


def _multiplied(stated: Stated) -> Spelling:
    """Spell "linear" for a program that takes max_position_embeddings times the factor for the context length."""
    known = stated.original is not None and stated.scheme is not None
    return Spelling(config={"max_position_embeddings": stated.original} if known else {})


def _mscale(stated: Stated) -> Spelling:
    """Spell "longrope" for a program that computes the attention factor itself unless it is told otherwise."""
    return Spelling({"short_mscale": stated.attention, "long_mscale": stated.attention})


TARGETS: dict[str, Callable[[Stated], Spelling]] = {
    "transformers": _as_it_is,
    "vllm": _vllm,
    "sglang": _sglang,
    "llamacpp": _old_spelling,
    "tgi": _old_spelling,
    "onnx": _as_it_is,
    "torch": _as_it_is,
    "tei": _as_it_is,
    "sentence-transformers": _as_it_is,
}
"""The programs that `export` knows, each with its spelling."""
