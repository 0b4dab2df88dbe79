"""The attention that a model pays to keys by their distance while it reads texts. The model is not changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_posswap.compat.transformers_attention import attention_implementation, can_choose_attention
from hf_posswap.compat.transformers_calls import cache_argument, cache_in
from hf_posswap.errors import DataError, NotEnoughMemoryError, PositionRangeError, UnsupportedModelError
from hf_posswap.evaluation.cost import GIB
from hf_posswap.evaluation.scoring import Reach, apart_in_chunks, reach_of
from hf_posswap.geometry import ConfigSizes
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.utils.devices import available_bytes, evaluating
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_COPIES = 3
"""Copies of one layer's weights in eager attention: scores, masked scores, and the softmax."""
_LEAST = 16
"""Minimum number of queries of one forward."""


@dataclass(frozen=True, repr=False)
class AttentionPaid(ResultView):
    """The attention that a model pays while it reads texts, each from its start.

    The first token of a text is excluded as a key and as a query: it is an attention sink, which would distort the
    distribution over distances. Its share is `first`.

    Attributes:
        tokens: tokens of each text, N.
        texts: number of texts.
        totals: attention paid to keys d = 0, ..., N - 2 tokens away, the mean over heads, summed over the queries of
            all texts, [layers, N - 1] float64; in an encoder, on both sides.
        first: the share of attention on the first token, [layers] float64.
        causal: whether tokens attend only to earlier tokens.
    """

    tokens: int
    texts: int
    totals: Tensor
    first: Tensor
    causal: bool

    @property
    def pairs(self) -> Tensor:
        """Number of query-key pairs at each distance, over all texts, [N - 1]."""
        pairs = torch.arange(self.tokens - 1, 0, -1, dtype=torch.float64)
        if not self.causal:
            pairs[1:] *= 2
        return pairs * self.texts

    @property
    def means(self) -> Tensor:
        """The mean attention weight at each distance, [layers, N - 1]."""
        return self.totals / self.pairs

    @property
    def shares(self) -> Tensor:
        """The share of attention at each distance, [layers, N - 1]; together with `first` the shares sum to 1."""
        return self.totals / (self.texts * (self.tokens - 1))

    @property
    def half(self) -> int:
        """The distance within which half of the attention lies, without the first token, as a mean over layers."""
        share = self.shares.mean(dim=0).cumsum(dim=0)
        return int((share < share[-1] / 2).sum())

    def beyond(self, distance: int) -> float:
        """Return the share of attention on keys more than `distance` tokens away, as a mean over layers."""
        return float(self.shares[:, distance + 1 :].sum(dim=1).mean())


@alone(parameters=False)
def attention_by_distance(model: PreTrainedModel, tokens: np.ndarray, *, most_bytes: int = GIB) -> AttentionPaid:
    """Measure how much attention `model` pays to keys by their distance while it reads `tokens`.

    The weights are those of eager attention with `output_attentions=True`; for an encoder-decoder they are those of its
    encoder. A long text is read in chunks with a cache, if that is equivalent, so that the weights take at most
    `most_bytes`.

    Args:
        model: a text model, swapped or not; it is not changed.
        tokens: token ids [B, N], one text per row, without padding.
        most_bytes: maximum bytes of attention weights held at once, over all layers.

    Raises:
        DataError: the ids are not rows of at least 2 tokens.
        UnsupportedModelError: the model does not read text, or returns no attention weights.
        PositionRangeError: the model cannot run that many tokens.
        NotEnoughMemoryError: the weights of one forward do not fit, and the text cannot be read in chunks.
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> paid = attention_by_distance(model, np.arange(16).reshape(2, 8))
        >>> tuple(paid.means.shape), round(float(paid.first + paid.shares.sum()), 6)
        ((1, 7), 1.0)
    """
    target = unwrap(model)
    ids = torch.as_tensor(np.asarray(tokens))
    if ids.ndim != 2 or ids.shape[1] < 2 or not len(ids):
        raise DataError(f"tokens are ids [B, N], rows of at least 2 tokens, got {tuple(ids.shape)}.")
    check_reads_text(target)
    reach, length = reach_of(target), ids.shape[1]
    if reach.limit is not None and length > reach.limit:
        raise PositionRangeError(f"{type(target).__name__} ends at {reach.limit} tokens, and the texts have {length}.")
    chunk_size = _chunk_size(target, length, reach, most_bytes)
    with _eager_attention(target):
        results = [_read(target, row[None].to(target.device), chunk_size, reach.causal) for row in ids]
    totals, first = (torch.stack(sums).sum(dim=0) for sums in zip(*results, strict=True))
    return AttentionPaid(length, len(ids), totals, first / (len(ids) * (length - 1)), reach.causal)


