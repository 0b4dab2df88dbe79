"""Refusal of swapped checkpoints that vLLM would compute wrongly, or that no test has run in this version of it."""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.errors import PositionRangeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.patching.inspect.describe import model_class_of
from hf_posswap.patching.inspect.paged import mechanisms_of, paged_problem, plan_needs_own_attention
from hf_posswap.patching.inspect.untrusted_config import recorded_plan
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.record import native_config_class
from hf_posswap.patching.record.refusals import architecture_of, stock_name
from hf_posswap.testing.tiny import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from vllm.config import ModelConfig, VllmConfig

OLDEST, NEWEST = (0, 32), (0, 32)
"""Tested releases, (major, minor)."""
TESTED = "0.32"
"""The tested releases as text."""
OVERRIDE = "POSSWAP_VLLM_UNTESTED"
"""The environment variable that allows any version, and any device, to serve swapped checkpoints."""


def version_problem(version: str) -> str | None:
    """Return why swapped checkpoints are not served by vLLM `version`, as the rest of a sentence, or None.

    Example:
        >>> version_problem("0.32.0+cu129") is None, version_problem("0.9.1") is None
        (True, False)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    parsed = None if numbers is None else (int(numbers[1]), int(numbers[2]))
    if os.environ.get(OVERRIDE) == "1" or (parsed is not None and OLDEST <= parsed <= NEWEST):
        return None
    return (
        f"this vLLM is {version}, and hf_posswap has been tested with {TESTED}. Install that; or set {OVERRIDE}=1 to "
        "serve it all the same, and compare its answers with those of generate"
    )


HEAD_NAME = "lm_head"
"""Its name in that backend."""
_IDS = torch.arange(8)[None]  # [1, L]
_CLOSE = 1e-4
_SCALES = ("scale", "scaling", "multiplier", "softcapping", "softcap")
"""Ends of the names of numbers that scale: with a default of None, the config does not tell that they are floats."""
_INSTALLED = "posswap_guard"


def head_name(model_class: type[PreTrainedModel]) -> str:
    """Return the name of the head in checkpoints of `model_class`: "lm_head", or "embed_out" in GPT-NeoX.

    Example:
        >>> from transformers import GPTNeoXForCausalLM
        >>> head_name(GPTNeoXForCausalLM) in ("embed_out", "lm_head")
        True
    """
    model = tiny_model(model_class)
    head = model.get_output_embeddings()
    return next(path for path, module in model.named_modules() if module is head)


def head_problem(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Return why vLLM's head would not give the logits of `model_class`, as the rest of a sentence, or None.

    vLLM multiplies the output of the base model by the head's weights and by `logit_scale`, and applies soft-capping;
    its Transformers backend ignores anything else that a class does (Granite divides). A tiny model of the class with
    the numbers of `config` is used to detect it: those that are floats, and those that scale, which a config.json may
    write as integers.
    """
    numbers: dict[str, Any] = {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, float)
        or (type(value) is int and (isinstance(getattr(type(config), name, None), float) or name.endswith(_SCALES)))
    }
    model = tiny_model(model_class, meta=False, **numbers)
    with torch.no_grad():
        expected = model(_IDS).logits
        logits = model.get_output_embeddings()(model.base_model(_IDS)[0]) * numbers.get("logit_scale", 1.0)
    cap = numbers.get("final_logit_softcapping")
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if torch.allclose(logits, expected, atol=_CLOSE, rtol=_CLOSE):
        return None
    return f"{model_class.__name__} does more to its logits than vLLM's Transformers backend"


_EXPORT = "posswap export DIR --target vllm says what vLLM makes of a checkpoint."


def install_guard() -> None:
    """Make vLLM call `refuse_unservable` on each config before serving; once per process."""
    import vllm
    from vllm.config import VllmConfig

    native = VllmConfig.try_verify_and_update_config
    if hasattr(native, _INSTALLED):
        return

    @functools.wraps(native)
    def verify(self: VllmConfig) -> object:
        if self.model_config is not None:
            refuse_unservable(self, vllm.__version__)
        return native(self)

    setattr(verify, _INSTALLED, True)  # vLLM, or another plugin, may have wrapped the method too
    VllmConfig.try_verify_and_update_config = verify


