"""A model as a graph of its own takes it: whole numbers in, tensors out, positions counted behind padding.

Nothing is cached: one run reads whole texts. What in a stock model waits for the numbers that it is given (rotary
modules that remember the longest text, as "dynamic" has them) is replaced in the model by what computes the same.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_posswap.checkpoints.exports.rotary_by_length import follow_length
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.families.locating import locate

OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
"""What a graph gives of what a model gives, where the model has it."""
_NAMES = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
_SAMPLE = (2, 7)  # rows, tokens: neither is 0 or 1, which torch.export takes for constants
_TARGET = 5  # tokens of a decoder next to an encoder


@dataclass(frozen=True)
class Signature:
    """What goes into the graph of a model, and what comes out.

    Attributes:
        inputs: names, all of them int64 [B, L], or [B, T] where they begin with "decoder_".
        outputs: names, of `OUTPUTS`.
        counts: whether positions are counted behind padding on the left and given to the model.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = field(default=())
    counts: bool = False

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The names of the axes of each input, which have any size."""
        return {name: {0: "batch", 1: _length_of(name)} for name in self.inputs}

    def sample(self) -> dict[str, Tensor]:
        """Return inputs to trace with."""
        rows, tokens = _SAMPLE
        sizes = {name: _TARGET if name.startswith("decoder_") else tokens for name in self.inputs}
        fill = {True: torch.ones, False: torch.zeros}
        return {name: fill[name.endswith("_mask")](rows, size, dtype=torch.int64) for name, size in sizes.items()}


class Traced(nn.Module):
    """What `model` computes, by the names of `signature`.

    Args:
        model: in eval mode; its rotary modules are changed.
        signature: of it.
    """

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model, self.signature = model, signature
        follow_length(model)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the tensors that `signature` names, from those that it names: torch.export wants names spelled out.

        Args:
            input_ids: [B, L].
            attention_mask: [B, L], 0 at padding.
            token_type_ids: [B, L].
            decoder_input_ids: [B, T].
            decoder_attention_mask: [B, T].
        """
        tensors = (input_ids, attention_mask, token_type_ids, decoder_input_ids, decoder_attention_mask)
        outputs = run(self.model, self.signature, {n: t for n, t in zip(_NAMES, tensors, strict=True) if t is not None})
        return tuple(outputs[name] for name in self.signature.outputs)


def run(model: Any, signature: Signature, inputs: dict[str, Tensor]) -> Any:
    """Return what `model` gives for `inputs`, whose positions are counted where `signature` says so."""
    cached = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    counted = {"position_ids": behind_padding(inputs["attention_mask"])} if signature.counts else {}
    return model(**inputs, **counted, **cached, return_dict=True)


def behind_padding(mask: Tensor) -> Tensor:
    """Return position ids [B, L]: the first token that `mask` [B, L] shows stands at 0, those before it too.

    Example:
        >>> behind_padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist()
        [[0, 0, 0, 1], [0, 1, 2, 3]]
    """
    padding = (mask.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True)  # [B, 1]
    return (torch.arange(mask.shape[-1], device=mask.device)[None] - padding).clamp(min=0)


def signature_of(model: Any) -> Signature:
    """Return what a graph of `model` takes and gives.

    Raises:
        UnsupportedModelError: no family describes the model.
        UnsupportedSwapError: it reads something else than text, or gives something else than scores or states.
    """
    main, named = locate(model).main, type(model).__name__
    takes = inspect.signature(type(model).forward).parameters
    if main.inputs != "text" or "input_ids" not in takes or "attention_mask" not in takes:
        raise UnsupportedSwapError(f"a graph is written of models that read text, by token ids; {named} does not.")
    names = ["input_ids", "attention_mask"]
    if model.config.is_encoder_decoder:
        names += ["decoder_input_ids", "decoder_attention_mask"]
    elif "token_type_ids" in takes and (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        names.append("token_type_ids")
    alone = main.geometry.causal and not model.config.is_encoder_decoder
    signature = Signature(tuple(names), counts=alone and "position_ids" in takes)
    with torch.no_grad():
        given = run(model, signature, signature.sample())
    outputs = tuple(name for name in OUTPUTS if isinstance(given.get(name), Tensor))
    if not outputs or "logits" in given and given["logits"].dim() not in (2, 3):
        raise UnsupportedSwapError(f"a graph gives {', '.join(OUTPUTS)}, and {named} gives {', '.join(given)}.")
    return Signature(signature.inputs, outputs[:1] if outputs[0] == "logits" else outputs, signature.counts)


def _length_of(name: str) -> str:
    return "decoder_sequence_length" if name.startswith("decoder_") else "sequence_length"
