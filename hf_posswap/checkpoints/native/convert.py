"""`to_native`: choose the stock class, build it, and prove that it computes the same."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_posswap.checkpoints.native.llama import same_class, smollm3
from hf_posswap.checkpoints.native.parts import Blueprint
from hf_posswap.checkpoints.native.proof import Proof, proof_lengths, prove_equal
from hf_posswap.checkpoints.native.sources import SOURCES
from hf_posswap.checkpoints.native.targets import gpt_neox, jina_embeddings_v3, mpnet, roformer
from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.compat.transformers_auto import build_model
from hf_posswap.compat.transformers_models import without_initialising
from hf_posswap.errors import NotPatchedError, UnknownNameError, UnsupportedSwapError
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.training import training_of
from hf_posswap.utils.result_views import ResultView
from hf_posswap.utils.threads import PROCESS

_DECODERS, _ENCODERS = ("gpt2", "opt"), ("bert", "roberta")
CONVERSIONS: dict[str, tuple[tuple[str, ...] | None, Callable[[Any, SwapPlan], Blueprint]]] = {
    "same": (None, same_class),
    "gpt_neox": (_DECODERS, gpt_neox),
    "jina_embeddings_v3": (_ENCODERS, jina_embeddings_v3),
    "roformer": (_ENCODERS, roformer),
    "mpnet": (_ENCODERS, mpnet),
    "smollm3": (("llama", "mistral", "qwen2"), smollm3),
}
"""Each target: its source model types (None: any) and its builder. The first exact one is used."""

_WHAT_WORKS = (
    "Exact are: gpt2 and opt with rotary schemes (gpt_neox); bert and roberta with rotary schemes "
    "(jina_embeddings_v3, roformer); roberta with t5 (mpnet); llama, mistral and qwen2 with nope in all or some layers "
    "(smollm3); and every native swap. Others stay what they are: save(model) keeps the swap, and hf_posswap loads it."
)
_NO_ALIBI = (
    "No stock class computes ALiBi for models with biases: Falcon divides the slopes by sqrt(D) and rounds positions "
    "to bfloat16, Bloom normalises its embeddings, MPT has no biases."
)


@dataclass(frozen=True, repr=False)
class Native(ResultView):
    """A converted model.

    Attributes:
        model: of a stock class, without any part of hf_posswap.
        target: which conversion made it: a name in `CONVERSIONS`.
        proof: that it computes what the swapped model does.
    """

    model: Any
    target: str
    proof: Proof

    def _repr_facts(self) -> dict[str, Any]:
        return {"model": type(self.model).__name__, "target": self.target, "proof": str(self.proof)}

    def _html_rows(self) -> list[tuple[str, str]]:
        return [(name, str(value)) for name, value in self._repr_facts().items()]


def to_native(model: Any, target: str | None = None) -> Any:
    """Return a model of a stock class of transformers that computes exactly what the swapped `model` does.

    It needs no hf_posswap and no custom code, wherever its class runs. Before it is returned, its outputs are compared
    with those of `model` on random tokens, padded too, at three lengths, one a quarter beyond the original. `model` is
    not changed. Weights are copied; for other dtypes than float32 the proof makes float32 copies of both for a while.

    Args:
        model: a swapped model, with the head of a language model or without any head. Merge adapters first.
        target: a name in `CONVERSIONS`, for example "smollm3"; None takes the first that is exact: the same class
            where stock transformers can say the swap, otherwise another.

    Raises:
        UnsupportedSwapError: no stock class is exact: why, for each, and what would work.
        UnknownNameError: no such target.
        NotPatchedError: the model carries no swap.
        SwapVerificationError: the result does not compute the same (a defect: please report it).

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap import patch_model
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> model = patch_model(model, "rope", max_length=64)
        >>> type(to_native(model)).__name__
        'GPTNeoXForCausalLM'
    """
    return convert(model, target).model


def check_target(target: str | None) -> None:
    """Raise an UnknownNameError where `target` is given and names no conversion."""
    if target is not None and target not in CONVERSIONS:
        raise UnknownNameError("target", target, CONVERSIONS)


def convert(model: Any, target: str | None = None) -> Native:
    """Return what `to_native` returns, with the name of the conversion and its proof.

    Raises:
        As `to_native`.
    """
    check_target(target)
    swapped = unwrap(model)
    patch = getattr(swapped, "_posswap", None)
    if patch is None:
        raise NotPatchedError(f"{type(swapped).__name__} is not swapped: it is a stock model already.")
    if swapped is not model or any(map(is_adapted, swapped.modules())):
        raise UnsupportedSwapError("the model carries an adapter: convert model.merge_and_unload() instead.")
    reasons = []
    for name in [target] if target else CONVERSIONS:
        sources, build = CONVERSIONS[name]
        if sources is not None and swapped.config.model_type not in sources:
            reasons.append((name, f"its sources are {', '.join(sources)}, not {swapped.config.model_type}"))
            continue
        try:
            blueprint = build(swapped, patch.plan)
        except UnsupportedSwapError as error:
            reasons.append((name, str(error)))
            continue
        native = _built(swapped, blueprint)
        lengths = proof_lengths(patch.plan.sites.geometry.original_length, blueprint.limit)
        return Native(native, name, prove_equal(swapped, native, lengths, causal=patch.plan.sites.geometry.causal))
    raise UnsupportedSwapError(_refusal(swapped, patch.plan, reasons))


def _refusal(model: Any, plan: SwapPlan, reasons: list[tuple[str, str]]) -> str:
    near = [(name, why) for name, why in reasons if not why.startswith("its sources are")] or reasons
    reasons_text = "; ".join(f"{name}: {why}" for name, why in near)
    alibi = f" {_NO_ALIBI}" if plan.scheme.name == "alibi" and model.config.model_type in SOURCES else ""
    name = type(model).__name__
    return f"no stock class computes {name} with {plan.scheme} exactly. {reasons_text}.{alibi} {_WHAT_WORKS}"


def _built(model: Any, blueprint: Blueprint) -> Any:
    """Return the model of `blueprint`, with the dtype, device and mode of `model`, and its generation config."""
    source = model.config
    config = blueprint.config
    config.name_or_path = source.name_or_path
    training = training_of(source)
    if training is not None and training.is_of(
        model._posswap.plan.record
    ):  # the weights were trained for this mechanism
        config.posswap_training = {**training.to_dict(), "swap": None}
    with PROCESS, without_initialising():  # transformers changes the default dtype of the process meanwhile
        native = build_model(blueprint.model_class, config, dtype=model.dtype, **_pooling(blueprint))
    with torch.no_grad():
        native.load_state_dict(blueprint.weights, strict=True)
    if native.can_generate() and getattr(model, "generation_config", None) is not None:
        native.generation_config = copy.deepcopy(model.generation_config)
    return native.to(model.device).train(model.training)


def _pooling(blueprint: Blueprint) -> dict[str, bool]:
    """Return the argument that builds a base model without a pooler where the weights have none."""
    has = any(path.startswith("pooler.") for path in blueprint.weights)
    takes = "add_pooling_layer" in inspect.signature(blueprint.model_class).parameters
    return {"add_pooling_layer": has} if takes else {}
