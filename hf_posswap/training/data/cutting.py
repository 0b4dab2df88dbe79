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


def repeat_pieces(cut: Cut, times: np.ndarray) -> Cut:
    """Return windows of one piece each, with the pieces of `cut` repeated; those repeated 0 times are left out.

    Args:
        cut: pieces, one a window.
        times: how often to take each piece, int64 [P].

    Example:
        >>> cut = repeat_pieces(cut_pieces(np.array([0, 5, 8]), 3), np.array([2, 0, 1]))
        >>> cut.starts.tolist(), cut.left
        ([0, 0, 5], 2)
    """
    index = np.repeat(np.arange(len(cut.starts)), times)
    left = cut.left + int(cut.lengths[times == 0].sum())
    return Cut(cut.starts[index], cut.lengths[index], cut.ends[index], np.arange(len(index) + 1), left)


def concatenate_documents(
    offsets: np.ndarray, size: int, order: np.ndarray, *, skipped: np.ndarray, separator: int = 0
) -> Cut:
    """Return windows of `size` tokens over documents one after another, the last one perhaps shorter.

    A piece that starts at -1 - k, below 0, holds tokens of the separator from k on.

    Args:
        offsets: start of each document in the stream, and the end, int64 [documents + 1].
        size: tokens of a window.
        order: the documents to take, in order, possibly several times, int64.
        skipped: tokens to skip at the beginning of each document, int64 [documents].
        separator: tokens between two documents.

    Example:
        >>> cut = concatenate_documents(np.array([0, 5, 8]), 4, np.array([1, 0]), skipped=np.zeros(2, int), separator=1)
        >>> [[piece[:2] for piece in cut.pieces(window)] for window in range(len(cut))]
        [[(5, 3), (-1, 1)], [(0, 4)]]
        >>> cut.left
        1
    """
    starts = np.stack((offsets[:-1][order] + skipped[order], np.full(len(order), -1)), axis=1).ravel()[:-1]
    lengths = np.stack((np.diff(offsets)[order] - skipped[order], np.full(len(order), separator)), axis=1).ravel()[:-1]
    ends = np.repeat(offsets[1:][order], 2)[:-1]
    kept = lengths > 0
    starts, lengths, ends = starts[kept], lengths[kept], ends[kept]
    begins = np.cumsum(lengths) - lengths  # of each document and separator, in the concatenation
    first, last = begins // size, (begins + lengths - 1) // size  # windows that it is in
    counts = last - first + 1
    whole = np.repeat(np.arange(len(starts)), counts)  # of each piece
    window = first[whole] + np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)
    piece_begins = np.maximum(begins[whole], window * size)
    piece_lengths = np.minimum(begins[whole] + lengths[whole], (window + 1) * size) - piece_begins
    consumed = piece_begins - begins[whole]
    piece_starts = np.where(starts[whole] < 0, -1 - consumed, starts[whole] + consumed)
    windows = np.searchsorted(window, np.arange(int(window[-1]) + 2)) if len(window) else np.zeros(1, dtype=np.int64)
    left = 0
    if len(windows) > 1 and piece_lengths[windows[-2] :].sum() < LEAST:  # a lone last token
        left = int(piece_lengths[windows[-2] :].sum())
        windows = windows[:-1]
    index = slice(0, windows[-1])
    return Cut(piece_starts[index], piece_lengths[index], ends[whole][index], windows, left)


def pack_pieces(cut: Cut, size: int, *, around: int = 0) -> Cut:
    """Return windows that hold several whole pieces of `cut` each: best fit, longest first.

    A document that fits into a window is never split (https://arxiv.org/abs/2404.10830), and no window holds a
    repeated piece twice.

    Args:
        cut: pieces, one a window; copies of one are next to one another, as `repeat_pieces` returns them.
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
    filled: list[tuple[int, int]] = []  # free sizes of the windows that hold a copy of the piece, and these windows
    previous = -1
    for piece in np.argsort(-cut.lengths, kind="stable").tolist():
        needed, start = int(cut.lengths[piece]) + around, int(cut.starts[piece])
        if start != previous:  # not a copy of the piece before it
            for room, window in filled:
                if room not in windows_by_room:
                    insort(rooms, room)
                windows_by_room.setdefault(room, []).append(window)
            previous, filled = start, []
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
        if room - needed >= LEAST + around:  # a window too small for any piece is closed
            filled.append((room - needed, window))
    order = np.array([piece for pieces in window_pieces for piece in pieces], dtype=np.int64)
    windows = np.cumsum([0, *map(len, window_pieces)], dtype=np.int64)
    return Cut(cut.starts[order], cut.lengths[order], cut.ends[order], windows, cut.left)
