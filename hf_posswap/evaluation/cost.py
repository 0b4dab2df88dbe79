"""The cost of a length: seconds of the prefill, seconds per decoded token, and bytes of the cache.

Times depend on this machine and its load: they are reported, but no verdict is based on them.
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
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False)
class Cost(ResultView):
    """The cost of one length.

    Attributes:
        length: number of prefilled tokens.
        prefill_seconds: seconds of the prefill.
        tokens_per_second: tokens per second of the prefill.
        decode_seconds: median seconds of one decoding step.
        cache_bytes: bytes of keys and values after the prefill.
        peak_bytes: peak GPU memory beyond the weights; None on other devices.
    """

    length: int
    prefill_seconds: float
    tokens_per_second: float
    decode_seconds: float
    cache_bytes: int
    peak_bytes: int | None


def forward_operations(model: PreTrainedModel, length: int) -> float:
    """Estimate the floating-point operations of one forward of `length` tokens.

    Each token takes 2 N operations, and 2 * layers * width * length for attention: the first part grows linearly with
    the length, the second quadratically. N counts all parameters except input embeddings that are not tied to the
    output head. Kaplan et al. 2020, https://arxiv.org/abs/2001.08361, table 1.

    Args:
        model: any transformers model.
        length: number of tokens.

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
    """Measure the cost of prefilling `ids` and of decoding single tokens, after a short warm-up forward.

    Args:
        model: a causal model with a cache.
        ids: token ids, [1, L].
        new_tokens: number of decoding steps; each repeats the last token, because all tokens cost the same.
        prefill: tokens of one forward, as in `Scorer`; None: all at once.

    Raises:
        DataError: there are no tokens to read or to decode, or the model caches no keys and values.
        PositionRangeError: L + new_tokens is beyond the model's position table.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=2, n_head=2)).eval()
        >>> cost = measure_cost(model, torch.zeros(1, 32, dtype=torch.long))
        >>> cost.length, cost.cache_bytes, cost.prefill_seconds > 0
        (32, 8192, True)
    """
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2 or new_tokens < 1:
        raise DataError(
            f"a cost needs one text [1, L], L >= 2, and at least 1 new token, got {tuple(ids.shape)}, {new_tokens}."
        )
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
    """Return whether `model` can run `length` tokens and `new_tokens` after them.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=2, n_head=2))
        >>> costs_are_possible(model, 56), costs_are_possible(model, 64)
        (True, False)
    """
    limit = reach_of(model).limit
    return limit is None or length + new_tokens <= limit


def _read(model: PreTrainedModel, ids: Tensor, prefill: int | None) -> Any:
    """Return the cache after `ids`, read in chunks of `prefill` tokens, without computing logits."""
    chunk_size, cache = prefill or ids.shape[1], None
    body: Any = unwrap(model).base_model  # PEFT's base_model gives logits
    for start in range(0, ids.shape[1], chunk_size):
        stop = min(start + chunk_size, ids.shape[1])
        seen = torch.ones_like(ids[:, :stop])
        output = body(
            input_ids=ids[:, start:stop], attention_mask=seen, **{cache_argument(body): cache}, use_cache=True
        )
        cache = cache_in(output)
    return cache


def _cache_bytes(model: PreTrainedModel, cache: Any) -> int:
    layers = getattr(cache, "layers", None)
    if not layers:
        raise DataError(f"{type(model).__name__} caches no keys and values per layer: its cost is not measured.")
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
