"""The norms of a model's queries and keys while it reads texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hf_posswap.errors import SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.patching.apply.patch_model import patched
from hf_posswap.rope_math import CosSin
from hf_posswap.schemes.rope import Rope, RotaryMechanism, RotaryScheme, own_theta
from hf_posswap.search.fitness import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pair_norms(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the 2-norm of each rotary pair of `x` [..., D], float64 [..., R/2]."""
    assert geometry.rotary_dim is not None
    rotated = x[..., : geometry.rotary_dim].double()
    shape = (2, -1) if geometry.layout == "half" else (-1, 2)
    return rotated.unflatten(-1, shape).norm(dim=-2 if geometry.layout == "half" else -1)


def watched_norms(model: PreTrainedModel, geometry: Geometry, rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return the mean norms of each pair of queries [layers, H, R/2] and keys [layers, G, R/2], float64, CPU.

    Args:
        model: the unswapped model, which reads each of `rows` from its start with its own rotation; it is not changed.
        geometry: the model's geometry.
        rows: token ids, one text each.

    Raises:
        SchemeError: its rotation depends on the length.
    """
    if geometry.frequencies is None:
        raise SchemeError(
            f"the rotation of {type(model).__name__} depends on the length of its input, so its queries and keys "
            "cannot be measured; leave tokens out to rank by the weights."
        )
    scheme = Rope(frequencies=geometry.frequencies)
    with evaluating(model), torch.no_grad(), patched(model, scheme, site="attention"):
        watch = _Watch(_OriginalRotation().resolve(geometry, None), geometry)
        path = next(path for path, module in model.named_modules() if isinstance(module, RotaryMechanism))
        model.set_submodule(path, watch)
        for row in rows:
            ids = torch.from_numpy(row.astype(np.int64))[None].to(model.device)
            model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        tokens = sum(map(len, rows))
        layers = [watch.for_layer(index) for index in range(geometry.num_layers)]
        queries = torch.stack([layer.queries for layer in layers]).cpu()
        keys = torch.stack([layer.keys for layer in layers]).cpu()
    return queries / tokens, keys / tokens


@dataclass(frozen=True)
class _OriginalRotation(RotaryScheme):
    """The model's own rotation, including its factor on cos and sin."""

    name: ClassVar[str] = "the model's own rotation"

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        return own_theta(geometry, dtype)

    def attention_scaling(self, geometry: Geometry) -> float:
        return geometry.attention_factor


class _Watch(RotaryMechanism):
    """One `_Layer` for each attention layer."""

    def __init__(self, scheme: _OriginalRotation, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.layers = nn.ModuleList([_Layer(scheme, geometry) for _ in range(geometry.num_layers)])

    def for_layer(self, layer: int) -> _Layer:
        recorder = self.layers[layer]
        assert isinstance(recorder, _Layer)
        return recorder


class _Layer(RotaryMechanism):
    """Rotates queries and keys, and sums their norms over all tokens."""

    def __init__(self, scheme: RotaryScheme, geometry: Geometry) -> None:
        super().__init__(scheme, geometry)
        self.queries = self.keys = torch.zeros(())

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        self.queries = self.queries + pair_norms(query, self.geometry).sum(dim=(0, 2))  # [H, R/2]
        return super().rotate_query(query, prepared)

    def rotate_key(self, key: Tensor, prepared: CosSin) -> Tensor:
        self.keys = self.keys + pair_norms(key, self.geometry).sum(dim=(0, 2))  # [G, R/2]
        return super().rotate_key(key, prepared)
