"""What acts inside attention for a scheme: it rotates queries and keys, adds to scores, or splits them into pieces."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_posswap.kernels.merge import Region
from hf_posswap.schemes.common.numbered import number
from hf_posswap.schemes.common.piece import Keys, Piece


class Mechanism(nn.Module):
    """A scheme at work inside the attention of one model; its layers share one instance.

    A subclass sets the flags and overrides the methods that they announce. Learned parameters, where a scheme has
    them, are ordinary `nn.Parameter`s of the subclass, made with dtype=torch.float32: the dtype that they are made with
    is the one that they are loaded in, whatever the checkpoint's. Constant tensors are plain attributes, never
    buffers, so that `model.to(bfloat16)` leaves them in float32.
    """

    rotates: bool = False
    """Whether q and k are rotated."""
    stores_rotated_keys: bool = True
    """Whether a key's rotation never changes later, so that the cache may hold rotated keys."""
    biases: bool = False
    """Whether a bias is added to the attention scores."""
    distance_only: bool = False
    """Whether the bias is a function of the distance alone: `distance_bias` gives it."""
    slopes: Tensor | None = None
    """m_h, [H], float32, never trained, where the bias is -m_h |i - j|; None: it is another."""
    regions: tuple[Region, ...] | None = None
    """The regions of the pieces, where they are fixed; None: they follow the input, or there are none."""
    backend: str = "auto"
    """How attention with this mechanism is computed: see `set_backend`."""
    splits: bool = False
    """Whether attention falls into pieces, each with rotations of its own."""
    keys_per_token: int = 1
    """Where it splits: how many keys `rotate_key` makes of each, side by side, for the cache to hold and the pieces to
    take their own from; 1: the pieces rotate the keys, or have them in common."""
    turns_on: bool = False
    """Where the cache may hold several keys of each token: whether it may as well hold the one of the far piece, from
    which the near ones are turned on in each step."""
    scales: bool = False
    """Whether each query is multiplied by a number that depends on its position."""
    head_dim: int = 0
    """D, where the mechanism rotates or splits."""
    watches: bool = False
    """Whether `watch` is shown what scores are made of; for measurements, never for a scheme."""

    def __init__(self) -> None:
        super().__init__()
        self._number = number(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was copied or pickled."""
        super().__setstate__(state)
        self._number = number(self)

    @property
    def number(self) -> Tensor:
        """By which a compiled graph finds it, []."""
        return self._number

    @property
    def turns(self) -> bool:
        """Whether q and k are rotated, anywhere in it."""
        return any(part.rotates or part.splits for part in self.modules() if isinstance(part, Mechanism))

    def for_layer(self, layer: int) -> Mechanism:
        """Return the mechanism of attention layer `layer`, counted from 0: this one, where all have the same."""
        return self

    def prepare(self, positions: Tensor, length: Tensor) -> Any:
        """Return what `rotate_query` and `rotate_key` need for tokens at `positions` [B or 1, Q]: cos and sin, mostly.

        Args:
            positions: of the tokens to rotate, [B or 1, Q].
            length: tokens seen so far, per row, [B or 1, 1, 1, 1].
        """
        raise NotImplementedError

    def rotate_query(self, query: Tensor, prepared: Any) -> Tensor:
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

        Each pair of a query and a key belongs to one piece, also where the key stands later: masks say what is seen.

        Args:
            query_positions: [B or 1, Q].
            key_positions: [B or 1, K].
            keys: how they come: "copies", as `rotate_key` makes them, `keys_per_token` > 1 of each; "far", as
                `rotate_far` makes them.
        """
        raise NotImplementedError

    def scale(self, query_positions: Tensor) -> Tensor:
        """Return what multiplies the queries at [B or 1, Q], [B or 1, Q], float32."""
        raise NotImplementedError

    def watch(self, query: Tensor, key: Tensor, scaling: float | None, mask: Any, window: int | None) -> None:
        """Look at what scores are made of before a bias is added: scaling q k; None scales by 1/sqrt(D).

        Args:
            query: [B, H, Q, D].
            key: [B, G, K, D].
            scaling: as the model passes it on.
            mask: likewise.
            window: likewise: keys that a query sees at most, where the mask does not say it.
        """
        raise NotImplementedError

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return what is added to the scaled scores, [B or 1, H, Q, K], float32.

        It comes with the mask: where a model caps its scores (Gemma 2's softcap) it is added after the cap, so that
        far keys may be put away by more than the cap allows a score to say.

        Args:
            query_positions: [B or 1, Q].
            key_positions: [B or 1, K]; keys in the future or in padding are masked elsewhere.
        """
        raise NotImplementedError

    def distance_bias(self, distances: Tensor) -> Tensor:
        """Return the bias of `distances` [N], query position less key position; [H, N], float32."""
        raise NotImplementedError
