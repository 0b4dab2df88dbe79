"""A trial of a scheme inside attention: every method is called once, and its shapes, dtypes and claims are checked."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_posswap.compat.torch_dispatch import PrivateRandomness
from hf_posswap.compat.torch_modules import parameters_as_given
from hf_posswap.compat.torch_tensors import without_fake_mode
from hf_posswap.errors import PosswapError, SchemeError
from hf_posswap.geometry import Geometry
from hf_posswap.schemes.base import Scheme
from hf_posswap.schemes.mechanism import Mechanism, building

_QUERIES, _KEYS = ((0, 1, 5), (2, 3, 6)), ((0, 1, 2, 5), (0, 2, 3, 6))
"""Positions of two rows; one query sees a key that comes later, as a mask may show it."""

_PARTS = {"splits": "pieces", "rotates": "rotate_query", "scales": "scale", "biases": "bias"}
"""The flags of a mechanism that say which of its methods attention calls, and a method that each announces."""

_OTHERS = "whatever the others"
"""Without which a cached forward, or one of fewer rows, would differ from a full one."""

_tried: contextvars.ContextVar[bool] = contextvars.ContextVar("posswap_tried", default=False)


@contextmanager
def already_tried() -> Iterator[None]:
    """Skip trials in the block: its schemes were tried before, for a model of other sizes."""
    token = _tried.set(True)
    try:
        yield
    finally:
        _tried.reset(token)


def refuse_wrong_results(scheme: Scheme, geometry: Geometry) -> None:
    """Call each method of a resolved scheme as attention would, on two short rows, and check what it returns.

    Args:
        scheme: resolved; it acts inside attention.
        geometry: of the model.

    Raises:
        SchemeError: a method raises, or returns a tensor of another shape or dtype than attention needs, nan, or
            numbers that the mechanism's flags contradict, or that depend on other tokens of the call; a method is
            written whose flag is not set; a constant is a buffer; or a parameter gets no gradient, or one that is not
            finite.
    """
    if _tried.get():
        return
    with (
        without_fake_mode(),
        building(),
        PrivateRandomness(0),
        parameters_as_given(),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
    ):
        for mechanism in reversed(list(scheme.mechanism(geometry).modules())):  # the error names the innermost
            if isinstance(mechanism, Mechanism):
                _Trial(scheme, mechanism, geometry).run()


@dataclass(eq=False)
class _Trial:
    """The trial of one mechanism: B = 2 rows of Q = 3 queries and K = 4 keys."""

    scheme: Scheme
    mechanism: Mechanism
    geometry: Geometry
    queries: Tensor = field(default_factory=partial(torch.tensor, _QUERIES), init=False)
    keys: Tensor = field(default_factory=partial(torch.tensor, _KEYS), init=False)

    def run(self) -> None:
        """Check every method that the mechanism's flags announce."""
        self._refuse_unset_flags()
        for name, buffer in self.mechanism.named_buffers():
            if buffer.is_floating_point():
                kept = "a plain attribute, which stays float32; move it to the device of the positions where it is used"
                raise self._wrong(f"buffer {name}", "is rounded by model.to(torch.bfloat16)", kept)
        outputs: list[Tensor] = []
        if self.mechanism.rotates:
            outputs += self._rotations()
        if self.mechanism.splits:
            outputs += self._pieces()
        if self.mechanism.scales:
            outputs += self._scales()
        if self.mechanism.biases:
            outputs += self._biases()
        self._check_gradients(outputs)

    def _refuse_unset_flags(self) -> None:
        """Refuse a method that attention would never call, because its flag was not set; a wrapper may pass on all."""
        if sum(isinstance(module, Mechanism) for module in self.mechanism.modules()) > 1:
            return
        classes = type(self.mechanism).__mro__
        subclasses = classes[: classes.index(Mechanism)]
        attributes = set(vars(self.mechanism)).union(*map(vars, subclasses))
        for flag, method in _PARTS.items():
            rotates_pieces = flag == "rotates" and self.mechanism.splits
            if flag not in attributes and not rotates_pieces and any(method in vars(cls) for cls in subclasses):
                raise self._wrong(
                    method, f"is never called, because {flag} is False", f"the class to set {flag} = True"
                )

    def _check_gradients(self, outputs: list[Tensor]) -> None:
        """Check the gradients of the parameters in use: a blend at weight 0 uses none of its new mechanism."""
        unused: set[int] = set()
        for inner in self.mechanism.modules():
            if not isinstance(inner, Mechanism) or inner is self.mechanism:
                continue
            if not any(getattr(inner, part) and getattr(self.mechanism, part) for part in _PARTS):
                unused.update(map(id, inner.parameters()))
        named = self.mechanism.named_parameters()
        used = {name: each for name, each in named if each.requires_grad and id(each) not in unused}
        if not used or not outputs:
            return
        sums = [output.float().sum() for output in outputs if output.requires_grad]
        gradients = torch.autograd.grad(sums, [*used.values()], allow_unused=True) if sums else [None] * len(used)
        by_layer = type(self.mechanism).for_layer is not Mechanism.for_layer  # others may use what these rows do not
        for name, gradient in zip(used, gradients, strict=True):
            if gradient is None and by_layer and sums:
                continue
            if gradient is None:
                raise self._wrong(f"parameter {name}", "gets no gradient", "results that are computed from it")
            if not bool(gradient.isfinite().all()):
                seen = "nan" if bool(gradient.isnan().any()) else "inf"
                raise self._wrong(
                    f"parameter {name}",
                    f"gets a gradient of {seen}, which the first step of training writes into it",
                    "finite gradients at every distance, 0 and negative ones included",
                )

    def _rotations(self) -> Iterator[Tensor]:
        g, size = self.geometry, self.mechanism.head_dim
        if size != g.head_dim:
            raise self._wrong("head_dim", f"is {size}", f"the width of a head, {g.head_dim}")
        lengths = self.queries.amax(dim=1).add(1)[:, None, None, None]
        for dtype in (torch.float32, torch.bfloat16):
            for positions, length in ((self.queries, lengths), (self.queries[:1], lengths[:1])):
                query, key = (torch.randn(2, heads, 3, size).to(dtype) for heads in (g.num_heads, g.num_kv_heads))
                prepared = self._called("prepare", positions, length)
                last = self._called("prepare", positions[:, -1:], length)  # as a step of decoding asks for it
                width = size * self.mechanism.keys_per_token
                for method, raw, wide in (("rotate_query", query, size), ("rotate_key", key, width)):
                    turned = self._called(method, raw, prepared)
                    self._check(method, turned, [(2, raw.shape[1], 3, wide)], dtype)
                    if dtype == torch.float32 and self.scheme.traits.prefix_consistent:
                        alone = self._called(method, raw[:, :, -1:], last)
                        self._agree(method, alone, turned[:, :, -1:], f"same for a token, {_OTHERS}", "itself")
                    yield turned

    def _pieces(self) -> Iterator[Tensor]:
        g = self.geometry
        float32 = torch.float32  # while a model loads, the default is the dtype of its weights
        query = torch.randn(2, g.num_heads, len(_QUERIES[0]), g.head_dim, dtype=float32)
        key = torch.randn(2, g.num_kv_heads, len(_KEYS[0]), g.head_dim, dtype=float32)
        pieces = self._called("pieces", self.queries, self.keys)
        step = self._called("pieces", self.queries[:, 1:2], self.keys[:, :3])  # of decoding
        same = len(step) == len(pieces) and self.scheme.traits.prefix_consistent
        for piece, alone in zip(pieces, step if same else pieces, strict=True):
            for name, raw, span in (("rotate_query", query, slice(1, 2)), ("rotate_key", key, slice(0, 3))):
                try:
                    turned = getattr(piece, name)(raw, 0, raw.shape[2])
                    of_step = getattr(alone, name)(raw[:, :, span], 0, span.stop - span.start) if same else None
                except Exception as error:  # arbitrary code of a scheme
                    raise self._wrong("pieces", f"cannot {name}: {type(error).__name__}: {error}", "pieces") from error
                self._check(f"{name} of a piece", turned, [tuple(raw.shape)])
                if of_step is not None:
                    expected = f"same for a token, {_OTHERS}"
                    self._agree(f"{name} of a piece", of_step, turned[:, :, span], expected, "itself")
                yield turned

    def _scales(self) -> Iterator[Tensor]:
        for positions in (self.queries, self.queries[:1]):
            scale = self._called("scale", positions)
            rows = sorted({1, len(positions)})
            by_head = [(n, heads, 3) for n in rows for heads in (1, self.geometry.num_heads)]
            self._check("scale", scale, [*((n, 3) for n in rows), *by_head])
            for i in range(3):  # as a step of decoding asks for it
                alone = self._called("scale", positions[:, i : i + 1])
                self._agree("scale", alone, scale[..., i : i + 1], f"same for a position, {_OTHERS}", "itself")
            yield scale

    def _biases(self) -> Iterator[Tensor]:
        heads = self.geometry.num_heads
        for queries, keys in ((self.queries, self.keys), (self.queries[:1], self.keys[:1])):
            bias = self._called("bias", queries, keys)
            self._check("bias", bias, [(n, heads, 3, 4) for n in sorted({1, len(queries)})])
            yield bias
            distances = queries[:, :, None] - keys[:, None]  # [B or 1, Q, K]
            if self.mechanism.distance_only:
                row = self._called("distance_bias", distances.flatten())
                self._check("distance_bias", row, [(heads, distances.numel())])
                by_distance = row.view(heads, *distances.shape).transpose(0, 1)
                self._agree("distance_bias", by_distance, bias, "bias of the same distances")
                for i in (0, -1):
                    alone = self._called("distance_bias", distances.flatten()[i][None])
                    expected = f"same for a distance, {_OTHERS}"
                    self._agree("distance_bias", alone, row[:, i, None], expected, "itself")
            for i in range(3 if self.scheme.traits.prefix_consistent else 0):  # as a step of decoding asks for it
                alone = self._called("bias", queries[-1:, i : i + 1], keys[-1:, : i + 1])
                expected = f"same for a query and a key, {_OTHERS}"
                self._agree("bias", alone, bias[-1:, :, i : i + 1, : i + 1], expected, "itself")
            slopes = self.mechanism.slopes
            if slopes is not None:
                self._check("slopes", slopes, [(heads,)])
                straight = -slopes[:, None, None] * distances[:, None].abs()
                self._agree("slopes", straight, bias, "bias, -slope |distance|")

    def _called(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self.mechanism, method)(*arguments)
        except PosswapError:
            raise
        except NotImplementedError as error:
            raise self._wrong(method, f"is missing: {error}" if str(error) else "is missing", "a method") from error
        except Exception as error:  # arbitrary code of a scheme
            raise self._wrong(method, f"raises {type(error).__name__}: {error}", "a result") from error

    def _check(
        self, method: str, value: object, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> None:
        if not isinstance(value, Tensor):
            raise self._wrong(method, f"gives a {type(value).__name__}", "a tensor")
        if tuple(value.shape) not in shapes:
            given = " or ".join(str(list(shape)) for shape in shapes)
            raise self._wrong(method, f"gives {list(value.shape)}", f"{given}, for B=2 rows, Q=3 queries, K=4 keys")
        if value.dtype != dtype:
            raise self._wrong(method, f"gives {value.dtype}", f"{dtype}, the dtype that it is added or attended in")
        if bool(value.isnan().any()):
            raise self._wrong(method, "gives values that are not numbers (nan)", "numbers")

    def _agree(self, method: str, value: Tensor, other: Tensor, expected: str, other_name: str = "`bias`") -> None:
        if not torch.allclose(value.float(), other.float(), rtol=1e-4, atol=1e-5):
            differ = float((value - other).detach().abs().max())
            raise self._wrong(method, f"differs from {other_name} by {differ:.3g}", f"the {expected}")

    def _wrong(self, method: str, actual: str, expected: str) -> SchemeError:
        return SchemeError(
            f"{self.scheme.name}: {method} of {type(self.mechanism).__name__} {actual}, expected {expected}. "
            "See hf_posswap.schemes.mechanism.Mechanism for what each method returns."
        )
