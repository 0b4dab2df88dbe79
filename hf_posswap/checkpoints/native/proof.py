"""The proof that two models compute the same: outputs on random tokens, padded too, at several lengths."""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posswap.errors import SwapVerificationError

TOLERANCE = 1e-4
"""The largest difference of two outputs, as a share of their largest distance from the mean."""
_OUTPUTS = ("logits", "last_hidden_state", "pooler_output")


@dataclass(frozen=True)
class Proof:
    """What was compared.

    Attributes:
        lengths: of the inputs, in tokens.
        difference: the largest absolute difference of two outputs, in float32.
        spread: the largest distance of an output from the mean, as the scale for the difference.
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
def prove_equal(model: Any, native: Any, lengths: tuple[int, ...], *, causal: bool, seed: int = 0) -> Proof:
    """Compare the outputs of two models; both are left unchanged.

    Other dtypes than float32 and float64 are compared in float32, on copies, so that rounding hides no difference.

    Args:
        model: one of them.
        native: the other.
        lengths: of the inputs, in tokens.
        causal: pad on the left, with position ids; otherwise on the right.
        seed: of the tokens.

    Raises:
        SwapVerificationError: the outputs differ, or are not finite.
    """
    pair = [each if each.dtype in (torch.float32, torch.float64) else _wide(each) for each in (model, native)]
    modes = [each.training for each in pair]
    vocabulary = min(each.config.vocab_size for each in pair)
    generator = torch.Generator().manual_seed(seed)
    difference = spread = 0.0
    try:
        for length in lengths:
            ids = _without_padding_tokens(
                model.config, vocabulary, torch.randint(0, vocabulary, (2, length), generator=generator)
            )
            for inputs in _inputs(ids, causal):
                outputs, expected = (_outputs(each.eval(), inputs) for each in pair)
                for name, value in expected.items():
                    apart = float((outputs[name] - value).abs().max())
                    difference = apart if math.isnan(apart) or apart > difference else difference  # NaN stays
                    spread = max(spread, float((value - value.mean()).abs().max()))
    finally:
        for each, training in zip(pair, modes, strict=True):
            each.train(training)
    proof = Proof(lengths, difference, spread)
    if not difference <= TOLERANCE * spread:  # a NaN too
        raise SwapVerificationError(
            f"the converted {type(native).__name__} does not compute what the swapped {type(model).__name__} does: "
            f"{proof}. Nothing was changed; keep the swapped model, and please report this."
        )
    return proof


def _without_padding_tokens(config: Any, vocabulary: int, ids: Tensor) -> Tensor:
    """Return `ids` without padding tokens: RoBERTa's family counts positions by them, its native class does not."""
    padding = getattr(config, "pad_token_id", None)
    return ids if padding is None else torch.where(ids == padding, (padding + 1) % vocabulary, ids)


def _wide(model: Any) -> Any:
    copied = copy.deepcopy(model)
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


def _sound(config: Any, rows: int) -> Tensor:
    """Return noise [rows, M, F] of the length that an audio model needs, the same each time."""
    shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _outputs(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of `model` that are not padding, by name, in float32 on the CPU."""
    parameters = inspect.signature(type(model).forward).parameters
    if model.config.is_encoder_decoder:  # the same tokens in both stacks
        inputs = inputs | {f"decoder_{name}": value for name, value in inputs.items()}
    if "input_features" in parameters:
        inputs = inputs | {"input_features": _sound(model.config, len(inputs["input_ids"]))}
    given = {name: value.to(model.device) for name, value in inputs.items() if name in parameters}
    out = model(**given)
    outputs = {}
    for name in _OUTPUTS:
        value = getattr(out, name, None)
        if value is not None:
            whole = value.dim() == 3
            outputs[name] = (value.cpu()[inputs["attention_mask"].bool()] if whole else value.cpu()).float()
    return outputs
