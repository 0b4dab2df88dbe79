"""What a length costs: seconds to read it, seconds for each token after it, and bytes kept.

Times are of this machine and this moment: they are reported, and nothing is concluded from them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posswap.compat.transformers_calls import cache_argument, cache_in
from hf_posswap.errors import DataError
from hf_posswap.evaluation.reach import reach_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Cost:
    """What one length cost.

    Attributes:
        length: tokens that were read.
        prefill_seconds: to read them.
        tokens_per_second: of the reading.
        decode_seconds: for each token after them, one at a time; the median.
        cache_bytes: that keys and values take after the reading.
        peak_bytes: most memory that a GPU held beyond the weights; None elsewhere.
    """

    length: int
    prefill_seconds: float
    tokens_per_second: float
    decode_seconds: float
    cache_bytes: int
    peak_bytes: int | None


def forward_operations(model: PreTrainedModel, length: int) -> float:
    """Return about how many floating point operations one forward of `length` tokens takes.

    2 N for each token and 2 * layers * width * length for what it attends to: the first grows with the length, the
    second with its square. N counts all parameters but an input table that is no output head as well. Kaplan et al.
    2020, https://arxiv.org/abs/2001.08361, table 1.

    Args:
        model: of any kind.
        length: tokens.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=2, n_head=2))
        >>> forward_operations(model, 64) - 2 * forward_operations(model, 32)  # 2 * 2 * 16 * (64**2 - 2 * 32**2)
        131072.0
    """
    config: Any = model.config.get_text_config()
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    only_read = table is not None and (head is None or head.weight is not table.weight)
    counted = sum(p.numel() for p in model.parameters()) - (table.weight.numel() if only_read else 0)  # type: ignore[operator]
    attended = getattr(config, "num_hidden_layers", 0) * getattr(config, "hidden_size", 0) * length
    return 2.0 * length * (counted + attended)


@torch.inference_mode()
def measure_cost(model: PreTrainedModel, ids: Tensor, *, new_tokens: int = 8, prefill: int | None = None) -> Cost:
    """Return what reading `ids` and then single tokens costs, after a short forward to warm up.

    Args:
        model: a causal model with a cache.
        ids: [1, L].
        new_tokens: to decode after them; each repeats the last token, which costs what any token does.
        prefill: tokens of one forward, as in `Scorer`; None: all at once.

    Raises:
        DataError: no token to read or to decode, or the model keeps no keys and values.
        PositionRangeError: L + new_tokens is beyond the model's position table.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=2, n_head=2)).eval()
        >>> cost = measure_cost(model, torch.zeros(1, 32, dtype=torch.long))
        >>> cost.length, cost.cache_bytes, cost.prefill_seconds > 0
        (32, 8192, True)
    """
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2 or new_tokens < 1:
        raise DataError(f"a cost is of one text [1, L] and 1 new token or more, got {tuple(ids.shape)}, {new_tokens}.")
    ids = ids.to(model.device)
    on_gpu = model.device.type == "cuda"
    _read(model, ids[:, : min(16, ids.shape[1])], None)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device) if on_gpu else 0
    begin = _now(on_gpu)
    cache = _read(model, ids, prefill)
    seconds = _now(on_gpu) - begin
    kept = _cache_bytes(model, cache)
    peak = torch.cuda.max_memory_allocated(model.device) - before if on_gpu else None
    steps = []
    for step in range(new_tokens):
        begin = _now(on_gpu)
        seen = torch.ones(1, ids.shape[1] + step + 1, dtype=ids.dtype, device=ids.device)
        cache = cache_in(
            model(input_ids=ids[:, -1:], attention_mask=seen, **{cache_argument(model): cache}, use_cache=True)
        )
        steps.append(_now(on_gpu) - begin)
    decode = sorted(steps)[len(steps) // 2]
    return Cost(ids.shape[1], seconds, ids.shape[1] / max(seconds, 1e-9), decode, kept, peak)


def costs_are_possible(model: PreTrainedModel, length: int, new_tokens: int = 8) -> bool:
    """Return whether `length` tokens and `new_tokens` after them are within what `model` runs.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=2, n_head=2))
        >>> costs_are_possible(model, 56), costs_are_possible(model, 64)
        (True, False)
    """
    limit = reach_of(model).limit
    return limit is None or length + new_tokens <= limit


def _read(model: PreTrainedModel, ids: Tensor, prefill: int | None) -> Any:
    """Return the cache after `ids`, read in pieces of `prefill` tokens; no logits are made."""
    piece, cache = prefill or ids.shape[1], None
    body: Any = model.base_model
    for start in range(0, ids.shape[1], piece):
        stop = min(start + piece, ids.shape[1])
        seen = torch.ones_like(ids[:, :stop])
        output = body(
            input_ids=ids[:, start:stop], attention_mask=seen, **{cache_argument(body): cache}, use_cache=True
        )
        cache = cache_in(output)
    return cache


def _cache_bytes(model: PreTrainedModel, cache: Any) -> int:
    layers = getattr(cache, "layers", None)
    if not layers:
        raise DataError(f"{type(model).__name__} keeps no keys and values for each layer: its cost is not measured.")
    held = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
