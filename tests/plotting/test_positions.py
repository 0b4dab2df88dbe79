"""Pictures of mechanisms: the numbers behind them against formulas and stock transformers, and the files."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.transforms import Bbox
from transformers import BloomConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.errors import (
    CheckpointError,
    DataError,
    OptionError,
    SchemeError,
    UnknownNameError,
    UnsupportedSwapError,
)
from hf_posswap.plotting import PICTURES, canvas, draw_positions
from hf_posswap.plotting.positions import numbers, sheet
from hf_posswap.plotting.positions.maps import PLACES, token_at
from hf_posswap.plotting.positions.numbers import Shown, sample_geometry, shown
from hf_posswap.schemes import SCHEMES, Learned, make_scheme

SHAPE = sample_geometry(heads=4, dim=16, length=64)
PLACED = torch.arange(0, 256, 7)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=11, n_positions=32))


def seen(name: str, **options: object) -> Shown:
    return shown(make_scheme(name, **options), SHAPE)


def stock_scores(config: LlamaConfig, positions: torch.Tensor) -> torch.Tensor:
    """Return q k / sqrt(D) of all-ones queries and keys that stock Llama rotates, [Q, K]."""
    ones = torch.ones(1, 1, len(positions), config.head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(ones, positions[None])
    query, key = apply_rotary_pos_emb(ones, ones, cos, sin)
    return (query @ key.mT)[0, 0] / config.head_dim**0.5


def written(path: Path) -> str:
    """Return the text on a picture, from the comments of the .svg beside it; lines are put together."""
    return " ".join(re.findall(r"<!-- (.*?) -->", path.with_suffix(".svg").read_text(encoding="utf-8"), re.DOTALL))


def llama(rope: dict[str, object], length: int = 64) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=length, rope_parameters=rope
    )


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("rope", {"rope_type": "default", "rope_theta": 10000.0}),
        ("linear", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        (
            "yarn",
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scores_are_those_of_stock_attention(name: str, rope: dict[str, object]) -> None:
    expected = stock_scores(llama(rope, 64 if name == "rope" else 256), PLACED)
    made = numbers.scores(seen(name), PLACED, PLACED)
    past = PLACED[None, :] <= PLACED[:, None]
    assert made.shape == (4, len(PLACED), len(PLACED))
    for head in made:
        torch.testing.assert_close(head[past], expected[past], atol=2e-4, rtol=0)
        assert head[~past].isnan().all()


def test_the_mean_score_of_a_rotation_is_the_sum_of_cosines() -> None:
    theta = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    distances = torch.tensor([0, 1, 10, 200])
    expected = [2 * np.cos(theta * d).sum() / 4 for d in distances.tolist()]
    made = numbers.scores_by_distance(seen("rope"), distances)
    np.testing.assert_allclose(made[0], expected, atol=1e-5)


def test_biases_are_added_to_what_tokens_say() -> None:
    mask = torch.ones(1, 64, dtype=torch.long)
    slopes = build_alibi_tensor(mask, BloomConfig(n_head=4).n_head, torch.float32)[:, 0, 1]
    places = torch.arange(64)
    made = numbers.scores(seen("alibi"), places, places, query=torch.zeros(16))
    for head, slope in zip(made, slopes, strict=True):
        expected = -slope * (places[:, None] - places[None, :])
        past = expected <= 0
        torch.testing.assert_close(head[past], expected[past])


def test_wavelengths_are_two_pi_over_theta() -> None:
    expected = [2 * math.pi * 10000 ** (2 * i / 16) for i in range(8)]
    np.testing.assert_allclose(numbers.wavelengths(seen("rope")), expected, rtol=1e-12)
    np.testing.assert_allclose(numbers.wavelengths(seen("linear")), 4 * np.array(expected), rtol=1e-12)
    assert numbers.wavelengths(seen("p_rope"))[-1] == math.inf


def floor_map(query: int, key: int, window: int, group: int) -> int:
    """Return the distance of Self-Extend, one pair at a time: arXiv 2401.01325, equation 3."""
    distance = query - key
    return distance if distance < window else query // group - key // group + window - window // group


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("rope", {}, lambda q, k: q - k),
        ("linear", {}, lambda q, k: (q - k) / 4),
        ("rerope", {"window": 20}, lambda q, k: min(q - k, 20)),
        ("self_extend", {"window": 16, "group": 8}, lambda q, k: floor_map(q, k, 16, 8)),
    ],
)
def test_apparent_distances(name: str, options: dict[str, object], expected: object) -> None:
    made = numbers.apparent_distances(seen(name, **options), PLACED, PLACED)
    for row, query in enumerate(PLACED.tolist()):
        for column, key in enumerate(PLACED.tolist()):
            if key > query:
                assert made[row, column].isnan()
            else:
                assert made[row, column].item() == pytest.approx(expected(query, key), abs=2e-2)  # type: ignore[operator]


def test_similarities_fall_with_distance_for_sinusoids_and_come_again_in_a_tiled_table() -> None:
    rows = numbers.table_rows(seen("sinusoidal"))
    unit = rows / rows.norm(dim=-1, keepdim=True)
    np.testing.assert_allclose(numbers.similarities(rows), unit @ unit.T, atol=1e-5)
    assert (rows.norm(dim=-1) / rows.norm(dim=-1).mean() - 1).abs().max() < 1e-5  # every position is as long
    tiled = numbers.similarity_by_distance(numbers.table_rows(seen("learned", extend="tile")))
    assert tiled[64] == pytest.approx(1.0)
    assert abs(tiled[32]) < 0.1


def test_no_pair_that_stands_out_is_lost_in_a_map_of_a_long_table() -> None:
    values = torch.randn(50, 50, generator=torch.Generator().manual_seed(1))
    made = numbers.strongest(values, 12)  # cells of 5 x 5
    assert made.shape == (10, 10)
    for row in range(10):
        for column in range(10):
            cell = [float(values[5 * row + i, 5 * column + j]) for i in range(5) for j in range(5)]
            assert float(made[row, column]) == max(cell, key=abs)
    torch.testing.assert_close(numbers.strongest(values, 64), values)
    tiled = numbers.similarities(numbers.table_rows(seen("learned", extend="tile")))  # 256 positions, 64 of their own
    assert (numbers.strongest(tiled, 96) > 0.99).any(dim=1).all()


def test_what_is_learned_is_said_to_be_drawn_as_it_begins(tmp_path: Path) -> None:
    (drawn,) = draw_positions(["t5", "alibi"], tmp_path, geometry=SHAPE, pictures=["bias"])
    assert drawn.said[0] == "t5: from 0 to 0 over 4 heads (learned: drawn at initialization)"
    assert "learned" not in drawn.said[1]


@pytest.mark.parametrize("length", [64, 100])
def test_scores_are_said_at_the_ends_of_window_and_text(tmp_path: Path, length: int) -> None:
    shape = sample_geometry(heads=2, dim=16, length=length)
    (drawn,) = draw_positions(["alibi"], tmp_path, geometry=shape, pictures=["scores"])
    slope = (2**-4 + 2**-8) / 2
    expected = [f"{4 - slope * d:.2f} at {d}" for d in (0, length - 1, 4 * length - 1)]
    assert drawn.said == (f"alibi: {', '.join(expected)}",)


def test_a_token_is_added_to_by_a_table_and_turned_by_a_rotation() -> None:
    token, placed = token_at(seen("sinusoidal"))
    rows = numbers.table_rows(seen("sinusoidal"))
    torch.testing.assert_close(placed - token, rows[list(PLACES)])
    token, placed = token_at(seen("rope"))
    torch.testing.assert_close(placed[0], token)
    torch.testing.assert_close(placed.norm(dim=-1), token.norm().expand(3))
    assert not torch.allclose(placed[1], token)


def test_the_token_is_not_a_row_of_the_table_that_is_added() -> None:
    """Two independent vectors a and b of one size: a and a + b are 45 degrees apart."""
    token, placed = token_at(shown(Learned(), sample_geometry()))
    cosines = torch.nn.functional.cosine_similarity(placed, token[None])
    torch.testing.assert_close(cosines, torch.full((3,), 0.5**0.5), atol=0.06, rtol=0)


@pytest.mark.slow
def test_what_is_drawn_as_before_training_is_said_on_the_picture(tmp_path: Path) -> None:
    drawn = draw_positions(["sinusoidal", "learned", "alibi", "t5"], tmp_path, geometry=SHAPE)
    for one in drawn:
        shows = {"scores": "Drawn at initialization: t5.", "bias": "Drawn at initialization: t5."}
        words = shows.get(one.name, "Drawn at initialization: learned.")
        assert words in written(one.path), one.name
        assert [line for line in one.said if line.startswith("learned") and "random rows" not in line] == []
    old = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    for one in draw_positions(["sinusoidal", "learned"], tmp_path, geometry=SHAPE, old=old):
        shown_text = written(one.path) + " ".join(one.said)
        assert "initialization" not in shown_text, one.name
        assert "before training" not in shown_text, one.name


def test_the_line_where_the_window_ends_is_named_where_it_is_drawn(tmp_path: Path) -> None:
    for name, words in (("rope", "beyond 64 (the line)"), ("yarn", "None is beyond the original window of 64.")):
        (drawn,) = draw_positions([name], tmp_path, geometry=SHAPE, pictures=["relative"])
        assert words in written(drawn.path)


def test_pictures_of_a_model_begin_with_its_table(tmp_path: Path) -> None:
    old = torch.arange(12.0).reshape(6, 2) + 1
    shape = sample_geometry(heads=1, dim=2, length=6)
    made = numbers.table_rows(shown(Learned(), shape, factor=2, old=old))
    torch.testing.assert_close(made, old.repeat(2, 1))
    (drawn,) = draw_positions([Learned()], tmp_path, pictures=["table"], geometry=shape, old=old, factor=2)
    assert drawn.said == (
        "the model's own: 6 positions of 2 dimensions, up to 12",
        "learned: 12 positions of 2 dimensions, up to 12",
    )


@pytest.mark.slow
def test_a_table_stands_beside_its_replacements(tmp_path: Path) -> None:
    old = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    shape = sample_geometry(heads=1, dim=4, length=8)
    schemes = ["sinusoidal", Learned(extend="tile"), Learned(extend="interpolate")]
    (drawn,) = draw_positions(schemes, tmp_path, pictures=["similarity"], geometry=shape, old=old, factor=2)
    unit = old / old.norm(dim=1, keepdim=True)
    neighbours = (unit[1:] * unit[:-1]).sum(dim=1).mean()
    assert drawn.said[0] == f"the model's own: neighbours {neighbours:.2f}, first and last {unit[0] @ unit[-1]:.2f}"
    assert [line.partition(":")[0] for line in drawn.said] == ["the model's own", "sinusoidal", "learned", "learned"]
    alone = draw_positions([], tmp_path, geometry=shape, old=old)
    assert "token" not in [one.name for one in alone]  # place 99 has no row of its own


@pytest.mark.slow
def test_every_picture_is_drawn_and_the_same_twice(tmp_path: Path) -> None:
    schemes = ["rope", "self_extend", "alibi", "sinusoidal", Learned(extend="interpolate")]
    drawn = draw_positions(schemes, tmp_path / "one", geometry=SHAPE)
    assert [one.name for one in drawn] == list(PICTURES)
    assert [line for one in drawn for line in one.said if re.search(r"-0\.0+\b", line)] == []
    again = draw_positions(schemes, tmp_path / "two", geometry=SHAPE, pictures=["scores", "similarity"])
    firsts = {one.name: one for one in drawn}
    for two in again:
        one = firsts[two.name]
        assert one.path.read_bytes() == two.path.read_bytes()
        assert one.path.with_suffix(".svg").read_bytes() == two.path.with_suffix(".svg").read_bytes()
        assert one.said == two.said


def test_a_dark_page_is_dark(tmp_path: Path) -> None:
    (drawn,) = draw_positions(["rope"], tmp_path, geometry=SHAPE, pictures=["scores"], dark=True)
    assert matplotlib.image.imread(drawn.path)[0, 0, :3].max() < 0.2
    assert "#16191d" in drawn.path.with_suffix(".svg").read_text()


def test_settings_of_matplotlib_stay_whoever_ends_first(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"text.color": "#ff00fe"}):  # the user's own pictures
        (drawn,) = draw_positions(["rope"], tmp_path, geometry=SHAPE, pictures=["scores"], dark=True)
        outer = sheet.sheet(tmp_path / "dark.png", "heading", "below", dark=True)
        outer.__enter__()
        inner = sheet.sheet(tmp_path / "light.png", "heading", "below")
        inner.__enter__()
        matplotlib.rcParams["lines.linewidth"] = 7.0  # in another thread
        outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        assert matplotlib.rcParams["lines.linewidth"] == 7.0
        assert matplotlib.rcParams["text.color"] == "#ff00fe"
    assert dict(matplotlib.rcParams) == before
    assert "#ff00fe" not in drawn.path.with_suffix(".svg").read_text()


def test_every_scheme_for_texts_has_something_to_show() -> None:
    for name, scheme in SCHEMES.items():
        if "text" in scheme.inputs and name not in ("longrope", "per_layer"):  # these say nothing without fields
            subject = seen(name)
            assert any(picture.takes(subject) for picture in PICTURES.values()), name
            assert numbers.scores(subject, PLACED[-1:], PLACED).isfinite().all(), name


def test_a_scheme_of_bounded_reach_is_drawn_so_far_and_says_so() -> None:
    subject = numbers.shown(make_scheme("string"), numbers.sample_geometry(), factor=4.0)
    assert (subject.name, subject.length) == ("string, to 597 tokens", 597)
    assert numbers.shown(make_scheme("string"), numbers.sample_geometry(), factor=1.1).name == "string"


@pytest.mark.parametrize("maps", [1, 2, 3, 4, 5])
def test_no_words_lie_on_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maps: int) -> None:
    """Square maps leave their sheet little room: heading, names, axes and what stands below keep apart."""
    seen: list[list[tuple[str, Bbox]]] = []
    monkeypatch.setattr(canvas, "save", lambda figure, path: seen.append(words_of(figure)))
    draw_positions(["rope", "yarn", "self_extend", "rerope", "ntk"][:maps], tmp_path, pictures=["relative"])
    tables = ["sinusoidal", *(Learned(extend=rule) for rule in ("tile", "interpolate", "group", "random"))]
    draw_positions(tables[:maps], tmp_path, pictures=["similarity"], geometry=SHAPE)
    assert len(seen) == 2
    for words in seen:
        assert len(words) >= 2 + 3 * maps
        near = [(a, b) for (a, one), (b, two) in itertools.combinations(words, 2) if one.overlaps(two)]
        assert near == []


def words_of(figure: Any) -> list[tuple[str, Bbox]]:
    """Return the headings, the names of panels and axes and what stands below, with room of 4 dots around each."""
    figure.canvas.draw()
    panels = [panel for panel in figure.axes if panel.get_visible()]
    words = [text for panel in panels for text in (panel.xaxis.label, panel.yaxis.label, panel._left_title)]
    words += [figure._suptitle, figure._supxlabel]
    return [(one.get_text(), one.get_window_extent().padded(4)) for one in words if one.get_text()]


def test_two_of_one_name_are_told_apart(tmp_path: Path) -> None:
    drawn = draw_positions([make_scheme("rope"), make_scheme("rope", base=500000)], tmp_path, pictures=["wavelengths"])
    assert [line.partition(": ")[0] for line in drawn[0].said] == ["rope", "rope:base=500000.0"]
    tables = [make_scheme("learned", extend=rule) for rule in ("tile", "interpolate")]
    drawn = draw_positions([*tables, "sinusoidal"], tmp_path, pictures=["waves"])
    names = [line.partition(": ")[0] for line in drawn[0].said]
    assert names == ["learned:extend=tile", "learned:extend=interpolate", "sinusoidal"]


@pytest.mark.parametrize(
    ("schemes", "options", "error", "message"),
    [
        ([], {}, OptionError, "at least one scheme"),
        (["rope", "rope"], {}, OptionError, "rope is given twice"),
        (["rope"], {"pictures": ["wavelength"]}, UnknownNameError, "Did you mean 'wavelengths'"),
        (["alibi"], {"pictures": ["turning"]}, OptionError, "alibi: the picture 'turning' does not apply"),
        (["rope"], {"factor": 0.5}, OptionError, "factor is a number of at least 1, got 0.5"),
        (["rope"], {"factor": math.nan}, OptionError, "got nan"),
        (["rope_2d"], {}, OptionError, "rope_2d is for images"),
        (["longrope"], {}, SchemeError, "long_factor"),
        (
            ["rope"],
            {"heads": 2, "geometry": SHAPE},
            OptionError,
            "geometry and heads are given, and each says the geom",
        ),
        (["rope"], {"model": gpt2(), "dim": 8, "length": 9}, OptionError, "model and dim, window are given"),
        (["rope"], {"dim": 7}, OptionError, "dim must be even"),
        (["rope"], {"model": "gpt2"}, UnsupportedSwapError, "got str; load the model first"),
        (["rope"], {"model": patch_model(gpt2(), "alibi")}, DataError, r"this GPT2LMHeadModel carries a swap \(alibi"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_written(
    tmp_path: Path, schemes: list[str], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        draw_positions(schemes, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_strings_and_single_values_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = draw_positions([make_scheme("rope", base=500.0)], tmp_path / "a", pictures=["scores"])
    for given in ("rope:base=500", {"rope_type": "default", "rope_theta": 500.0}, make_scheme("rope", base=500.0)):
        drawn = draw_positions(given, "pics/deep", pictures="scores")
        assert [one.path for one in drawn] == [Path("pics/deep/scores.png")]
        assert drawn[0].said == expected[0].said
        assert drawn[0].path.read_bytes() == expected[0].path.read_bytes()
    for out in (None, 3):
        with pytest.raises(OptionError, match="out is the folder for the pictures, a path, got"):
            draw_positions("rope", out)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write to the folder"):
        draw_positions("rope", "file")


def test_a_model_or_its_numbers_say_the_geometry(tmp_path: Path) -> None:
    model = gpt2()
    report = hf_posswap.describe_positions(model)
    table = model.transformer.wpe.weight.detach().float()
    expected = draw_positions(["learned", "alibi"], tmp_path / "a", geometry=report.geometry, old=table)
    drawn = draw_positions(["learned", "alibi"], tmp_path / "b", model=model)
    assert [one.said for one in drawn] == [one.said for one in expected]
    for one, other in zip(drawn, expected, strict=True):
        assert one.path.read_bytes() == other.path.read_bytes()
    numbers_given = draw_positions("rope", tmp_path / "c", heads=4, dim=16, length=64)
    assert [one.said for one in numbers_given] == [
        one.said for one in draw_positions("rope", tmp_path / "d", geometry=SHAPE)
    ]


@pytest.mark.parametrize(
    ("numbers_of", "message"), [({"dim": 7}, "even"), ({"heads": 0}, "heads is"), ({"length": 1}, "length is")]
)
def test_an_impossible_shape_is_refused(numbers_of: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        sample_geometry(**numbers_of)
