"""The picture of attention by distance: its bins hold what its pairs were paid, and it is drawn for every page."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest
import torch

from hf_posswap.errors import DataError
from hf_posswap.plotting import AttentionLine, draw_attention
from hf_posswap.plotting.attention import _rows, bin_edges, even_attention

PAIRS = torch.arange(63, 0, -1).double()


def line(number: int = 0, layers: int = 2) -> AttentionLine:
    return AttentionLine(f"model {number}", number, torch.rand(layers, 63).double() + 0.1, PAIRS)


def test_bins_cover_every_distance_once() -> None:
    for count in (1, 2, 3, 7, 63, 64, 1000):
        edges = bin_edges(count)
        assert edges[0] == 1
        assert edges[-1] == count + 1
        assert edges == sorted(set(edges))


def test_a_bin_holds_the_mean_of_its_pairs() -> None:
    one = line()
    places, paid = one.binned(1)
    _, of_all = one.binned()
    edges = bin_edges(63)
    for place, low, high, value, mean in zip(places, edges[:-1], edges[1:], paid, of_all, strict=True):
        inside = range(low - 1, high - 1)
        assert low <= float(place) < high
        pairs = sum(float(PAIRS[d]) for d in inside)
        assert float(value) == pytest.approx(sum(float(one.totals[1, d]) for d in inside) / pairs)
        assert float(mean) == pytest.approx(sum(float(one.totals[:, d].mean()) for d in inside) / pairs)


def test_what_gets_nothing_is_no_point() -> None:
    totals = torch.ones(1, 63)
    totals[0, 31:] = 0
    places, paid = AttentionLine("window", 0, totals, PAIRS).binned()
    assert paid[places < 32].isfinite().all()
    assert paid[places > 32].isnan().all()


@pytest.mark.parametrize("causal", [True, False])
def test_even_attention_is_the_mean_over_pairs_of_one_over_the_keys(causal: bool) -> None:
    made = even_attention(9, causal=causal)
    for distance in range(8):
        each = [1 / (q + 1 if causal else 9) for q in range(1, 9) for k in range(1, 9) if q - k == distance]
        assert float(made[distance]) == pytest.approx(sum(each) / len(each))


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_drawn_and_the_same_twice(tmp_path: Path, dark: bool) -> None:
    lines = {64: [line(0), line(1)]}
    for name in ("one", "two"):
        draw_attention(lines, 32, tmp_path / f"{name}.png", below="two texts", dark=dark)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    corner = matplotlib.image.imread(tmp_path / "one.png")[0, 0, :3].max()
    assert corner < 0.2 if dark else corner == 1.0


def test_a_row_a_layer_is_taller_and_holds_six_at_most(tmp_path: Path) -> None:
    draw_attention({64: [line()]}, 64, tmp_path / "a.png", below="x")
    low = matplotlib.image.imread(tmp_path / "a.png").shape[0]
    draw_attention({64: [line()]}, 64, tmp_path / "a.png", below="x", by_layer=True)
    assert matplotlib.image.imread(tmp_path / "a.png").shape[0] > low
    assert _rows(3) == [0, 1, 2]
    assert _rows(41) == [0, 8, 16, 24, 32, 40]


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs a line, got none"):
        draw_attention({64: []}, 64, tmp_path / "a.png", below="")
    assert list(tmp_path.iterdir()) == []
