"""How much memory a forward needs beyond the weights, how much there is, and how to read within a bound."""

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
_PIECES = (4096, 2048, 1024, 512, 256, 128)
_COMFORTABLE = GIB
_HEAD_COPIES = 3  # logits, their float32, and what cross-entropy makes of them
_SCORE_COPIES = 3  # scores or bias, mask added, softmax
_MLP_COPIES = 2  # FIRE's hidden layer, and its relu
_LINES = 4  # a bias by distance: of both signs, and a copy
_TURN_COPIES = 2  # queries or keys, rotated, and what the rotation makes of them meanwhile


@dataclass(frozen=True)
class Need:
    """An upper estimate of what one forward holds at once beyond the weights, in bytes.

    Attributes:
        states: hidden states and what one layer makes of them.
        scores: attention scores, biases or masks, where they are held whole.
        cache: keys and values, where the text is read in pieces.
        logits: of one chunk.
    """

    states: int
    scores: int
    cache: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.scores + self.cache + self.logits


def forward_need(
    model: PreTrainedModel, length: int, *, prefill: int | None = None, chunk: int = 512, kernels: bool = True
) -> Need:
    """Return what scoring one text of `length` tokens needs beyond the weights.

    Args:
        model: of any kind; its config and its plan say the sizes.
        length: tokens.
        prefill: tokens of one forward, as in `Scorer`; None: all at once.
        chunk: tokens whose logits are held at once.
        kernels: whether a scheme takes the backend that it would take on the model's device, or always its formula.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=64, n_layer=2, n_head=2))
        >>> forward_need(model, 8192).scores, forward_need(model, 8192, prefill=512).cache
        (0, 8388608)
    """
    config: Any = model.config.get_text_config()
    hidden, heads = config.hidden_size, _first(config, "num_attention_heads") or 1  # a state-space model has none
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)  # of all queries
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
    """Return the bytes of what is held of [rows, length]: nothing for one causal forward of a fused kernel.

    Upon a cache the mask is held, for all layers, and while it is read as segments.
    """
    mechanisms = [module for module in model.modules() if isinstance(module, Mechanism)]
    planes = _SCORE_COPIES if rows < length else 0  # the mask that a cache needs
    parts = [_pairs_at_once(m, model, rows, length) if kernels else rows * length for m in mechanisms]
    biases = [(_bias_planes(m, heads), at_once) for m, at_once in zip(mechanisms, parts, strict=True) if m.biases]
    eager = rows * length if attention_implementation(model.config) == "eager" else 0
    held = max(_SCORE_COPIES * heads * eager, *(planes * at_once for planes, at_once in biases), 0)
    split = max((_split_scores(m, model, heads, rows, length, kernels) for m in mechanisms if m.splits), default=0)
    return (planes * rows * length + held + split) * 4


def _split_scores(mechanism: Mechanism, model: Any, heads: int, rows: int, length: int, kernels: bool) -> int:
    """Return how many numbers the scores of a mechanism in pieces take; in fused calls, queries and keys of each."""
    of_key = 2 * _SCORE_COPIES * heads * min(rows, BLOCK)  # in blocks of queries
    if not (kernels and _merges(mechanism, model, rows * length)):
        return of_key * length
    assert mechanism.regions is not None
    at_work = sum(not region.is_ahead for region in mechanism.regions)
    turned = _TURN_COPIES * at_work * heads * mechanism.head_dim * (rows + length)
    return max(turned, of_key * _by_formula(rows, length) // rows)


def _merges(mechanism: Mechanism, model: Any, pairs: int) -> bool:
    """Return whether "auto" takes fused calls for a mechanism in pieces, padded, packed or upon a cache too."""
    at_work = mechanism.backend == "auto" and attention_implementation(model.config) == "sdpa"
    if not at_work or pairs < MIN_QK_PAIRS or mechanism.regions is None or not mergeable(mechanism.regions):
        return False
    return all(one.size == 1 or pairs <= (MOST_CALLS * one.size) ** 2 for one in mechanism.regions)


def _bias_planes(mechanism: Mechanism, heads: int) -> int:
    """Return how many numbers a pair of a query and a key takes while the bias of `mechanism` is made and added.

    On a CPU FIRE's hidden layer is held for so few pairs at once that it does not count.
    """
    inside = 0
    if isinstance(mechanism, FireMechanism) and mechanism.hidden_weight.device.type != "cpu":
        inside = _MLP_COPIES * mechanism.hidden_weight.shape[0]
    return _SCORE_COPIES * heads + inside


def _pairs_at_once(mechanism: Mechanism, model: Any, rows: int, length: int) -> int:
    """Return how many pairs of a query and a key the bias of `mechanism` is held for at once."""
    whole = rows * length
    plain = mechanism.backend != "auto" or model.device.type != "cpu" or whole < MIN_QK_PAIRS
    if plain or attention_implementation(model.config) != "sdpa":
        return whole
    by_distance = mechanism.distance_only or mechanism.slopes is not None
    at_once = _LINES * length if by_distance else min(rows, queries_at_once(length)) * length
    return max(at_once, _by_formula(rows, length))


def _by_formula(rows: int, length: int) -> int:
    """Return the pairs of the largest piece of a text in pieces that is too small for a kernel, at its beginning."""
    return 0 if rows == length else min(rows * length, MIN_QK_PAIRS)


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def choose_prefill(model: PreTrainedModel, length: int, reach: Reach | None = None) -> int | None:
    """Return the tokens of one forward with which `length` tokens stay within 1 GiB beyond weights and cache, or None.

    None, all at once, where that is small enough or where the losses depend on the total length. The choice depends on
    the model and the length alone, never on the machine: so a run that goes on elsewhere computes the same numbers.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=1 << 17, n_embd=96, n_layer=1, n_head=2))
        >>> choose_prefill(model, 1024), choose_prefill(model, 1 << 17)
        (None, 512)
    """
    if not (reach or reach_of(model)).prefix_consistent or _held(model, length) <= _COMFORTABLE:
        return None
    for piece in _PIECES:
        if piece < length and _held(model, length, piece) <= _COMFORTABLE:
            return piece
    return _PIECES[-1] if length > _PIECES[-1] else None


def _held(model: PreTrainedModel, length: int, prefill: int | None = None) -> int:
    need = forward_need(model, length, prefill=prefill, kernels=False)  # the same on every machine
    return need.states + need.scores


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on `device`, in bytes; None where nothing says.

    On the CPU the smaller of what the system can give and what its control group may still take; where a launcher
    started several processes on this machine, an equal part of it.
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
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None


def _control_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(0, int(most) - int(used)) if most.isdigit() else None


def check_memory(model: PreTrainedModel, length: int, *, prefill: int | None, free: int | None = None) -> Need:
    """Return what `length` tokens need, which fits; otherwise raise before anything is run.

    Args:
        model: that will run.
        length: tokens.
        prefill: as in `Scorer`.
        free: bytes; None: what `available_bytes` says.

    Raises:
        NotEnoughMemoryError: it does not fit.
    """
    need = forward_need(model, length, prefill=prefill)
    free = available_bytes(model.device) if free is None else free
    if free is None or need.total <= free:
        return need
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in vars(need).items() if value)
    eager = attention_implementation(model.config) == "eager"
    raise NotEnoughMemoryError(
        f"{length:,} tokens of {type(model).__name__} need about {need.total / GIB:.1f} GiB beyond the weights "
        f"({parts}), and {free / GIB:.1f} GiB are free: measure shorter lengths"
        + (", or load it with attn_implementation='sdpa'." if eager else ".")
    )
