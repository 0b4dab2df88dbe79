"""The memory of a forward beyond the weights, the available memory, and prefill sizes that stay within a bound."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.compat.transformers_attention import attention_implementation
from hf_posswap.errors import NotEnoughMemoryError
from hf_posswap.evaluation.reach import Reach, reach_of
from hf_posswap.kernels.made_bias import queries_at_once
from hf_posswap.kernels.merge import mergeable
from hf_posswap.patching.sites.attention.backends import MIN_QK_PAIRS, MOST_CALLS
from hf_posswap.patching.sites.attention.split_attention import BLOCK
from hf_posswap.schemes.fire import FireMechanism
from hf_posswap.schemes.mechanism import Mechanism

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 1 << 30
_CHUNK_SIZES = (4096, 2048, 1024, 512, 256, 128)
_PREFILL_BYTES = GIB
_HEAD_COPIES = 3  # logits, their float32 copy, and cross-entropy's buffer
_SCORE_COPIES = 3  # scores or bias, mask added, softmax
_MLP_COPIES = 2  # FIRE's hidden layer, and its relu
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
    config: Any = model.config.get_text_config()
    hidden, heads = config.hidden_size, _first(config, "num_attention_heads") or 1  # a state-space model has none
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)  # of all query heads
    kv_width = width // heads * (getattr(config, "num_key_value_heads", None) or heads)
    inner = _first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    size = model.dtype.itemsize
    rows = min(prefill or length, length)
    per_token = (4 * hidden + 3 * width + 4 * kv_width + 3 * inner) * size
    cached = rows < length
    return Need(
        states=rows * per_token,
        scores=_scores(model, heads, rows, length, kernels),
        cache=2 * config.num_hidden_layers * kv_width * length * size if cached else 0,
        logits=_HEAD_COPIES * min(chunk, length) * config.vocab_size * 4,
    )


def _scores(model: Any, heads: int, rows: int, length: int, kernels: bool) -> int:
    """Return the bytes of materialized [rows, length] tensors: 0 for one causal forward of a fused kernel.

    With a cache the mask is materialized.
    """
    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    planes = _SCORE_COPIES if rows < length else 0  # the mask with a cache
    pairs_at_once = [_pairs_at_once(m, model, rows, length) if kernels else rows * length for m in mechanisms]
    biases = [
        (_bias_planes(m, heads), at_once) for m, at_once in zip(mechanisms, pairs_at_once, strict=True) if m.biases
    ]
    eager = rows * length if attention_implementation(model.config) == "eager" else 0
    unsplit = max(_SCORE_COPIES * heads * eager, *(planes * at_once for planes, at_once in biases), 0)
    split = max((_split_scores(m, model, heads, rows, length, kernels) for m in mechanisms if m.splits), default=0)
    return (planes * rows * length + unsplit + split) * 4


def _split_scores(mechanism: Mechanism, model: Any, heads: int, rows: int, length: int, kernels: bool) -> int:
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


def _merges(mechanism: Mechanism, model: Any, pairs: int) -> bool:
    """Return whether "auto" uses fused calls for a mechanism by region, also with padding, packing or a cache."""
    at_work = mechanism.backend == "auto" and attention_implementation(model.config) == "sdpa"
    if not at_work or pairs < MIN_QK_PAIRS:
        return False
    if mechanism.splits_queries:
        return True
    if mechanism.regions is None or not mergeable(mechanism.regions):
        return False
    return all(region.size == 1 or pairs <= (MOST_CALLS * region.size) ** 2 for region in mechanism.regions)


def _bias_planes(mechanism: Mechanism, heads: int) -> int:
    """Return the elements per query-key pair while the bias of `mechanism` is computed and added.

    On a CPU, FIRE's hidden layer is computed for so few pairs at once that it is negligible.
    """
    inside = 0
    if isinstance(mechanism, FireMechanism) and mechanism.hidden_weight.device.type != "cpu":
        inside = _MLP_COPIES * mechanism.hidden_weight.shape[0]
    return _SCORE_COPIES * heads + inside


def _pairs_at_once(mechanism: Mechanism, model: Any, rows: int, length: int) -> int:
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


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def choose_prefill(model: PreTrainedModel, length: int, reach: Reach | None = None) -> int | None:
    """Return the tokens of one forward with which `length` tokens stay within 1 GiB beyond weights and cache, or None.

    None means all tokens at once: if that is small enough, or if the losses depend on the total length. The choice
    depends only on the model and the length, so a run that resumes on another machine computes the same numbers.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=1 << 17, n_embd=96, n_layer=1, n_head=2))
        >>> choose_prefill(model, 1024), choose_prefill(model, 1 << 17)
        (None, 512)
    """
    if not (reach or reach_of(model)).prefix_consistent or _activation_bytes(model, length) <= _PREFILL_BYTES:
        return None
    for chunk_size in _CHUNK_SIZES:
        if chunk_size < length and _activation_bytes(model, length, chunk_size) <= _PREFILL_BYTES:
            return chunk_size
    return _CHUNK_SIZES[-1] if length > _CHUNK_SIZES[-1] else None


def _activation_bytes(model: PreTrainedModel, length: int, prefill: int | None = None) -> int:
    need = forward_need(model, length, prefill=prefill, kernels=False)  # the same on every machine
    return need.states + need.scores


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of `device` in bytes, or None if it is unknown.

    On the CPU it is the smaller of the system's available memory and the rest of the control group's limit, divided by
    the number of processes that a launcher started on this machine.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [value for value in (_meminfo(), _control_group()) if value is not None]
    return min(known) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if known else None


def _meminfo(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kilobytes[0]) if kilobytes else None


def _control_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(0, int(most) - int(used)) if most.isdigit() else None


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
