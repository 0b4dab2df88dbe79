"""How transformers names, finds and chooses attention implementations, and how it makes and applies rotary angles.

All are alike in transformers 5.14 to 5.24, but for longrope by layer type, which releases before 5.21 cannot run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""What attends, as transformers calls it: it returns outputs, and weights where they are asked for."""
IMPLEMENTATION = "_attn_implementation"
"""The attribute of a config by which its attention modules find their implementation."""
_CHOICE = ("_can_set_attn_implementation", "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """Return the name of the attention implementation that modules with `config` take: "sdpa", "eager", ...

    Touches `config._attn_implementation`. Without it nobody can tell how a model attends.
    """
    return getattr(config, IMPLEMENTATION)


def attention_function(name: str | None, eager: Attention | None) -> Attention:
    """Return the attention function called `name`; `eager` for "eager" and None.

    Touches `modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface`, which raises where it knows no such name. Without it
    a scheme cannot hand on to the implementation that the model's own config names.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)  # type: ignore[arg-type]


def register_attention_function(name: str, function: Attention) -> None:
    """Register `function` as the attention implementation `name`, with sdpa's masks.

    Touches `masking_utils.sdpa_mask`, and the public interfaces. Without a mask function of its name an implementation
    gets no mask: padding would silently be attended to.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def attends_by_interface(cls: type) -> bool:
    """Return whether the forward of the attention class `cls` asks an AttentionInterface how to attend.

    Touches `ALL_ATTENTION_FUNCTIONS`, which forwards name, by its type. Without it a family that has the interface is
    taken for one that has not.
    """
    from transformers import AttentionInterface

    return any(isinstance(value, AttentionInterface) for value in _named_by(cls))


def eager_function(cls: type) -> Attention | None:
    """Return what the forward of the attention class `cls` attends with under "eager"; None: nothing of that kind.

    Touches the functions that forwards name, called `eager_attention_forward` in most modeling modules: one that takes
    a module, queries, keys and values. Without it a scheme cannot run under "eager".
    """
    functions = [value for value in _named_by(cls) if inspect.isfunction(value) and _attends(value)]
    return functions[0] if len(functions) == 1 else None


def _attends(function: Callable[..., object]) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    return len(parameters) >= 4 and [parameter.name for parameter in parameters[:2]] == ["module", "query"]


def _named_by(cls: type) -> list[object]:
    """Return the global values that the forward of `cls` names, and those that the methods name which it calls."""
    hashable_class: object = cls  # mypy: the type of a module is not hashable
    return _named(hashable_class)


@functools.cache
def _named(cls: type[nn.Module]) -> list[object]:
    forward: FunctionType = inspect.unwrap(cls.forward)
    values: list[object] = []
    waiting = [forward]
    seen = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in _names_in(function.__code__):
            value = function.__globals__.get(name)
            if value is not None and not any(value is known for known in values):
                values.append(value)
            method = inspect.getattr_static(cls, name, None)
            if inspect.isfunction(method) and method.__module__ == forward.__module__:
                waiting.append(inspect.unwrap(method))
    return values


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def upcast_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return what GPT-2 computes in float32 where its config says `reorder_and_upcast_attn`.

    Touches `GPT2Attention._upcast_and_reordered_attn`. Without it a swapped GPT-2 of such a config would attend in the
    precision of its weights.
    """
    return module._upcast_and_reordered_attn(query, key, value, mask)


def can_choose_attention(model: PreTrainedModel) -> bool:
    """Return whether `model.set_attn_implementation` does anything: where not, transformers only logs.

    Touches `PreTrainedModel._can_set_attn_implementation`, which reads the source of the class. Without it models that
    cannot choose are not told from those that can.
    """
    return bool(model._can_set_attn_implementation())


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Return whether the class of `model` says that it attends by sdpa.

    Touches `PreTrainedModel._supports_sdpa`. Without it `set_attn_implementation("sdpa")` may raise.
    """
    return bool(model._supports_sdpa)


def let_choose_attention(model: PreTrainedModel, *, sdpa: bool) -> None:
    """Have `model` take "eager", and "sdpa" where `sdpa` says so, and refuse all else, whatever its class says.

    Touches `_can_set_attn_implementation` and `_supports_sdpa`, `_supports_flash_attn`, `_supports_flex_attn` of
    PreTrainedModel, on the instance alone. Without it attention modules that were given the interface cannot be told
    how to attend.
    """
    for name, value in zip(_CHOICE, (_yes, sdpa, False, False), strict=True):
        setattr(model, name, value)


def _yes() -> bool:
    return True


def let_class_choose_attention(model: PreTrainedModel) -> None:
    """Take back what `let_choose_attention` did: the class says again what can be chosen.

    Touches the same. Without it an unpatched model would accept implementations that it does not have.
    """
    for name in _CHOICE:
        vars(model).pop(name, None)


def let_choose_flash(model: PreTrainedModel, allowed: bool) -> bool:
    """Have `model` refuse flash attention, or leave it to its class again; return whether it was a choice before.

    Touches `PreTrainedModel._supports_flash_attn`, on the instance alone. Without it continuous batching on a GPU would
    switch a model with a bias or several rotations to flash attention, and answer none of its requests.
    """
    before = bool(model._supports_flash_attn)
    if allowed:
        vars(model).pop("_supports_flash_attn", None)
    elif before:
        model._supports_flash_attn = False
    return before


_LONGROPE_BY_LAYER_TYPE = (5, 21)
_any_release: ContextVar[bool] = ContextVar("_any_release", default=False)


def rope_function(rope_type: str) -> Callable[..., tuple[Tensor, float]]:
    """Return what transformers computes the frequencies of a rope type with, from a config, a device and a length.

    Touches `modeling_rope_utils.ROPE_INIT_FUNCTIONS`, which lacks "default". Without it nobody can tell what stock
    transformers does past the original length.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rope_type]