def check_reads_text(model: PreTrainedModel) -> None:
    """Check that `model` reads token ids, because attention is measured by the distance of tokens in a text.

    Raises:
        UnsupportedModelError: its main input is not token ids.
    """
    reads = getattr(_reader(unwrap(model)), "main_input_name", "input_ids")
    if reads != "input_ids":
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} reads {reads}, and attention is measured by the distance of tokens in a "
            "text: give a model of texts."
        )


def _reader(model: PreTrainedModel) -> nn.Module:
    """Return the stack that reads the text: the encoder of an encoder-decoder, otherwise the base model."""
    return model.get_encoder() if model.config.is_encoder_decoder else model.base_model


def _chunk_size(model: PreTrainedModel, length: int, reach: Reach, most_bytes: int) -> int:
    """Return the number of tokens of one forward."""
    sizes = ConfigSizes.of(model.config)
    a_query = 4 * sizes.heads * length  # bytes per layer
    whole = sizes.layers * length * a_query
    if whole <= most_bytes:
        return length
    chunk_size = min(length, max(_LEAST, most_bytes // (sizes.layers * a_query)))
    if reach.causal and reach.prefix_consistent and apart_in_chunks(model, chunk_size, length) is None:
        return chunk_size
    free, needed = available_bytes(model.device), whole + _COPIES * length * a_query
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"the attention weights of {length} tokens take {needed / GIB:.1f} GiB, {free / GIB:.1f} are free, and by "
            f"{reach.why} {type(model).__name__} cannot read a text in chunks: give shorter texts."
        )
    return length


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    """Put the model in eval mode with eager attention, the only one that returns weights, inside the block."""
    previous = attention_implementation(model.config)
    switch = previous != "eager" and can_choose_attention(model)
    try:
        if switch:
            model.set_attn_implementation("eager")
        with evaluating(model):
            yield
    finally:
        if switch:
            model.set_attn_implementation(previous)


@torch.inference_mode()
def _read(model: PreTrainedModel, ids: Tensor, chunk_size: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention of later tokens by distance, [layers, N - 1], and on the first token, [layers]."""
    length = ids.shape[1]
    reader = _reader(model)
    inputs: dict[str, object] = {"output_attentions": True}
    if not model.config.is_encoder_decoder:
        inputs["use_cache"] = chunk_size < length
    totals, first = torch.zeros(2, 0)
    for begin in range(0, length, chunk_size):
        end = min(begin + chunk_size, length)
        output = reader(input_ids=ids[:, begin:end], attention_mask=torch.ones_like(ids[:, :end]), **inputs)
        layers = [weights for weights in output.attentions or () if isinstance(weights, Tensor)]
        if not layers:
            raise UnsupportedModelError(
                f"{type(model).__name__} returns no attention weights with output_attentions=True."
            )
        if begin == 0:
            totals, first = torch.zeros(len(layers), length - 1, dtype=torch.float64), torch.zeros(len(layers)).double()
        for layer, weights in enumerate(layers):
            paid = weights[0].mean(dim=0).double().cpu()  # [Q, K], K the last keys up to `end`
            _accumulate(paid, begin, end, causal, totals[layer], first[layer : layer + 1])
        if chunk_size < length:
            inputs[cache_argument(reader)] = cache_in(output)
    return totals, first


def _accumulate(paid: Tensor, begin: int, end: int, causal: bool, totals: Tensor, first: Tensor) -> None:
    """Add the attention [Q, K] of queries `begin` to `end` to the layer's sums by distance and for the first token."""
    queries, keys = torch.arange(begin, end), torch.arange(end - paid.shape[1], end)
    if begin == 0:
        paid, queries = paid[1:], queries[1:]
    if keys[0] == 0:
        first += paid[:, 0].sum()
        paid, keys = paid[:, 1:], keys[1:]
    distances = queries[:, None] - keys[None]
    seen = distances >= 0 if causal else torch.ones_like(distances, dtype=torch.bool)
    totals.index_add_(0, distances[seen].abs(), paid[seen])
