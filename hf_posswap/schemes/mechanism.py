"""The module of a scheme inside attention: it rotates queries and keys, biases scores, or splits attention.

An operator of a compiled graph takes only tensors: it finds its mechanism by a number in one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posswap.compat.torch_tensors import without_fake_mode
from hf_posswap.kernels.merge import Region
from hf_posswap.kernels.piecewise_bias import PiecewiseBias
from hf_posswap.schemes.common.piece import Keys, Piece

if TYPE_CHECKING:
    from hf_posswap.rope_math import CosSin

_OWNERS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number(owner: object) -> Tensor:
    """Return a tensor [] by which `numbered` finds `owner` while it is alive; a copy of it needs its own number.

    Example:
        >>> class Owner: ...
        >>> owner = Owner()
        >>> numbered(number(owner)) is owner
        True
    """
    identifier = next(_NUMBERS)
    _OWNERS[identifier] = owner
    with without_fake_mode(), torch.inference_mode(False):
        return torch.tensor(identifier, device="cpu")


def numbered(tensor: Tensor) -> Any:
    """Return the object that `number` created `tensor` for."""
    return _OWNERS[int(tensor)]


@contextmanager
def building() -> Iterator[None]:
    """Let a mechanism that is built inside the block have real float32 tensors on the CPU, also while a model loads.

    A model loads on the meta device, in the dtype of its weights; a scheme's own constants are in no checkpoint.

    Example:
        >>> with torch.device("meta"), building():
        ...     torch.ones(1)
        tensor([1.])
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def by_head(scale: Tensor) -> Tensor:
    """Return what `Mechanism.scale` gave, [B or 1, Q] or [B or 1, H, Q], as [B or 1, H or 1, Q]."""
    return scale[:, None] if scale.dim() == 2 else scale


