"""`to_native`: choose the stock class, build it, and prove that it computes the same.

The proof compares outputs on random tokens, padded too, at several lengths. Whether some class may do is also found
from a config alone, without weights and without proof.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.checkpoints.exports.mechanism import PositionConfig, position_config_of
from hf_posswap.checkpoints.native_targets import gpt_neox, jina_embeddings_v3, mpnet, roformer, same_class, smollm3
from hf_posswap.checkpoints.native_weights import SOURCES, Blueprint
from hf_posswap.compat.peft_wrappers import is_adapted
from hf_posswap.compat.torch_modules import copy_module
from hf_posswap.compat.transformers_loading import build_model
from hf_posswap.compat.transformers_models import building_on_meta, without_initialising
from hf_posswap.errors import (
    NotPatchedError,
    PosswapError,
    SwapVerificationError,
    UnknownNameError,
    UnsupportedSwapError,
)
from hf_posswap.patching.apply.applied import applied_swap
from hf_posswap.patching.apply.patch_model import swap_plan
from hf_posswap.patching.inspect.describe import model_class_of, read_config
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.plan.swap_plan import SwapPlan
from hf_posswap.patching.record.model_class import swapped_class
from hf_posswap.patching.record.training import training_of
from hf_posswap.schemes import Alibi
from hf_posswap.utils.result_views import FactsView
from hf_posswap.utils.threads import PROCESS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-4
"""The largest difference of two outputs, as a share of their largest distance from the mean."""
_OF_TOKENS = ("start_logits", "end_logits")
"""Outputs [B, L] with a number for each token; others [B, N] are of the whole text."""
_DECODERS, _ENCODERS = ("gpt2", "opt"), ("bert", "roberta")
CONVERSIONS: dict[str, tuple[tuple[str, ...] | None, Callable[[PreTrainedModel, SwapPlan], Blueprint]]] = {
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
RUN_PLUGINS = ("transformers", "onnx", "torch", "sentence-transformers")
"""The programs that also run models that need hf_posswap, as they are."""


@dataclass(frozen=True, repr=False)
class Native(FactsView):
    """A converted model.

    Attributes:
        model: of a stock class, without any part of hf_posswap.
        target: which conversion made it: a name in `CONVERSIONS`.
        proof: that it computes what the swapped model does.
    """

    model: PreTrainedModel
    target: str
    proof: Proof

    def _repr_facts(self) -> dict[str, object]:
        return {"model": type(self.model).__name__, "target": self.target, "proof": str(self.proof)}


def to_native(model: PreTrainedModel, target: str | None = None) -> Any:
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


def convert(model: PreTrainedModel, target: str | None = None) -> Native:
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
    if getattr(swapped, "hf_quantizer", None) is not None:
        raise UnsupportedSwapError(
            f"{type(swapped).__name__} is quantized, and a conversion moves rows of weights: convert the swapped model "
            "before it is quantized, and quantize what was saved."
        )
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


def _refusal(model: PreTrainedModel, plan: SwapPlan, reasons: list[tuple[str, str]]) -> str:
    near = [(name, why) for name, why in reasons if not why.startswith("its sources are")] or reasons
    reasons_text = "; ".join(f"{name}: {why}" for name, why in near)
    alibi = f" {_NO_ALIBI}" if isinstance(plan.scheme, Alibi) and model.config.model_type in SOURCES else ""
    name = type(model).__name__
    return f"no stock class computes {name} with {plan.scheme} exactly. {reasons_text}.{alibi} {_WHAT_WORKS}"


def _built(model: Any, blueprint: Blueprint) -> PreTrainedModel:
    """Return the model of `blueprint`, with the dtype, device and mode of `model`, and its generation config."""
    source = model.config
    config = blueprint.config
    config.name_or_path = source.name_or_path
    training = training_of(source)
    if training is not None and training.is_of(
        applied_swap(model).plan.record
    ):  # the weights were trained for this mechanism
        config.posswap_training = {**training.to_dict(), "swap": None}
    pooling = {}
    if "add_pooling_layer" in inspect.signature(blueprint.model_class).parameters:
        pooling["add_pooling_layer"] = any(path.startswith("pooler.") for path in blueprint.weights)
    with PROCESS, without_initialising():  # transformers changes the default dtype of the process meanwhile
        native = build_model(blueprint.model_class, config, dtype=model.dtype, **pooling)
    with torch.no_grad():
        native.load_state_dict(blueprint.weights, strict=True)
    if native.can_generate() and getattr(model, "generation_config", None) is not None:
        native.generation_config = copy.deepcopy(model.generation_config)
    return native.to(model.device).train(model.training)


def stock_config(model: PreTrainedModel) -> tuple[PositionConfig, str] | None:
    """Return the positions of the first stock class that may compute the swapped `model`, and its name; None: none.

    It is not verified here: `posswap to-native` compares outputs before it writes.
    """
    blueprint = _first_blueprint(model, (PosswapError, NotImplementedError, RuntimeError))
    if blueprint is None:
        return None
    config, name = copy.copy(blueprint.config), str(blueprint.model_class.__name__)
    config.architectures = [name]  # as save_pretrained writes it
    return position_config_of(config), name


def _first_blueprint(model: PreTrainedModel, cannot: tuple[type[Exception], ...]) -> Blueprint | None:
    """Return the blueprint of the first conversion that does not refuse `model`, which may be on the meta device.

    `cannot`: the errors of a conversion that is not exact, or needs the values of weights.
    """
    for sources, build in CONVERSIONS.values():
        if sources is not None and model.config.model_type not in sources:
            continue
        try:
            return build(model, swap_plan(model))
        except cannot:
            continue
    return None


def stock_instead(folder: Path, *, in_memory: bool, trust_remote_code: bool = False) -> tuple[str, ...]:
    """Return a sentence that names the stock class which computes what the checkpoint in `folder` does, if one may.

    No weights are read, and nothing is proved: `to_native` does both.

    Args:
        folder: of the checkpoint.
        in_memory: whether it was saved there for the moment, of a model that the user has in memory.
        trust_remote_code: run code that it brings, where its config needs that.
    """
    if not (folder / "config.json").is_file():  # an adapter
        return ()
    config = read_config(folder, trust_remote_code=trust_remote_code)
    record = getattr(config, "posswap", None)
    if record is None or record.get("route") != "plugin":
        return ()
    try:
        with building_on_meta():
            model = swapped_class(model_class_of(config))(copy.deepcopy(config))
    except Exception:  # code of any model, at values of any config: no more than a suggestion is lost
        return ()
    blueprint = _first_blueprint(model, (Exception,))
    if blueprint is None:
        return ()
    name = blueprint.model_class.__name__
    how = "push hf_posswap.to_native(model)" if in_memory else f"posswap to-native {folder} -o OUT, then push OUT"
    return (f"A stock {name} computes the same, and needs no hf_posswap where it is loaded: {how}.",)


@dataclass(frozen=True)
class Proof:
    """What was compared.

    Attributes:
        lengths: of the inputs, in tokens.
        difference: the largest absolute difference of the output that differs most, in float32.
        spread: the largest distance of that output from its mean, as the scale for the difference.
    """

    lengths: tuple[int, ...]
    difference: float
    spread: float

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        return f"outputs differ by {self.difference:.1e} at most, of {self.spread:.3g}, at lengths {lengths}"


def proof_lengths(original: int, limit: int | None) -> tuple[int, ...]:
    """Return the lengths to compare at: a few tokens, the middle, and a quarter beyond the original length.

    Example:
        >>> proof_lengths(512, None), proof_lengths(512, 512)
        ((3, 48, 641), (3, 48, 512))
    """
    end = limit or 2 * original + 1
    return tuple(sorted({min(3, end), min(48, original, end), min(original + original // 4 + 1, end)}))


@torch.no_grad()
def prove_equal(
    model: PreTrainedModel, native: PreTrainedModel, lengths: tuple[int, ...], *, causal: bool, seed: int = 0
) -> Proof:
    """Compare the outputs of two models; both are left unchanged.

    Other dtypes than float32 and float64 are compared in float32, on copies, so that rounding hides no difference.

    Args:
        model: one of them.
        native: the other.
        lengths: of the inputs, in tokens.
        causal: pad on the left, with position ids; otherwise on the right.
        seed: of the tokens.

    Raises:
        SwapVerificationError: the outputs differ, are not finite, are all equal numbers, or are none.
    """
    pair = [each if each.dtype in (torch.float32, torch.float64) else _wide(each) for each in (model, native)]
    modes = [each.training for each in pair]
    vocabulary = min(each.config.vocab_size for each in pair)
    padding = getattr(model.config, "pad_token_id", None)
    generator = torch.Generator().manual_seed(seed)
    differences = []
    try:
        for length in lengths:
            ids = torch.randint(0, vocabulary, (2, length), generator=generator)
            if padding is not None:  # RoBERTa's family counts positions by such tokens, its native class does not
                ids = torch.where(ids == padding, (padding + 1) % vocabulary, ids)
            for inputs in _inputs(ids, causal):
                expected, outputs = (_outputs(each.eval(), inputs) for each in pair)
                if not expected or outputs.keys() != expected.keys():
                    raise SwapVerificationError(
                        f"{type(model).__name__} gives {', '.join(expected) or 'no output'}, and the converted "
                        f"{type(native).__name__} {', '.join(outputs) or 'none'}: they cannot be compared. Nothing was "
                        "changed; keep the swapped model."
                    )
                for name, value in expected.items():
                    apart, spread = (outputs[name] - value).abs().max(), (value - value.mean()).abs().max()
                    differences.append((float(apart), float(spread)))
    finally:
        for each, training in zip(pair, modes, strict=True):
            each.train(training)
    worst = max(differences, key=lambda pair: (math.isnan(pair[0]), pair[0] / max(pair[1], 1e-30), pair[1]))
    proof = Proof(lengths, *worst)
    if not 0 < proof.spread or not proof.difference <= TOLERANCE * proof.spread:  # a NaN too
        raise SwapVerificationError(
            f"the converted {type(native).__name__} does not compute what the swapped {type(model).__name__} does: "
            f"{proof}. Nothing was changed; keep the swapped model, and please report this."
        )
    return proof


def _wide(model: PreTrainedModel) -> PreTrainedModel:
    copied = copy_module(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.float()
    copied.config.dtype = torch.float32
    return copied


def _inputs(ids: Tensor, causal: bool) -> list[dict[str, Tensor]]:
    """Return `ids` [2, L] whole, and with a third of the second row padded."""
    mask = torch.ones_like(ids)
    whole = {"input_ids": ids, "attention_mask": mask}
    padding = ids.shape[1] // 3
    if not padding:
        return [whole]
    padded = mask.clone()
    if causal:
        padded[1, :padding] = 0
        positions = (padded.cumsum(1) - 1).clamp(min=0)
        return [whole, {"input_ids": ids, "attention_mask": padded, "position_ids": positions}]
    padded[1, -padding:] = 0
    return [whole, {"input_ids": ids, "attention_mask": padded}]


def _outputs(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of `model` that are not padding, by name, in float32 on the CPU."""
    parameters = inspect.signature(type(model).forward).parameters
    if model.config.is_encoder_decoder:  # the same tokens in both stacks
        inputs = inputs | {f"decoder_{name}": value for name, value in inputs.items()}
    if "input_features" in parameters:
        shape = (len(inputs["input_ids"]), model.config.num_mel_bins, 2 * model.config.max_source_positions)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # of the length that it needs
        inputs = inputs | {"input_features": noise}
    given = {name: value.to(model.device) for name, value in inputs.items() if name in parameters}
    mask, outputs = inputs["attention_mask"].bool(), {}
    for name, value in model(**given, return_dict=True).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            by_token = (value.dim() == 3 and value.shape[:2] == mask.shape) or name in _OF_TOKENS
            outputs[name] = (value.cpu()[mask] if by_token else value.cpu()).float()
    return outputs
