"""Where windows lie: pieces of documents, and which of them share a window."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

LEAST = 2  # tokens of a piece: one to see, one to predict


@dataclass(frozen=True)
class Cut:
    """Windows over a stream of tokens.

    Attributes:
        starts: of each piece in the stream, int64 [P].
        lengths: of each piece, int64 [P].
        ends: end of the document that each piece is of, in the stream, int64 [P].
        windows: where the pieces of each window begin in the arrays, and the end, int64 [W + 1].
        left: tokens that are in no window.
    """

    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    windows: np.ndarray
    left: int

    def __len__(self) -> int:
        return len(self.windows) - 1

    def pieces(self, window: int) -> list[tuple[int, int, int]]:
        """Return start, length and end of the document of each piece in `window`."""
        inside = slice(self.windows[window], self.windows[window + 1])
        held = (self.starts[inside], self.lengths[inside], self.ends[inside])
        return [(int(start), int(length), int(end)) for start, length, end in zip(*held, strict=True)]


def cut_pieces(offsets: np.ndarray, size: int, *, whole: bool = False) -> Cut:
    """Return windows of one piece each: the documents cut every `size` tokens.

    Args:
        offsets: where documents begin in the stream, and the end, int64 [documents + 1].
        size: most tokens of a piece.
        whole: leave out the pieces that are shorter than `size`.

    Example:
        >>> cut = cut_pieces(np.array([0, 5, 8]), 3)
        >>> cut.starts.tolist(), cut.lengths.tolist(), cut.left
        ([0, 3, 5], [3, 2, 3], 0)
    """
    total = np.diff(offsets)
    counts = -(-total // size)
    document = np.repeat(np.arange(len(total)), counts)  # of each piece
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[:-1][document] + nth * size
    lengths = np.minimum(size, total[document] - nth * size)
    kept = lengths >= (size if whole else LEAST)
    left = int(lengths[~kept].sum())
    starts, lengths, ends = starts[kept], lengths[kept], offsets[1:][document][kept]
    return Cut(starts, lengths, ends, np.arange(len(starts) + 1), left)


def pack_pieces(cut: Cut, size: int, *, around: int = 0) -> Cut:
    """Return windows that hold several pieces of `cut` each, none of them cut further: best fit, longest first.

    A document that fits into a window is never split (https://arxiv.org/abs/2404.10830).

    Args:
        cut: pieces, one a window.
        size: tokens of a window.
        around: tokens that each piece is wrapped in.

    Example:
        >>> packed = pack_pieces(cut_pieces(np.array([0, 5, 8, 11, 13]), 8), 8)
        >>> [sorted(length for _, length, _ in packed.pieces(w)) for w in range(len(packed))]
        [[3, 5], [2, 3]]
    """
    rooms: list[int] = []  # what is left in open windows: each size once, sorted
    having: dict[int, list[int]] = {}  # the open windows that have so much left
    held: list[list[int]] = []
    for piece in np.argsort(-cut.lengths, kind="stable").tolist():
        needed = int(cut.lengths[piece]) + around
        best = bisect_left(rooms, needed)
        if best == len(rooms):
            window, room = len(held), size
            held.append([])
        else:
            room = rooms[best]
            window = having[room].pop()
            if not having[room]:
                del rooms[best], having[room]
        held[window].append(piece)
        left = room - needed
        if left >= LEAST + around:  # what no piece fits into is closed
            if left not in having:
                insort(rooms, left)
            having.setdefault(left, []).append(window)
    order = np.array([piece for pieces in held for piece in pieces], dtype=np.int64)
    windows = np.cumsum([0, *map(len, held)], dtype=np.int64)
    return Cut(cut.starts[order], cut.lengths[order], cut.ends[order], windows, cut.left)