class Mechanism(nn.Module):
    """A scheme at work inside the attention of one model; its layers share one instance.

    A subclass sets the flags and overrides the methods that they announce. Learned parameters are ordinary
    `nn.Parameter`s of the subclass. Create them with dtype=torch.float32: they are loaded in the dtype in which they
    were created, whatever the checkpoint's. Constant tensors are plain attributes, never
    buffers, so that `model.to(bfloat16)` leaves them in float32; move them to the device of the positions where they
    are used.
    """

    rotates: bool = False
    """Whether q and k are rotated."""
    stores_rotated_keys: bool = True
    """Whether a key's rotation never changes later, so that the cache may hold rotated keys."""
    biases: bool = False
    """Whether a bias is added to the attention scores."""
    distance_only: bool = False
    """Whether the bias is a function of the distance alone: `distance_bias` gives it."""
    settles_at: int | None = None
    """The distance from which the bias of keys in the past stays the same, where it is a function of distance alone."""
    piecewise: bool = False
    """Whether the bias is piecewise linear in a share of distance and query position: `piecewise_bias` gives it."""
    hidden_width: int = 0
    """W, where a network with one hidden layer of W numbers for each query and key computes the bias."""
    slopes: Tensor | None = None
    """m_h, [H], float32, where the bias is -m_h |i - j|; None: the bias has another form."""
    learns_slopes: bool = False
    """Whether there are `slopes` that follow learned parameters; otherwise they never change."""
    regions: tuple[Region, ...] | None = None
    """The regions of the pieces, where they are fixed; None: they follow the input, or there are none."""
    splits_queries: bool = False
    """Where it splits: whether the position of the query alone tells the piece, an `OfQueries`."""
    backend: str = "auto"
    """How attention with this mechanism is computed: see `set_backend`."""
    splits: bool = False
    """Whether attention splits into pieces, each with its own rotations."""
    keys_per_token: int = 1
    """Where it splits: how many rotated copies of each key `rotate_key` returns, side by side, for the cache; each
    piece uses its own copy. 1: the pieces rotate the keys themselves, or share them."""
    turns_on: bool = False
    """Whether the cache may hold only the far piece's key of each token, instead of several copies; each step then
    re-rotates the near keys from it."""
    scales: bool = False
    """Whether each query is multiplied by a number that depends on its position."""
    head_dim: int = 0
    """D, where the mechanism rotates or splits."""
    watches: bool = False
    """Whether `watch` is called with the inputs of the scores; for measurements, never for a scheme."""

    def __init__(self) -> None:
        super().__init__()
        self._number = number(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what was copied or pickled."""
        super().__setstate__(state)
        self._number = number(self)

    @property
    def number(self) -> Tensor:
        """The number by which a compiled graph finds this mechanism, []."""
        return self._number

    @property
    def turns(self) -> bool:
        """Whether q and k are rotated by this mechanism or any inside it."""
        return any(module.rotates or module.splits for module in self.modules() if isinstance(module, Mechanism))

    def for_layer(self, layer: int) -> Mechanism:
        """Return the mechanism of attention layer `layer`, counted from 0: this one, if all layers share it."""
        return self

    def prepare(self, positions: Tensor, length: Tensor) -> CosSin:
        """Return what `rotate_query` and `rotate_key` need for tokens at `positions` [B or 1, Q]: usually cos and sin.

        Args:
            positions: of the tokens to rotate, [B or 1, Q].
            length: tokens seen so far, per row, [B or 1, 1, 1, 1].
        """
        raise NotImplementedError

    def rotate_query(self, query: Tensor, prepared: CosSin) -> Tensor:
        """Return `query` [B, H, Q, D] rotated."""
        raise NotImplementedError

    def rotate_key(self, key: Tensor, prepared: Any) -> Tensor:
        """Return `key` [B, G, K, D] rotated."""
        raise NotImplementedError

    def rotate_far(self, key: Tensor, prepared: Any) -> Tensor:
        """Return `key` [B, G, K, D] rotated for the far piece, where `turns_on`."""
        raise NotImplementedError

    def pieces(self, query_positions: Tensor, key_positions: Tensor, *, keys: Keys = "raw") -> tuple[Piece, ...]:
        """Return the pieces of the attention of queries at [B or 1, Q] to keys at [B or 1, K].

        Each query-key pair belongs to one piece, even if the key comes later: masks decide what is visible.

        Args:
            query_positions: [B or 1, Q].
            key_positions: [B or 1, K].
            keys: the form of the keys: "copies", as `rotate_key` returns them, `keys_per_token` > 1 of each; "far", as
                `rotate_far` returns them.
        """
        raise NotImplementedError

    def scale(self, query_positions: Tensor) -> Tensor:
        """Return what multiplies the queries at [B or 1, Q]: [B or 1, Q] or, by head, [B or 1, H, Q]; float32."""
        raise NotImplementedError

    def watch(self, query: Tensor, key: Tensor, scaling: float | None, mask: Tensor | None, window: int | None) -> None:
        """Observe the inputs of the scores before a bias is added: scaling q k; None scales by 1/sqrt(D).

        Args:
            query: [B, H, Q, D].
            key: [B, G, K, D].
            scaling: as the model passes it on.
            mask: likewise.
            window: likewise: the most keys that a query sees, if the mask does not encode it.
        """
        raise NotImplementedError

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return what is added to the scaled scores, [B or 1, H, Q, K], float32.

        It is added together with the mask: in a model that caps its scores (Gemma 2's softcap) it is added after the
        cap, so it can suppress far keys by more than the cap allows.

        Args:
            query_positions: [B or 1, Q].
            key_positions: [B or 1, K]; keys in the future or in padding are masked elsewhere.
        """
        raise NotImplementedError

    def distance_bias(self, distances: Tensor) -> Tensor:
        """Return the bias of `distances` [N], query position less key position; [H, N], float32."""
        raise NotImplementedError

    def piecewise_bias(self, distances: Tensor, query_positions: Tensor) -> PiecewiseBias:
        """Return the bias of `distances` [N], which rise by one, for queries at `query_positions` [Q]; float64."""
        raise NotImplementedError
