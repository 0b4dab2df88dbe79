"""One call of a patched attention module: its scheme, its positions, and what the layers share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from hf_posswap.errors import PosswapError
from hf_posswap.kernels.flex import shown_blocks
from hf_posswap.patching.sites.attention import backends
from hf_posswap.patching.sites.attention.backends import Layout, Request, lay_out, seen_segments
from hf_posswap.patching.sites.attention.forward_memo import ForwardMemo, Span, identity_of
from hf_posswap.schemes.common.piece import Keys, Piece
from hf_posswap.schemes.mechanism import Mechanism, by_head

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

T = TypeVar("T")

CALL_ARGUMENT = "posswap"


@dataclass
class AttentionCall:
    """What the pre-hook tells the attention function about this call.

    Attributes:
        mechanism: of the layer.
        span: where queries and keys stand.
        memo: of the forward.
        keys: the form in which cached keys come.
        paged: whether the keys are of many requests side by side, and come as they are to be used.
        used: whether the attention function was reached.
    """

    mechanism: Mechanism
    span: Span
    memo: ForwardMemo
    keys: Keys
    paged: bool = False
    used: bool = False

    def rotation(self) -> Any:
        """Return what rotates the new tokens, made once for all layers of a forward."""
        return self._shared("rotation", lambda: self.mechanism.prepare(self.span.query, self.span.length))

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return `query` [B, H, Q, D] and `key` [B, G, K, D] with the scheme's rotation.

        Raises:
            PosswapError: there are not as many keys as the cache announced, so their positions are unknown; or they
                are not in the form in which this call would have put them there.
        """
        if not self.paged and key.shape[2] != self.span.key_length:
            raise PosswapError(
                f"attention got {key.shape[2]} keys where the cache announced {self.span.key_length}: this kind of "
                "cache is not understood, and positions would be wrong. Use use_cache=False, or a DynamicCache."
            )
        if not self.mechanism.rotates and not self.mechanism.splits:
            return query, key
        self._check_written()
        if query.shape[-1] != self.mechanism.head_dim:
            raise PosswapError(
                f"attention got queries of {query.shape[-1]} dimensions a head where the config says "
                f"{self.mechanism.head_dim}: which of them to rotate is unknown, so this scheme cannot be used here."
            )
        if not self.mechanism.rotates:
            self._check_width(key)
            return query, key
        if self.keys == "raw":
            table = self.rotation()
            if not self.span.is_prefill:
                table = self._shared("keys", lambda: self.mechanism.prepare(self.span.key, self.span.length))
            key = self.mechanism.rotate_key(key, table)
        return self.mechanism.rotate_query(query, self.rotation()), key

    def _check_written(self) -> None:
        """Refuse keys of a cache that took them past `written`, where it was to change them."""
        bypassed = self.keys != "raw" and not self.paged and not self.memo.wrote_keys
        if bypassed and not torch.compiler.is_compiling():
            raise PosswapError(
                "a cache took keys without the scheme's rotation: this release of transformers writes caches otherwise "
                "than by Cache.update. Use use_cache=False, or a release that hf_posswap was tested with."
            )

    def _check_width(self, key: Tensor) -> None:
        """Refuse keys [B, G, K, ...] that are not as wide as those that this call would have the cache hold."""
        keys = self.mechanism.keys_per_token if self.keys == "copies" else 1
        if key.shape[-1] != keys * self.mechanism.head_dim:
            raise PosswapError(
                f"the cache gives keys of {key.shape[-1]} dimensions where {keys * self.mechanism.head_dim} were "
                "written: it was filled under other conditions (compiled or not, another device). Use a fresh cache."
            )

    def written(self, key: Tensor) -> Tensor:
        """Return new keys [B, G, Q, D] as the cache stores them."""
        if not torch.compiler.is_compiling():
            self.memo.wrote_keys = True
        rotate = self.mechanism.rotate_far if self.keys == "far" else self.mechanism.rotate_key
        return rotate(key, self.rotation())

    def scaled(self, query: Tensor) -> Tensor:
        """Return `query` [B, H, Q, D] times the scheme's factor of each position."""
        if not self.mechanism.scales:
            return query
        factor = self._shared("scale", lambda: by_head(self.mechanism.scale(self.span.query)))
        return (query * factor[..., None]).to(query.dtype)

    def request(
        self,
        module: nn.Module | None,
        name: str | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Request:
        """Return what a backend is chosen by, under the implementation called `name`."""
        causal = is_causal(module, kwargs)
        return Request(
            mechanism=self.mechanism,
            span=self.span,
            query=query,
            key=key,
            value=value,
            mask=mask,
            causal=causal,
            implementation=name,
            arguments=kwargs,
            read=lambda: self.flex_bias(len(query)),
            find_layout=lambda: self._layout(query, key.shape[2], mask, causal=causal),
            find_shown=lambda: self._shown(mask, key.shape[2]),
            shared=self._once(),
            regions_once=lambda make: self._shared_under(mask, "region blocks", make),
        )

    def _layout(self, query: Tensor, keys: int, mask: Tensor | None, *, causal: bool) -> Layout | None:
        """Return what `query` [B, H, Q, D] sees of `keys` keys."""
        seen = seen_segments(query, keys, mask, self.memo, causal=causal)
        if seen is None:
            return None
        return self._shared(("layout", seen), lambda: lay_out(seen, self.span))

    def _shown(self, mask: Tensor | None, keys: int) -> BlockMask:
        """Return the first `keys` columns of a mask [B or 1, 1, Q, K or more], as flex_attention takes it."""
        assert mask is not None, "asked for where there is a mask"
        return self.memo.of_mask(mask, f"blocks of {keys}", lambda: shown_blocks(mask[..., :keys]))

    def _once(self) -> Callable[[Any, Callable[[], Any]], Any]:
        """Return a function that makes a value once for all layers with the same positions, or else for this call."""
        if self.span.shared_cache is not None:
            return self._shared
        values: dict[object, object] = {}

        def shared(name: str, make: Callable[[], object]) -> Any:
            if name not in values:
                values[name] = make()
            return values[name]

        return shared

    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces into which the scheme splits this attention."""
        known = "pieces", self.keys  # layers may differ in what their caches hold
        return self._shared(known, lambda: self.mechanism.pieces(self.span.query, self.span.key, keys=self.keys))

    def kept_keys(self) -> dict[Any, Any] | None:
        """Return where the layers of a forward keep which keys the pieces hold; None: each layer finds out itself."""
        return None if self.span.shared_cache is None else self._shared(("held", self.keys), dict)

    def bias(self) -> Tensor | None:
        """Return the scheme's bias, [B or 1, H, Q, K] float32, or None."""
        if not self.mechanism.biases:
            return None
        return self._shared("bias", lambda: self.mechanism.bias(self.span.query, self.span.key))

    def biased_mask(self, mask: Tensor | None, dtype: torch.dtype, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what `make` makes of the bias: of a step's one query once for all layers that see `mask`.

        Args:
            mask: that the layer was given.
            dtype: of the queries.
            make: masks the bias [B or 1, H, Q, K] that it is given.
        """

        def masked_bias() -> Tensor:
            bias = self.bias()
            assert bias is not None
            return make(bias)

        one = self.span.query.shape[-1] == 1  # that of many queries would be held until the forward ends
        if not one or backends.is_learned(self.mechanism):
            return masked_bias()
        return self._shared_under(mask, ("masked", dtype), masked_bias)

    def _shared_under(self, mask: Tensor | None, name: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, made once for all layers that stand alike and see `mask` as it is."""
        if mask is None:
            return self._shared((name, None), make)
        if self.span.shared_cache is None or not self.memo.knows(None, mask):  # a traced id would be guarded
            return make()
        # the mask is held too, so that its id is not given to another
        known, _ = self._shared((name, id(mask), identity_of(mask)[1]), lambda: (make(), mask))
        return known

    def flex_bias(self, batch: int) -> Any:
        """Return the scheme's bias as flex_attention may read it from positions, or None."""
        if backends.is_learned(self.mechanism):  # a checkpointed layer must be able to make it again
            return backends.flex_bias(self.mechanism, self.span, batch)
        return self._shared("flex bias", lambda: backends.flex_bias(self.mechanism, self.span, batch))

    def _shared(self, name: Hashable, make: Callable[[], T]) -> T:
        if self.span.shared_cache is None:
            return make()
        # a layer that runs without gradients (reentrant checkpointing) shares nothing with one that needs them
        key = (name, id(self.mechanism), torch.is_grad_enabled())
        value: Any = self.span.shared_cache.get(key)
        if value is None:
            value = make()
            nested = [value]
            for each in nested if backends.is_learned(self.mechanism) else ():  # the list grows
                nested += each if isinstance(each, tuple | list) else vars(each).values() if is_dataclass(each) else ()
            # values with a gradient are made in each layer: a checkpointed layer must be able to make them again
            if not any(isinstance(each, Tensor) and each.requires_grad for each in nested):
                self.span.shared_cache[key] = value
        return value


def is_causal(module: nn.Module | None, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a mask that is left out in this call means causal."""
    causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True)) if causal is None else causal
