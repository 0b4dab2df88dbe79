"""The cost of a length: seconds of the prefill, seconds per decoded token, and bytes of the cache and of a forward.

Times depend on this machine and its load: they are reported, but no verdict is based on them. From the memory of a
forward beyond the weights and the available memory follow prefill sizes that stay within a bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_posswap.compat.transformers_attention import attention_implementation
from hf_posswap.compat.transformers_calls import cache_argument, cache_in, tensors_of_layers
from hf_posswap.errors import DataError, NotEnoughMemoryError
from hf_posswap.evaluation.scoring import Reach, apart_in_chunks, reach_of
from hf_posswap.geometry import ConfigSizes
from hf_posswap.kernels.blockwise import queries_at_once
from hf_posswap.kernels.merge import mergeable
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.patching.sites.attention.backends import MIN_QK_PAIRS, MOST_CALLS
from hf_posswap.patching.sites.attention.split_attention import BLOCK
from hf_posswap.schemes.mechanism import Mechanism
from hf_posswap.utils.devices import available_bytes, evaluating
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig, PreTrainedModel


GIB = 1 << 30
_CHUNK_SIZES = (4096, 2048, 1024, 512, 256, 128)
_PREFILL_BYTES = GIB
_HEAD_COPIES = 3  # logits, their float32 copy, and cross-entropy's buffer
_SCORE_COPIES = 3  # scores or bias, mask added, softmax
_MLP_COPIES = 2  # a hidden layer, and its relu
_LINES = 4  # a bias by distance: of both signs, and a copy
_TURN_COPIES = 2  # rotated queries or keys, and the rotation's temporary buffer


@dataclass(frozen=True)
class Need:
    """An upper estimate of the memory of one forward beyond the weights, in bytes.

    Attributes:
        states: hidden states and the activations of one layer.
        scores: attention scores, biases or masks, if they are materialized.
        cache: keys and values, if the text is read in chunks.
        logits: logits of one chunk.
    """

    states: int
    scores: int
    cache: int
    logits: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.states + self.scores + self.cache + self.logits


def forward_need(
    model: PreTrainedModel, length: int, *, prefill: int | None = None, chunk: int = 512, kernels: bool = True
) -> Need:
    """Estimate the memory that scoring one text of `length` tokens needs beyond the weights.

    Args:
        model: any transformers model; sizes come from its config and its plan.
        length: number of tokens.
        prefill: tokens of one forward, as in `Scorer`; None: all at once.
        chunk: tokens whose logits are held at once.
        kernels: whether a scheme uses the backend for the model's device, or always its formula.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=2))
        >>> forward_need(model, 8192).scores, forward_need(model, 8192, prefill=512).cache
        (0, 8388608)
    """
    sizes, size = ConfigSizes.of(model.config), model.dtype.itemsize
    width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim  # of all heads
    rows = min(prefill or length, length)
    per_token = (4 * sizes.hidden + 3 * width + 4 * kv_width + 3 * sizes.inner) * size
    cached = rows < length
    return Need(
        states=rows * per_token,
        scores=_scores(model, sizes.heads, rows, length, kernels),
        cache=2 * sizes.layers * kv_width * length * size if cached else 0,
        logits=_HEAD_COPIES * min(chunk, length) * sizes.vocabulary * 4,
    )


def _scores(model: PreTrainedModel, heads: int, rows: int, length: int, kernels: bool) -> int:
    """Return the bytes of materialized [rows, length] tensors: 0 for one causal forward of a fused kernel.

    With a cache the mask is materialized.
    """
    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    planes = _SCORE_COPIES if rows < length else 0  # the mask with a cache
    pairs_at_once = [_pairs_at_once(m, model, rows, length) if kernels else rows * length for m in mechanisms]
    on_cpu = model.device.type == "cpu"  # which computes a network's hidden layer for few pairs at once
    biases = [
        (_SCORE_COPIES * heads + (0 if on_cpu else _MLP_COPIES * m.hidden_width), at_once)
        for m, at_once in zip(mechanisms, pairs_at_once, strict=True)
        if m.biases
    ]
    eager = rows * length if attention_implementation(model.config) == "eager" else 0
    unsplit = max(_SCORE_COPIES * heads * eager, *(planes * at_once for planes, at_once in biases), 0)
    split = max((_split_scores(m, model, heads, rows, length, kernels) for m in mechanisms if m.splits), default=0)
    return (planes * rows * length + unsplit + split) * 4


def _split_scores(
    mechanism: Mechanism, model: PreTrainedModel, heads: int, rows: int, length: int, kernels: bool
) -> int:
    """Return the elements of the scores of a mechanism by region; in fused calls, of each region's queries and keys."""
    of_key = 2 * _SCORE_COPIES * heads * min(rows, BLOCK)  # in blocks of queries
    if not (kernels and _merges(mechanism, model, rows * length)):
        return of_key * length
    if mechanism.splits_queries:
        at_work = 1  # one piece after another
    else:
        assert mechanism.regions is not None
        at_work = sum(not region.is_ahead for region in mechanism.regions)
    turned = _TURN_COPIES * at_work * heads * mechanism.head_dim * (rows + length)
    return max(turned, of_key * _by_formula(rows, length) // rows)


def _merges(mechanism: Mechanism, model: PreTrainedModel, pairs: int) -> bool:
    """Return whether "auto" uses fused calls for a mechanism by region, also with padding, packing or a cache."""
    at_work = mechanism.backend == "auto" and attention_implementation(model.config) == "sdpa"
    if not at_work or pairs < MIN_QK_PAIRS:
        return False
    if mechanism.splits_queries:
        return True
    if mechanism.regions is None or not mergeable(mechanism.regions):
        return False
    return all(region.size == 1 or pairs <= (MOST_CALLS * region.size) ** 2 for region in mechanism.regions)


def _pairs_at_once(mechanism: Mechanism, model: PreTrainedModel, rows: int, length: int) -> int:
    """Return the number of query-key pairs for which the bias of `mechanism` is materialized at once."""
    whole = rows * length
    plain = mechanism.backend != "auto" or model.device.type != "cpu" or whole < MIN_QK_PAIRS
    if plain or attention_implementation(model.config) != "sdpa":
        return whole
    by_distance = mechanism.distance_only or mechanism.slopes is not None
    at_once = _LINES * length if by_distance else min(rows, queries_at_once(length)) * length
    return max(at_once, _by_formula(rows, length))


def _by_formula(rows: int, length: int) -> int:
    """Return the query-key pairs of the largest first chunk of a chunked text that is too small for a kernel."""
    return 0 if rows == length else min(rows * length, MIN_QK_PAIRS)


def choose_prefill(model: PreTrainedModel, length: int, reach: Reach | None = None) -> int | None:
    """Return the tokens of one forward with which `length` tokens stay within 1 GiB beyond weights and cache, or None.

    None means all tokens at once: if that is small enough, or if the losses depend on the total length or on the
    chunks. The choice depends only on the model and the length, so a run that resumes on another machine computes the
    same numbers.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=1 << 17, n_embd=96, n_layer=1, n_head=2))
        >>> choose_prefill(model, 1024), choose_prefill(model, 1 << 17)
        (None, 512)
    """
    if not (reach or reach_of(model)).prefix_consistent:
        return None
    prefill: int | None = None
    for prefill in (None, *(size for size in _CHUNK_SIZES if size < length)):
        need = forward_need(model, length, prefill=prefill, kernels=False)  # the same on every machine
        if need.states + need.scores <= _PREFILL_BYTES:
            break
    if prefill is None or apart_in_chunks(model, prefill, length) is not None:
        return None
    return prefill


def check_memory(model: PreTrainedModel, length: int, *, prefill: int | None, free: int | None = None) -> Need:
    """Return the memory that `length` tokens need, or raise before anything is run.

    Args:
        model: the model to run.
        length: number of tokens.
        prefill: as in `Scorer`.
        free: free bytes; None: those of `available_bytes`.

    Raises:
        NotEnoughMemoryError: the tokens do not fit into memory.
    """
    need = forward_need(model, length, prefill=prefill)
    free = available_bytes(model.device) if free is None else free
    if free is None or need.total <= free:
        return need
    breakdown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in vars(need).items() if value)
    eager = attention_implementation(model.config) == "eager"
    raise NotEnoughMemoryError(
        f"{length:,} tokens of {type(model).__name__} need about {need.total / GIB:.1f} GiB beyond the weights "
        f"({breakdown}), and {free / GIB:.1f} GiB are free: measure shorter lengths"
        + (", or load it with attn_implementation='sdpa'." if eager else ".")
    )