@contextmanager
def of_any_release() -> Iterator[None]:
    """Let a plan use what a later transformers runs: it is for another program, and not applied here.

    Touches nothing itself. Without it vLLM gets no override for what the installed transformers alone cannot run.
    """
    token = _any_release.set(True)
    try:
        yield
    finally:
        _any_release.reset(token)


def runs_longrope_by_layer_type() -> bool:
    """Return whether this transformers runs longrope in a model whose layer types have rope parameters of their own.

    Touches no name, but `modeling_rope_utils.dynamic_rope_update` by its release: before 5.21 it raises
    UnboundLocalError at the second text beyond the original length. Without it such a model is recommended and stops.
    """
    from transformers import __version__

    if _any_release.get():
        return True
    major, minor = __version__.split(".")[:2]
    return (int(major), int(minor)) >= _LONGROPE_BY_LAYER_TYPE


def quarter_turn(code: ModuleType, probe: Tensor) -> Tensor | None:
    """Return `probe` [1, 4] with each rotary pair turned by 90 degrees, as the modeling `code` of a family turns it.

    Touches `rotate_half`, `apply_rotary_emb` (complex: Llama 4, DeepSeek V2) or `_apply_rotary_emb` (GPT-OSS) of each
    modeling module. Without it nobody can tell how a family pairs dimensions. None: it has none of these.
    """
    if hasattr(code, "rotate_half"):
        return code.rotate_half(probe)
    complex_form = getattr(code, "apply_rotary_emb", None)
    if complex_form is not None and "freqs_cis" in inspect.signature(complex_form).parameters:  # a quarter turn is i
        quarter = torch.full((1, 1, 2), 1j, device=probe.device)
        return complex_form(probe[None, None], probe[None, None], quarter)[0]
    if hasattr(code, "_apply_rotary_emb"):  # cos 0 and sin 1, of half the width
        cos, sin = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]], device=probe.device)
        return code._apply_rotary_emb(probe, cos, sin)
    return None


def turns_part(code: ModuleType, head_dim: int, rotary_dim: int) -> bool:
    """Return whether the modeling `code` of a family turns `rotary_dim` of the dimensions of a head, if it gets those.

    Touches `apply_rotary_pos_emb` of each modeling module. Without it nobody can tell whether a family that turns
    whole heads could turn a part of each, and it is taken for one that cannot.
    """
    head, angles = torch.zeros(1, 1, 1, head_dim, device="cpu"), torch.zeros(1, 1, rotary_dim, device="cpu")
    try:
        turned: tuple[Tensor, ...] = code.apply_rotary_pos_emb(head, head, angles, angles)
    except Exception:  # arbitrary model code, or there is none
        return False
    return turned[0].shape[-1] == head_dim


_MASKED_KEYS = "masked_key_indices"


def has_masked_keys(module: nn.Module, queries: int, keys: int) -> bool:
    """Return whether kvpress hides keys from single heads of the attention `module` in this call.

    Touches `masked_key_indices`, where kvpress's AdaKVPress and presses like it (0.5) note which keys are hidden, and
    clears it in a prefill, as they do. The function that hides them is wrapped around those that transformers has
    registered. Without it an attention that is not one of these would leave the press out silently, and the keys of an
    earlier text would be hidden from the next.

    Args:
        module: of attention.
        queries: that attend in this call.
        keys: that they attend to.
    """
    if module.__dict__.get(_MASKED_KEYS) is None:
        return False
    if queries == keys:
        setattr(module, _MASKED_KEYS, None)
        return False
    return True
