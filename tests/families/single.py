"""Tiny models of one stack with a position table: encoders and decoders, and how to run them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_posswap.testing.tiny import TINY_LENGTH, TINY_VOCABULARY, tiny_model
from tests.stock import cache_in, with_cache

LENGTH, PADDING = TINY_LENGTH, 1


@dataclass(frozen=True)
class Kind:
    """One class.

    Attributes:
        offset: rows of its table before position 0.
        projections: of queries and keys; () where they come out of one.
        skips_padding: whether its positions skip padding by themselves.
        told: whether its attention is told of position ids by the model itself.
        masks_2d: whether masks say of it, for all heads alike, what is padding, and no more.
        takes_positions: whether its forward takes position ids.
        checkpoints: whether it can run its layers again in the backward.
        config: what its config has.
    """

    offset: int = 0
    projections: tuple[str, ...] = ("query", "key")
    skips_padding: bool = False
    told: bool = True
    masks_2d: bool = False
    takes_positions: bool = True
    checkpoints: bool = True
    config: dict[str, Any] = field(default_factory=dict)


_PADDED = Kind(PADDING + 1, skips_padding=True, config={"max_position_embeddings": LENGTH + PADDING + 1})
_OPT = ("q_proj", "k_proj")
_POST_NORM = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}

ENCODERS = {
    "ElectraForMaskedLM": Kind(config={"embedding_size": 16}),
    "ErnieForMaskedLM": Kind(),
    "RoCBertForMaskedLM": Kind(),
    "RobertaPreLayerNormForMaskedLM": _PADDED,
    "XLMRobertaForMaskedLM": _PADDED,
    "XLMRobertaXLForMaskedLM": _PADDED,
    "CamembertForMaskedLM": _PADDED,
    "Data2VecTextForMaskedLM": _PADDED,
    "XmodForMaskedLM": _PADDED,
    "EsmForMaskedLM": Kind(
        PADDING + 1, skips_padding=True, told=False, masks_2d=True, config=_PADDED.config | {"token_dropout": False}
    ),
    "DistilBertForMaskedLM": Kind(projections=("q_lin", "k_lin"), told=False),
    "AlbertForMaskedLM": Kind(config={"embedding_size": 16}),
    "MegatronBertForMaskedLM": Kind(told=False),
    "RemBertForMaskedLM": Kind(told=False),
    "ConvBertForMaskedLM": Kind(projections=(), told=False),
    "BigBirdForMaskedLM": Kind(told=False, masks_2d=True),
    "SqueezeBertForMaskedLM": Kind(projections=(), told=False, checkpoints=False),
    "MobileBertForMaskedLM": Kind(),
    "LayoutLMForMaskedLM": Kind(masks_2d=True),
    "DebertaForMaskedLM": Kind(projections=(), told=False, masks_2d=True),
    "DebertaV2ForMaskedLM": Kind(projections=("query_proj", "key_proj"), told=False, masks_2d=True),
}
DECODERS = {
    "GPTBigCodeForCausalLM": Kind(projections=(), told=False),
    "BertGenerationDecoder": Kind(),
    "BioGptForCausalLM": Kind(2, _OPT),
    "OPTForCausalLM": Kind(2, _OPT, config=_POST_NORM, skips_padding=True),
    "XLMRobertaForCausalLM": Kind(PADDING + 1, skips_padding=True, config=_PADDED.config | {"is_decoder": True}),
    "TrOCRForCausalLM": Kind(2, _OPT, masks_2d=True, takes_positions=False),
}
KINDS = ENCODERS | DECODERS


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny random model of the class `name`, of two layers."""
    shape = dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_layers", "n_layers"), 2)
    tokens = {"pad_token_id": PADDING, "eos_token_id": None, "bos_token_id": 3}
    config = tiny_model(name).config
    known = {key: value for key, value in {**shape, **tokens}.items() if hasattr(config, key)}
    return tiny_model(name, meta=False, seed=seed, **{**known, **KINDS[name].config, **changes})


def words(batch: int, length: int, seed: int = 1) -> Tensor:
    """Return random token ids [batch, length] without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, TINY_VOCABULARY, (batch, length), generator=generator)


IDS = words(2, 20)


def logits(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    """Return the logits, [B, Q, V] or those of a task, all seen unless a mask says otherwise."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        out = model(input_ids=ids, **kwargs)
    return out.logits if "logits" in out else out[0]


def stepwise(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of `ids` fed in pieces through the cache."""
    cuts, cache, parts = [0, 5, 6, 7, ids.shape[1]], None, []
    with torch.no_grad():
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            mask = torch.ones_like(ids[:, :stop])
            out = model(ids[:, start:stop], attention_mask=mask, **with_cache(model, cache), use_cache=True)
            cache = cache_in(out)
            parts.append(out.logits)
    return torch.cat(parts, dim=1)