@dataclass(frozen=True, repr=False)
class Cost(ResultView):
    """The cost of one length.

    Attributes:
        length: number of prefilled tokens.
        prefill_seconds: seconds of the prefill.
        tokens_per_second: tokens per second of the prefill.
        decode_seconds: median seconds of one decoding step.
        cache_bytes: bytes of keys and values after the prefill, and of the states of layers without.
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
    config: PreTrainedConfig = model.config.get_text_config()
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
    with evaluating(model):
        _read(model, ids[:, : min(16, ids.shape[1])], None)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device) if on_gpu else 0
        begin = _now(on_gpu)
        cache = _read(model, ids, prefill)
        seconds = _now(on_gpu) - begin
        layers = getattr(cache, "layers", None)
        if not layers:
            raise DataError(f"{type(model).__name__} caches no keys and values per layer: its cost is not measured.")
        kept = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of_layers(layers))
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


def _read(model: PreTrainedModel, ids: Tensor, prefill: int | None) -> Cache | None:
    """Return the cache after `ids`, read in chunks of `prefill` tokens, without computing logits."""
    chunk_size, cache = prefill or ids.shape[1], None
    body = unwrap(model).base_model  # PEFT's base_model gives logits
    for start in range(0, ids.shape[1], chunk_size):
        stop = min(start + chunk_size, ids.shape[1])
        seen = torch.ones_like(ids[:, :stop])
        output = body(
            input_ids=ids[:, start:stop], attention_mask=seen, **{cache_argument(body): cache}, use_cache=True
        )
        cache = cache_in(output)
    return cache


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
