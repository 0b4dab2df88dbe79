"""Cuts documents into pieces, and packs pieces into windows."""

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
        ends: end of each piece's document in the stream, int64 [P].
        windows: index of the first piece of each window in the arrays, and the end, int64 [W + 1].
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
        columns = (self.starts[inside], self.lengths[inside], self.ends[inside])
        return [(int(start), int(length), int(end)) for start, length, end in zip(*columns, strict=True)]


def cut_pieces(offsets: np.ndarray, size: int, *, whole: bool = False) -> Cut:
    """Return windows of one piece each: the documents cut every `size` tokens.

    Args:
        offsets: start of each document in the stream, and the end, int64 [documents + 1].
        size: most tokens of a piece.
        whole: drop pieces shorter than `size`.

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
    """Return windows that hold several whole pieces of `cut` each: best fit, longest first.

    A document that fits into a window is never split (https://arxiv.org/abs/2404.10830).

    Args:
        cut: pieces, one a window.
        size: tokens of a window.
        around: special tokens added to each piece.

    Example:
        >>> packed = pack_pieces(cut_pieces(np.array([0, 5, 8, 11, 13]), 8), 8)
        >>> [sorted(length for _, length, _ in packed.pieces(w)) for w in range(len(packed))]
        [[3, 5], [2, 3]]
    """
    rooms: list[int] = []  # distinct free sizes of open windows, sorted
    windows_by_room: dict[int, list[int]] = {}  # open windows by free size
    window_pieces: list[list[int]] = []
    for piece in np.argsort(-cut.lengths, kind="stable").tolist():
        needed = int(cut.lengths[piece]) + around
        best = bisect_left(rooms, needed)
        if best == len(rooms):
            window, room = len(window_pieces), size
            window_pieces.append([])
        else:
            room = rooms[best]
            window = windows_by_room[room].pop()
            if not windows_by_room[room]:
                del rooms[best], windows_by_room[room]
        window_pieces[window].append(piece)
        room_left = room - needed
        if room_left >= LEAST + around:  # a window too small for any piece is closed
            if room_left not in windows_by_room:
                insort(rooms, room_left)
            windows_by_room.setdefault(room_left, []).append(window)
    order = np.array([piece for pieces in window_pieces for piece in pieces], dtype=np.int64)
    windows = np.cumsum([0, *map(len, window_pieces)], dtype=np.int64)
    return Cut(cut.starts[order], cut.lengths[order], cut.ends[order], windows, cut.left)
