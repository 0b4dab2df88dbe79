"""The tiny twin of a model: same class and config, with reduced sizes and the same switches.

Fields that switch code (layer types, windows, biases, the rope type, grouped keys) are kept; widths, heads, layers,
experts and the vocabulary are set to those of `tiny`. Lengths are kept, because rope parameters depend on them.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hf_posswap.compat.torch_dispatch import PrivateRandomness
from hf_posswap.compat.torch_modules import parameters_as_given
from hf_posswap.compat.transformers_attention import IMPLEMENTATION
from hf_posswap.testing.tiny import OWN, SMALL, TINY_LENGTH, TINY_VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_WIDTHS = ("embedding_size", "word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "d_embed")
"""Widths of embeddings, which some classes project if they differ from the hidden size."""
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
_DEPTHS = tuple(name for name, value in SMALL.items() if name.endswith(("layers", "n_layer")) or name == "depth")
_LENGTHS = tuple(name for name, value in SMALL.items() if value == TINY_LENGTH and "position" in name)
_WINDOWS = (
    *(name for name in SMALL if "window" in name or name in ("local_attention", "attention_chunk_size")),
    "window_size",
)
T = TypeVar("T")

_MAX_LAYER_KINDS = 6
"""Maximum number of distinguished kinds of layers in one model."""
_ON_CPU = ("eager", "sdpa")


def twin_config(config: PreTrainedConfig, *, all_layers: bool = False) -> PreTrainedConfig:
    """Return a copy of `config` with reduced sizes that includes each kind of layer.

    Args:
        config: the native config of any model.
        all_layers: keep the number of layers.

    Example:
        >>> from transformers import Qwen2Config
        >>> twin = twin_config(Qwen2Config(use_sliding_window=True, max_window_layers=30))
        >>> twin.hidden_size, twin.layer_types, twin.rope_parameters["rope_theta"]
        (64, ['full_attention', 'sliding_attention'], 10000.0)
    """
    twin = copy.deepcopy(config)
    for nested in _nested_configs(twin):
        _cut(nested, all_layers or getattr(nested, "is_heterogeneous", False))
        if getattr(nested, "use_cache", None) is False:  # as trainers leave it: position ids that jump would then be
            nested.use_cache = True  # those of packed documents
    if getattr(twin, IMPLEMENTATION, None) not in (None, *_ON_CPU):
        setattr(twin, IMPLEMENTATION, "sdpa")
    for name in ("quantization_config", "auto_map"):
        vars(twin).pop(name, None)
    return twin


def _nested_configs(config: Any) -> list[PreTrainedConfig]:
    """Return `config` and its nested configs, innermost first."""
    inner = [value for value in vars(config).values() if dataclasses.is_dataclass(value) and hasattr(value, "to_dict")]
    return [nested for value in inner for nested in _nested_configs(value)] + [config]


def _cut(config: PreTrainedConfig, all_layers: bool) -> None:
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    overrides = OWN.get(getattr(config, "model_type", ""), {})
    overrides = {name: value for name, value in overrides.items() if _is_size(value)}  # others are no sizes
    sizes = {name: value for name, value in (SMALL | overrides).items() if _is_size(values.get(name))}
    small = {name: value for name, value in sizes.items() if name not in (*_LENGTHS, *_DEPTHS)}
    hidden, heads = _first(values, "hidden_size", config), _first(values, "num_attention_heads", config)
    small |= {name: 64 if values[name] == hidden else 32 for name in _WIDTHS if _is_size(values.get(name))}
    small |= {
        name: 4 if values[name] == heads else 1 if values[name] == 1 else small.get(name) or 2  # all, one or some
        for name in _KEY_HEADS
        if _is_size(values.get(name))
    }
    small |= {name: min(8, values[name]) for name in _WINDOWS if type(values.get(name)) is int and values[name] > 0}
    small |= _head_widths(values, small)
    small |= {name: _cut_ids(value) for name, value in values.items() if name.endswith(("token_id", "token_ids"))}
    if not all_layers:
        small |= _cut_layers(config, values)
    small |= {
        name: [min(8, item) for item in at_layers]
        for name in _WINDOWS
        if isinstance(at_layers := small.get(name, values.get(name)), list) and _are_sizes(at_layers)
    }
    if hidden and values.get("cross_attention_hidden_size"):
        small["cross_attention_hidden_size"] = 64
    rope = values.get("rope_parameters")
    if isinstance(rope, dict):
        width = values.get("qk_rope_head_dim") or values.get("head_dim") or (hidden // heads if heads else 0)
        tiny = small.get("qk_rope_head_dim") or small.get("head_dim") or 16
        small["rope_parameters"] = _cut_rope(rope, tiny / width if width else 1.0)
    for name, value in small.items():
        setattr(config, name, value)


def _is_size(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool) and value > 0) or _are_sizes(value)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _first(values: Mapping[str, object], name: str, config: PreTrainedConfig) -> int:
    value = values.get(name, getattr(config, name, None))
    return value if isinstance(value, int) else 0


def _cut_ids(value: object) -> object:
    if isinstance(value, list):
        return [_cut_ids(item) for item in value]
    return 3 if type(value) is int and value >= TINY_VOCABULARY else value


def _head_widths(values: dict[str, Any], small: dict[str, Any]) -> dict[str, int]:
    """Return head widths that are the sum of others, or equal to one, as in latent attention."""
    rope, rest = "qk_rope_head_dim", "qk_nope_head_dim"
    if not (rope in small and rest in small):
        return {}
    whole, tiny = values[rope] + values[rest], small[rope] + small[rest]
    widths = {name: tiny for name in ("head_dim", "qk_head_dim") if values.get(name) == whole}
    return widths | {name: small[rope] for name in ("head_dim",) if values.get(name) == values[rope]}


def _cut_layers(config: PreTrainedConfig, values: dict[str, Any]) -> dict[str, object]:
    """Return the depths, and the per-layer lists, of the fewest layers that include each kind."""
    depth = _first(values, "num_hidden_layers", config)
    listed = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == depth > 1}
    first_layers: dict[object, int] = {}
    for index, layer in enumerate(zip(*listed.values(), strict=True)):
        first_layers.setdefault(repr(layer), index)
    indices = list(first_layers.values())[:_MAX_LAYER_KINDS] or [0]
    sharing = _first(
        values, "num_kv_shared_layers", config
    )  # the last ones take the keys of earlier ones of their kind
    if len(indices) == 1 or sharing:
        indices *= 2
    cut: dict[str, object] = {name: [value[index] for index in indices] for name, value in listed.items()}
    if sharing:
        cut["num_kv_shared_layers"] = len(indices) // 2
    for name in _DEPTHS:
        if _is_size(values.get(name)):
            cut[name] = len(indices) if values[name] == depth else min(2, values[name])
    return cut


def _cut_rope(rope: dict[str, Any], ratio: float) -> dict[str, object]:
    """Return rope parameters, of one or of several layer types, for heads of `ratio` times the width."""
    cut: dict[str, object] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            cut[name] = _cut_rope(value, ratio)
        elif name == "mrope_section":
            cut[name] = _shares(value, max(1, round(sum(value) * ratio)))
        elif isinstance(value, list | tuple) and len(value) > 1:
            cut[name] = every_nth(value, max(1, round(len(value) * ratio)))
        else:
            cut[name] = value
    return cut


def every_nth(values: Sequence[T], number: int) -> list[T]:
    """Return `number` evenly spaced `values`.

    Example:
        >>> every_nth("abcdefgh", 3)
        ['a', 'c', 'f']
    """
    return [values[index * len(values) // number] for index in range(number)]


def _shares(weights: Sequence[int], total: int) -> list[int]:
    """Return whole numbers in proportion to `weights` with sum `total`."""
    ends = [round(total * sum(weights[: index + 1]) / sum(weights)) for index in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def isolated() -> ExitStack:
    """Return contexts that isolate a twin from the device, gradient mode, autocast and `init_empty_weights` around it.

    A twin runs in one thread: starting others costs more than its small operators.
    """
    stack = ExitStack()
    stack.enter_context(_in_one_thread())
    stack.enter_context(parameters_as_given())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    stack.enter_context(torch.autocast("cpu", enabled=False))
    if torch.empty(0).device.type != "cpu":  # checked first, because the context slows each call
        stack.enter_context(torch.device("cpu"))
    return stack


@contextmanager
def _in_one_thread() -> Iterator[None]:
    """Run torch's operators of this thread without others to help; those of other threads keep theirs."""
    number = torch.get_num_threads()
    if number == 1:
        yield
        return
    torch.set_num_threads(1)  # of this thread, and of all that have yet to run an operator: those get theirs back
    try:
        other = threading.Thread(target=torch.set_num_threads, args=(number,))
        other.start()
        other.join()
        yield
    finally:
        torch.set_num_threads(number)


def build_twin(build: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """Return the model of `build` on the CPU in float32, with random weights large enough for every effect to show.

    The random state of the caller and of other threads is not changed.

    Args:
        build: creates the model.
        seed: of the weights.
    """
    with PrivateRandomness(seed):
        model = build().float().eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> None:
    """Set every trainable weight of `module` to random values, even if it is uninitialized."""
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    sizes = [weight.numel() for weight in weights.values()]
    numbers = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))  # one call for all: it is cheaper
    for (name, weight), noise in zip(weights.items(), numbers.split(sizes), strict=True):
        if weight.ndim > 1:
            weight.copy_(noise.view_as(weight)).mul_(0.2)
        else:
            start = weight if bool((weight.abs() <= 10).all()) else float(name.endswith("weight"))
            weight.copy_(start + noise.view_as(weight) * 0.1)


@torch.no_grad()
def fill_zeros(module: nn.Module, names: Iterable[str], seed: int = 0) -> None:
    """Set those weights in `names` that are all zero to random values."""
    generator, weights = torch.Generator().manual_seed(seed), dict(module.named_parameters())
    for name in names:
        if name in weights and not weights[name].any():
            weights[name].copy_(torch.randn(weights[name].shape, generator=generator) * 0.2)
