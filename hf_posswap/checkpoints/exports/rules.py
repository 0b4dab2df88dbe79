"""What each program makes of each rope type, and what its config must say: one function a program.

Read in the sources of vLLM 0.33.0 and SGLang 0.5.23 (their rotary embeddings, and how they find the context length),
and in documentation for the others. None of the four was run; what was run is the `gguf` package, see gguf_keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_posswap.checkpoints.exports.mechanism import Stated

Verdict = Literal["exact", "approximate", "impossible"]
_CLOSE = 1e-6
_ALWAYS = "the same angles at every length"


@dataclass(frozen=True)
class Judgement:
    """What a program makes of a mechanism.

    Attributes:
        verdict: "exact": what transformers computes; "approximate": near it, or equal up to some length;
            "impossible": it refuses, or computes something else.
        why: in words.
        rope: values to write into the rope parameters; None takes one out.
        config: values to write beside them; None takes one out.
    """

    verdict: Verdict
    why: str
    rope: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def for_transformers(stated: Stated) -> Judgement:
    """Judge transformers itself."""
    if stated.kind == "plugin":
        why = "with hf_posswap, or with trust_remote_code=True where the checkpoint brings its code; refused without."
        return Judgement("exact", why)
    if stated.rope_type in ("dynamic", "longrope") and not stated.fixed_list:
        return Judgement("exact", f"the same code; beyond the original length {stated.rope_type} differs with a cache.")
    return Judgement("exact", "the same code.")


def for_vllm(stated: Stated) -> Judgement:
    """Judge vLLM 0.33.0."""
    match stated.rope_type:
        case "linear":
            return _linear(stated, "vLLM")
        case "dynamic":
            why = "vLLM takes one base for all lengths, and without max_trained_positions it is the unscaled one."
            return Judgement("approximate", f"{why} Equal within the original length; use yarn or ntk instead.")
        case "yarn":
            why = f"{_ALWAYS}; releases before about September 2026 drop attention_factor and mscale."
            return Judgement("exact", why, rope={"attention_factor": stated.attention})
        case "longrope":
            return _longrope(stated, "vLLM takes the long factors for all texts where max_model_len is beyond them.")
        case "proportional":
            return _proportional(stated, "vLLM refuses a share of 0")
    return Judgement("exact", _ALWAYS)


def for_sglang(stated: Stated) -> Judgement:
    """Judge SGLang 0.5.23."""
    match stated.rope_type:
        case "linear":
            return _linear(stated, "SGLang")
        case "dynamic":
            why = "SGLang takes one base for all lengths. Use yarn or ntk instead."
            return Judgement("approximate", why)
        case "yarn":
            factor = stated.attention / stated.usual_attention
            why = f"{_ALWAYS}; SGLang knows attn_factor, relative to 0.1 ln s + 1, in place of attention_factor."
            return Judgement("exact", why, rope={"attn_factor": factor, "mscale": None, "mscale_all_dim": None})
        case "longrope":
            return _longrope(stated, "SGLang chooses between short and long factors for a whole batch.")
        case "proportional":
            return _proportional(stated, "SGLang's handling of a share of 0 is not known")
    return Judgement("exact", _ALWAYS)


def for_llamacpp(stated: Stated) -> Judgement:
    """Judge llama.cpp, by way of its converter convert_hf_to_gguf.py."""
    legacy = _legacy(stated)
    match stated.rope_type:
        case "dynamic":
            return Judgement(
                "approximate", "the converter ignores it: equal within the original length.", config=legacy
            )
        case "yarn" if stated.rope.get("truncate") is False:
            return Judgement("approximate", "llama.cpp rounds the limits of the ramp (truncate).", config=legacy)
        case "yarn":
            why = f"{_ALWAYS}; set rope.scaling.attn_factor from gguf-metadata.json where it is not 1."
            return Judgement("exact", why, config=legacy)
        case "longrope" if stated.model_type not in ("phi3", "minicpm", "minicpm3"):
            why = "the converter writes LongRoPE's factors for Phi-3 and MiniCPM alone, and leaves them out silently."
            return Judgement("impossible", why, config=legacy)
        case "longrope":
            return Judgement("approximate", "the factors are chosen by the context's length.", config=legacy)
        case "proportional":
            return Judgement(
                "impossible", 'the converter warns of an "Unknown" type and writes plain rope.', config=legacy
            )
    return Judgement("exact", _ALWAYS, config=legacy)


def for_tgi(stated: Stated) -> Judgement:
    """Judge text-generation-inference."""
    legacy = _legacy(stated)
    match stated.rope_type:
        case "linear":
            return Judgement("impossible", "TGI ignores the factor: every angle is wrong.", config=legacy)
        case "dynamic":
            return Judgement("approximate", "TGI has its own variant.", config=legacy)
        case "yarn":
            betas = (stated.rope.get("beta_fast") or 32, stated.rope.get("beta_slow") or 1)
            same = betas == (32, 1) and abs(stated.attention - stated.usual_attention) < _CLOSE
            if same and stated.rope.get("truncate") is not False:
                return Judgement("exact", _ALWAYS, config=legacy)
            why = "TGI fixes beta_fast 32, beta_slow 1 and an attention factor of 0.1 ln s + 1."
            return Judgement("approximate", why, config=legacy)
        case "longrope" if not stated.fixed_list:
            return Judgement("approximate", "TGI mixes short and long factors by position.", config=legacy)
        case "longrope":
            return Judgement("approximate", "TGI computes the attention factor itself.", config=legacy)
        case "proportional":
            return Judgement("impossible", "TGI refuses the type.", config=legacy)
    return Judgement("exact", _ALWAYS, config=legacy)


def judge(target: str, stated: Stated) -> Judgement:
    """Return what the program `target` makes of a mechanism."""
    if target != "transformers" and stated.kind == "plugin":
        why = (
            f"only hf_posswap computes {stated.scheme} in a {stated.model_type}: the attention of other programs is "
            "their own. posswap to-native makes a stock model of it where one is exact: export that."
        )
        return Judgement("impossible", why)
    if stated.kind == "table":
        return Judgement("exact", "a position table is ordinary weights; it ends where its rows end.")
    return TARGETS[target](stated)


def _linear(stated: Stated, name: str) -> Judgement:
    """Judge "linear" in a program that takes max_position_embeddings times the factor for the context length."""
    why = f"{_ALWAYS}; {name} multiplies max_position_embeddings by the factor, so it must be the original length."
    known = stated.original is not None and stated.scheme is not None
    if not known:
        why += " Which it is here nothing tells: check it."
    return Judgement("exact", why, config={"max_position_embeddings": stated.original} if known else {})


def _longrope(stated: Stated, otherwise: str) -> Judgement:
    """Judge "longrope" where the program computes the attention factor itself unless it is told otherwise."""
    scales = {"short_mscale": stated.attention, "long_mscale": stated.attention}
    if stated.fixed_list:
        return Judgement("exact", f"{_ALWAYS}: both lists are one; its attention factor is short_mscale there.", scales)
    return Judgement("approximate", otherwise, scales)


def _proportional(stated: Stated, zero: str) -> Judgement:
    if not stated.rope.get("partial_rotary_factor", 1.0) > 0:
        why = f"{zero}; posswap to-native --target smollm3 makes a SmolLM3 without rotation of a Llama."
        return Judgement("impossible", why)
    return Judgement("exact", f"{_ALWAYS}, in releases that know the type (it came with Gemma 4).")


def _legacy(stated: Stated) -> dict[str, Any]:
    """Return the old spelling of the rope parameters, for programs that read no other; it says nothing else."""
    shared = {
        "rope_theta": stated.rope.get("rope_theta"),
        "partial_rotary_factor": stated.rope.get("partial_rotary_factor"),
    }
    if stated.rope_type == "default":
        return shared | {"rope_scaling": None}
    return shared | {"rope_scaling": stated.rope | {"type": stated.rope_type}}


TARGETS: dict[str, Callable[[Stated], Judgement]] = {
    "transformers": for_transformers,
    "vllm": for_vllm,
    "sglang": for_sglang,
    "llamacpp": for_llamacpp,
    "tgi": for_tgi,
}
"""The programs that `export` knows, each with its judge."""
