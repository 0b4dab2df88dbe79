"""The models that mutations are tried on, and what is asked of each: numbers that positions decide."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NEAR = 2e-4
"""Largest difference, over the largest number, that two computations of the same make."""
SHORT = dict.fromkeys(
    (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
    ),
    2,
)
ROPE, ALIBI = ("rope", {}), ("alibi", {})
BOTH = (ROPE, ALIBI)


@dataclass(frozen=True)
class Case:
    """One kind of model.

    Attributes:
        folder: of its modeling file in transformers.
        kind: its class.
        config: what its config has.
        schemes: that it is swapped to, with their options.
        interface: whether its own attention has the interface, in all releases.
    """

    folder: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    schemes: tuple[tuple[str, dict[str, Any]], ...] = BOTH
    interface: bool = False

    def build(self) -> Any:
        """Return the model, with weights that no change of names touches."""
        import transformers

        from hf_posswap.testing.tiny import tiny_model

        fields = {one.name for one in dataclasses.fields(getattr(transformers, self.kind).config_class)}
        short = {name: value for name, value in SHORT.items() if name in fields}
        model = tiny_model(self.kind, meta=False, **short | {"eos_token_id": None} | dict(self.config))
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
                elif parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.1 + (parameter.mean() > 0.5))
        return model


def swapped(model: Any, scheme: str, options: dict[str, Any]) -> Any:
    """Return a copy of `model`, swapped."""
    from hf_posswap import patch_model

    return patch_model(copy.deepcopy(model), scheme, **options)


_OF_LLAMA = (*BOTH, ("yarn", {"factor": 2.0}), ("self_extend", {"group": 2, "window": 4}))
_BOTH_TYPES = ["sliding_attention", "full_attention"]
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}

CASES = {
    "gpt_neo": Case("gpt_neo", "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 5}),
    "openai-gpt": Case("openai", "OpenAIGPTLMHeadModel"),
    "xglm": Case("xglm", "XGLMForCausalLM"),
    "trocr": Case("trocr", "TrOCRForCausalLM"),
    "mvp": Case("mvp", "MvpForCausalLM"),
    "gptj": Case("gptj", "GPTJForCausalLM"),
    "codegen": Case("codegen", "CodeGenForCausalLM"),
    "bloom": Case("bloom", "BloomForCausalLM"),
    "mpt": Case("mpt", "MptForCausalLM"),
    "falcon": Case("falcon", "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon (alibi)": Case("falcon", "FalconForCausalLM", {"alibi": True}),
    "megatron-bert": Case("megatron_bert", "MegatronBertForMaskedLM"),
    "megatron-bert (is_decoder)": Case("megatron_bert", "MegatronBertForCausalLM", {"is_decoder": True}),
    "rembert": Case("rembert", "RemBertForMaskedLM"),
    "big_bird": Case("big_bird", "BigBirdForMaskedLM", {"attention_type": "original_full"}),
    "roformer": Case("roformer", "RoFormerForMaskedLM"),
    "roformer (is_decoder)": Case("roformer", "RoFormerForCausalLM", {"is_decoder": True}),
    "convbert": Case("convbert", "ConvBertForMaskedLM"),
    "squeezebert": Case("squeezebert", "SqueezeBertForMaskedLM"),
    "mpnet": Case("mpnet", "MPNetForMaskedLM"),
    "deberta": Case("deberta", "DebertaForMaskedLM", _RELATIVE),
    "deberta-v2": Case("deberta_v2", "DebertaV2ForMaskedLM", _RELATIVE),
    "t5": Case("t5", "T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "mt5": Case("mt5", "MT5ForConditionalGeneration"),
    "umt5": Case("umt5", "UMT5ForConditionalGeneration"),
    "longt5": Case("longt5", "LongT5ForConditionalGeneration"),
    "layoutlm": Case("layoutlm", "LayoutLMForMaskedLM"),
    "gpt2": Case("gpt2", "GPT2LMHeadModel", interface=True),
    "llama": Case("llama", "LlamaForCausalLM", schemes=_OF_LLAMA, interface=True),
    "gemma3": Case("gemma3", "Gemma3ForCausalLM", {"layer_types": _BOTH_TYPES}, interface=True),
    "opt": Case("opt", "OPTForCausalLM", interface=True),
    "bert": Case("bert", "BertForMaskedLM", interface=True),
    "bart": Case("bart", "BartForConditionalGeneration", interface=True),
}  # fmt: skip
"""A model of each class in hf_posswap/families/interfaces that reads text, and some that have the interface."""

LENGTH, FIRST = 9, 5
"""Tokens of a text, and how many of them come first where it comes in two parts."""


class Asked:
    """Asks one model for numbers.

    Args:
        model: to ask.
        names: what its callers call arguments otherwise than today.
    """

    def __init__(self, model: Any, names: Mapping[str, str]) -> None:
        self.model, self.names = model, names
        random = torch.Generator().manual_seed(2)
        self.ids = torch.randint(5, 90, (2, LENGTH), generator=random)
        self.pairs = bool(model.config.is_encoder_decoder)
        self.heard = torch.randint(5, 90, (2, 7), generator=random)

    def call(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        """Return what the model gives for `ids`."""
        mask = torch.ones_like(ids) if mask is None else mask
        if self.pairs:
            given = {"input_ids": self.heard, "decoder_input_ids": ids, "decoder_attention_mask": mask, **more}
        else:
            given = {"input_ids": ids, "attention_mask": mask, **more}
        return self.model(**{self.names.get(name, name): value for name, value in given.items()})

    def learned(self) -> Tensor:
        """Return the logits of a text at once, and the gradient of the input embedding."""
        self.model.zero_grad()
        with torch.enable_grad():
            logits = self.call(self.ids).logits
            logits.square().mean().backward()
        embedding = self.model.get_input_embeddings().weight
        return torch.cat((logits.detach().flatten(), embedding.grad.flatten()))

    def right_padded(self) -> Tensor:
        """Return the logits of a text with padding behind one row."""
        mask = torch.ones_like(self.ids)
        mask[0, -2:] = 0
        return self.call(self.ids, mask).logits * mask[:, :, None]

    def left_padded(self) -> Tensor:
        """Return the logits of a text in two parts through a cache, with padding before one row."""
        mask = torch.ones_like(self.ids)
        mask[0, :2] = 0
        return self._in_parts(mask) * mask[:, :, None]

    def _in_parts(self, mask: Tensor, placed: Tensor | None = None) -> Tensor:
        found, cache = [], None
        for start, stop in ((0, FIRST), (FIRST, LENGTH)):
            more: dict[str, Any] = {"use_cache": True}
            if cache is not None:
                more[self.names["cache"]] = cache
            if placed is not None:
                more["position_ids"] = placed[:, start:stop]
            out = self.call(self.ids[:, start:stop], mask[:, :stop], **more)
            cache = _cache_in(out)
            found.append(out.logits)
        return torch.cat(found, dim=1)

    def placed(self) -> Tensor:
        """Return the logits of a text at positions with a gap."""
        return self.call(self.ids, position_ids=self._gap()).logits

    def placed_in_parts(self) -> Tensor:
        """Return the logits of a text at positions with a gap, in two parts through a cache."""
        return self._in_parts(torch.ones_like(self.ids), self._gap())

    def _gap(self) -> Tensor:
        index = torch.arange(LENGTH)[None]
        return index + 7 * (index >= 3)

    def generated(self) -> Tensor:
        """Return the tokens that follow two texts, one with padding on its left."""
        ids = self.heard if self.pairs else self.ids
        mask = torch.ones_like(ids)
        mask[0, :2] = self.pairs
        return self.model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False).float()


def _cache_in(output: Any) -> Any:
    return next(value for value in output.values() if hasattr(value, "get_seq_length"))


def questions(model: Any) -> list[str]:
    """Return what a model of today can be asked."""
    takes = inspect.signature(type(model).forward).parameters
    caches = any(name in takes for name in ("cache", "past_key_values")) and model.can_generate()
    if not caches:
        return ["learned", "right_padded", *(["placed"] if "position_ids" in takes else [])]
    return ["learned", "left_padded", *(["placed_in_parts"] if "position_ids" in takes else []), "generated"]


def answers(model: Any, wanted: list[str], names: Mapping[str, str]) -> dict[str, Any]:
    """Return what `model` says to the questions `wanted`: numbers, or the error that came."""
    asked, found = Asked(model, names), {}
    for name in wanted:
        with torch.no_grad():
            found[name] = caught(getattr(asked, name))
    return found


@dataclass(frozen=True)
class Raised:
    """An error, in words.

    Attributes:
        named: whether it is one that hf_posswap raises on purpose.
        kind: its class.
        message: what it says.
        place: file and line that raised it.
    """

    named: bool
    kind: str
    message: str
    place: str


def caught(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or the error that it raises."""
    try:
        return work()
    except Exception as error:
        from hf_posswap.errors import PosswapError

        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename.rpartition('site-packages/')[2]}:{last.lineno}"
        return Raised(isinstance(error, PosswapError), type(error).__name__, str(error)[:400], place)


def differs(found: Tensor, truth: Tensor) -> bool:
    """Return whether two answers are not the same."""
    if found.shape != truth.shape:
        return True
    return not bool((found - truth).abs().max() <= NEAR * max(1.0, float(truth.abs().max())))


def names_of_today() -> dict[str, str]:
    """Return what callers call the cache in the release that is installed."""
    from transformers.masking_utils import create_causal_mask

    from hf_posswap.compat.transformers_calls import CACHE_NAMES

    taken = inspect.signature(create_causal_mask).parameters
    return {"cache": next(name for name in CACHE_NAMES if name in taken)}