def refuse_unservable(vllm_config: VllmConfig, version: str) -> None:
    """Refuse a checkpoint that carries a swap and that vLLM would not compute as hf_posswap does.

    Args:
        vllm_config: what vLLM is about to serve, a `VllmConfig`.
        version: of vLLM.

    Raises:
        UnsupportedSwapError: why, and what to do instead.
        RecordError: its record cannot be applied.
    """
    model = vllm_config.model_config
    config = model.hf_config
    if getattr(config, "posswap", None) is None:
        return
    config_class = type(config)
    if native_config_class(config) is config_class:
        _refuse_native(model, config)
        return
    model_class = model_class_of(config)
    plan = recorded_plan(config, model_class)[1]
    problem = version_problem(version) or paged_problem(plan) or _option_problem(vllm_config, plan)
    problem = problem or length_problem(plan, model.max_model_len, model.dtype) or head_problem(model_class, config)
    if problem is not None:
        raise UnsupportedSwapError(
            f"vLLM cannot serve {plan.model} swapped to {plan.named}: {problem}. What works: hf_posswap.load and "
            f"generate; posswap to-native where a stock model is exact. {_EXPORT}"
        )


def _refuse_native(model: ModelConfig, config: PreTrainedConfig) -> None:
    """Refuse a checkpoint that stock transformers runs, whose rotation vLLM would compute wrongly."""
    try:
        position_config = position_config_of(config)
    except UnsupportedModelError:  # it states no length: nothing of that kind is known to be wrong
        return
    problem = rope_problem(position_config, model.max_model_len, is_own=not model.using_transformers_backend())
    if problem is not None:
        raise UnsupportedSwapError(f"vLLM cannot serve {model.architecture} as swapped: {problem} {_EXPORT}")


def rope_problem(positions: PositionConfig, length: int, *, is_own: bool) -> str | None:
    """Return why vLLM cannot serve texts of `length` tokens with a stock model's rotation, in a sentence, or None.

    Args:
        positions: the positions that its config states.
        length: the longest that is served, in tokens.
        is_own: whether vLLM has its own class for the model; otherwise transformers' code runs in vLLM.
    """
    if not positions.rotation.follows_length or positions.original is None or length <= positions.original:
        return None
    if positions.rope_type == "dynamic":
        return (
            f"beyond {positions.original} tokens its angles follow the length (dynamic), where vLLM gives NaN, or "
            f"mixes up the texts of a batch. Give --max-model-len {positions.original}, or swap to yarn or ntk."
        )
    if is_own:
        return None
    return (
        "its angles are of two lists (longrope), and vLLM's Transformers backend chooses one for all texts of a batch. "
        f"Give --max-model-len {positions.original}, or --model-impl vllm, or swap to longrope with pin=LENGTH."
    )


def _option_problem(vllm_config: VllmConfig, plan: SwapPlan) -> str | None:
    """Return which of vLLM's options is not for a checkpoint swapped by `plan`, or None."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.architecture != architecture_of(stock_name(plan.model)):
        return f"it would run as {model.architecture}, without the swap: leave --model-impl and --hf-overrides out"
    if model.runner_type != "generate":
        return "it is served for generating text alone, not for embeddings or classes"
    if parallel.world_size > 1:
        return "it is served by one device alone (--tensor-parallel-size 1 --pipeline-parallel-size 1)"
    if model.is_moe or model.use_mla:
        return "experts and latent attention (MLA) are not served"
    return _own_attention_problem(vllm_config) if plan_needs_own_attention(plan) else None


def _own_attention_problem(vllm_config: VllmConfig) -> str | None:
    """Return which of vLLM's options is not for a checkpoint whose attention hf_posswap computes, or None."""
    cache, device = vllm_config.cache_config.cache_dtype, vllm_config.device_config.device_type
    if cache != "auto":
        return f"its keys and values are cached in the dtype of the model, not in {cache}: leave --kv-cache-dtype out"
    if vllm_config.speculative_config is not None:
        return "guessed tokens are not checked by its attention: leave --speculative-config out"
    if device != "cpu" and os.environ.get(OVERRIDE) != "1":
        return (
            f"hf_posswap computes its attention, in vLLM's CPU build alone so far, and this one runs on {device}. Set "
            f"{OVERRIDE}=1 to serve it all the same, with --enforce-eager, and compare its answers with those of "
            "generate"
        )
    return None


def length_problem(plan: SwapPlan, length: int, dtype: torch.dtype) -> str | None:
    """Return why texts of `length` tokens cannot be served in `dtype`, or None.

    Positions that a scheme does not support raise during serving, and vLLM exits on any error there.
    """
    if not plan.unbounded and length > plan.max_length:
        return f"it is made for {plan.max_length} tokens, and has an end: give --max-model-len {plan.max_length}"
    ends = torch.tensor([[0, length - 1]])  # [1, Q]
    for _, _, mechanism in mechanisms_of(plan):
        if not mechanism.rotates:
            continue
        table = mechanism.prepare(ends, ends.new_full((1, 1, 1, 1), length))
        try:
            mechanism.rotate_key(torch.zeros(1, 1, 2, mechanism.head_dim, dtype=dtype), table)
        except PositionRangeError as error:
            return f"texts of {length} tokens are too long: {error}".rstrip(".")
    return None
