"""The functions by which transformers makes and applies rotary angles.

All are alike in transformers 5.14 to 5.24, but for longrope by layer type, which releases before 5.21 cannot run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

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
    if "freqs_cis" in _arguments(code, "apply_rotary_emb"):  # complex numbers: a quarter turn is i
        quarter = torch.full((1, 1, 2), 1j, device=probe.device)
        return code.apply_rotary_emb(probe[None, None], probe[None, None], quarter)[0]
    if hasattr(code, "_apply_rotary_emb"):  # cos 0 and sin 1, of half the width
        cos, sin = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]], device=probe.device)
        return code._apply_rotary_emb(probe, cos, sin)
    return None


def _arguments(code: ModuleType, name: str) -> Any:
    """Return the arguments, by name, of the function `name` of a module; none where it has no such function."""
    function = getattr(code, name, None)
    return {} if function is None else inspect.signature(function).parameters
