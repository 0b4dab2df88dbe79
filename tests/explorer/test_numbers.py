"""The page's data is what attention does: against real models, stock transformers and the papers' formulas."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posswap
from hf_posswap.errors import PosswapError
from hf_posswap.geometry import Geometry
from hf_posswap.inspection.explorer import data
from hf_posswap.inspection.explorer.model import model_facts
from hf_posswap.inspection.explorer.page import render_page
from hf_posswap.plotting.positions import numbers
from hf_posswap.plotting.positions.numbers import sample_geometry, shown
from hf_posswap.plotting.styles import scheme_number
from hf_posswap.schemes import SCHEMES, Learned, Scheme, make_scheme
from hf_posswap.schemes.alibi import Alibi
from hf_posswap.schemes.common.table import TableScheme
from hf_posswap.schemes.rope import RotaryScheme

WINDOW, HEADS, DIM, BASE = 32, 4, 16, 100.0


@lru_cache(maxsize=1)
def tiny() -> data.Shape:
    return data.Shape("tiny", hf_posswap.describe_positions(llama()).geometry)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS * DIM, intermediate_size=8, num_hidden_layers=4, num_attention_heads=HEADS, vocab_size=9,
        max_position_embeddings=WINDOW, rope_parameters={"rope_type": "default", "rope_theta": BASE},
        attention_bias=True, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@lru_cache(maxsize=4)
def embedded(requested: Scheme | None = None, length: int | None = None) -> dict[str, Any]:
    """Return the data of a page in the tiny shape, as a browser unpacks it."""
    found, _ = data.page_data([tiny()], requested, length)
    return json.loads(json.dumps(found))


def picture(found: dict[str, Any], kind: str, name: str, factor: float) -> tuple[Any, str] | None:
    """Return the numbers and the sentence of a picture in the first shape, or None where it has none."""
    step = next(step for step in found["shapes"][0]["steps"] if step["factor"] == factor)
    drawn = step["drawn"][name].get("pictures", {})
    return (found["pool"][drawn[kind][0]], drawn[kind][1]) if kind in drawn else None


def cells(drawn: dict[str, Any]) -> np.ndarray:
    """Return the numbers of a map: 255 levels from U+0100, and a space where there is none."""
    codes = np.array([ord(letter) for letter in drawn["cells"]], dtype=float)
    values = drawn["low"] + (codes - 0x100) / 254 * (drawn["high"] - drawn["low"])
    values[codes == ord(" ")] = np.nan
    return values.reshape(-1, drawn["columns"])


def attention(name: str, length: int, dims: list[int], size: float = 1.0) -> Tensor | None:
    """Return the scores of a swapped model's first layer less those of each query with itself, [H, N, N].

    Queries and keys have `size` in `dims` of each head, and 0 elsewhere; None: the model cannot have the scheme.
    """
    model, scheme = llama(), SCHEMES.get(name)
    options = scheme.stand_ins(tiny().geometry) if scheme.kind == "mixed" else {}  # as the page draws combinations
    try:
        hf_posswap.patch_model(model, make_scheme(name, **options), max_length=length)
    except PosswapError:
        return None
    vector = torch.zeros(DIM)
    vector[dims] = size
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
        projection.weight.data.zero_()
        projection.bias.data.copy_(vector.repeat(HEADS))
    with torch.no_grad():
        weights = model(torch.zeros(1, length, dtype=torch.long), output_attentions=True).attentions[0][0].double()
    scores = weights.log()  # up to a number for each query
    return scores - scores.diagonal(dim1=1, dim2=2)[..., None]


def patched() -> Iterator[str]:
    yield from (name for name, scheme in SCHEMES.items() if "text" in scheme.inputs)


@pytest.mark.parametrize("name", list(patched()))
def test_scores_are_those_of_a_swapped_model(name: str) -> None:
    found = picture(embedded(), "scores", name, 2)
    real = attention(name, 2 * WINDOW, list(range(DIM)))
    if found is None or real is None:
        assert SCHEMES.get(name).kind == "table" or name in ("longrope", "string", "together")
        return
    drawn, distances = found[0], torch.tensor(found[0]["distances"])
    assert (distances[0], distances[-1]) == (0, 2 * WINDOW - 1)
    per_head = real[:, -1].flip(-1)[:, distances]  # [H, N]
    ends = {"mean": per_head.mean(0), "low": per_head.amin(0), "high": per_head.amax(0)}
    first = [drawn.get(key, drawn["mean"])[0] for key in ends]
    for key in ends if len({*first}) == 1 else ["mean"]:  # FIRE's heads differ at distance 0, too
        values = np.array(drawn.get(key, drawn["mean"]))
        np.testing.assert_allclose(values - values[0], ends[key], atol=2e-3, rtol=2e-4, err_msg=key)


@pytest.mark.parametrize("name", list(patched()))
def test_biases_are_those_of_a_swapped_model(name: str) -> None:
    found = picture(embedded(), "bias", name, 2)
    if found is None:
        return
    real = attention(name, 2 * WINDOW, list(range(DIM)))
    assert real is not None
    for head, drawn in zip(found[0]["heads"], found[0]["maps"], strict=True):
        values = cells(drawn)
        step = (drawn["high"] - drawn["low"]) / 254
        expected = real[head].numpy()
        past = np.tril(np.ones_like(expected, dtype=bool))
        assert (np.isnan(values) == ~past).all()
        own = values.diagonal()[:, None]
        np.testing.assert_allclose((values - own)[past], np.maximum(expected, -30)[past], atol=step + 1e-3)


@pytest.mark.parametrize("name", list(patched()))
def test_distances_are_those_that_a_swapped_model_sees(name: str) -> None:
    found = picture(embedded(), "relative", name, 2)
    scheme = SCHEMES.get(name)
    if found is None or not issubclass(scheme, RotaryScheme):
        assert found is None
        return
    waves = picture(embedded(), "wavelengths", name, 2)
    pair = DIM // 2 - 1 if waves is None else max(k for k, tokens in enumerate(waves[0]) if tokens is not None)
    size = 3.0
    real = attention(name, 2 * WINDOW, [pair], size)
    if real is None or (waves is not None and not scheme.only_rotates):  # xPos: its scores decay, too
        return
    factor = 1.0
    if waves is not None:
        turned = picture(embedded(), "turning", name, 2)
        assert turned is not None
        factor = math.hypot(*turned[0][-1]["points"][0]) ** 2
    cosines = 1 + real[0].numpy() * DIM**0.5 / size**2 / factor
    seen = np.arccos(np.clip(cosines, -1, 1)) * BASE ** (2 * pair / DIM)
    values = cells(found[0])
    past = np.tril(np.ones_like(values, dtype=bool))
    assert (np.isnan(values) == ~past).all()
    half = past & (np.nan_to_num(values) < 3 * BASE ** (2 * pair / DIM))  # beyond half a turn a cosine tells no more
    assert half.sum() > 100
    np.testing.assert_allclose(values[half], seen[half], atol=found[0]["high"] / 254 + 0.15)


def self_extend(i: int, j: int, length: int) -> float:
    near = WINDOW // 4
    group = max(2, math.ceil((length - near) / (WINDOW - near)))
    return i - j if i - j < near else i // group - j // group + near - near // group


def leaky_rerope(i: int, j: int, length: int) -> float:
    near = WINDOW // 4
    return i - j if i - j < near else near + (i - j - near) / max(1, (length - near) / (WINDOW - near))


def dual_chunk(i: int, j: int, length: int) -> float:
    chunk, local = 3 * WINDOW // 4, WINDOW // 8
    size = chunk - local
    apart = i // size - j // size
    query = (i % size, min(i % size + size, chunk), min(2 * size - 1, chunk))[min(apart, 2)]
    return query - j % size


@pytest.mark.parametrize("factor", [1, 4, 64])
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("rope", lambda i, j, length: i - j),
        ("linear", lambda i, j, length: (i - j) * WINDOW / length),
        ("rerope", lambda i, j, length: min(i - j, WINDOW // 4)),
        ("self_extend", self_extend),
        ("leaky_rerope", leaky_rerope),
        ("dual_chunk", dual_chunk),
    ],
)
def test_distances_are_those_of_the_papers_far_beyond_half_a_turn(
    name: str, formula: Callable[[int, int, int], float], factor: int
) -> None:
    found = picture(embedded(), "relative", name, factor)
    assert found is not None
    values, length = cells(found[0]), WINDOW * factor
    step = -(-length // 96)
    places = sorted({*range(0, length, step), length - 1})
    assert values.shape == (len(places), len(places))
    assert found[0]["last"] == length - 1
    expected = [[formula(i, j, length) if j <= i else math.nan for j in places] for i in places]
    np.testing.assert_allclose(values, expected, atol=max(1e-6, found[0]["high"] / 254))
    farthest = max(value for row in expected for value in row if not math.isnan(value))
    assert found[1] == f"the farthest seems {farthest:,.0f} tokens away, of {length - 1}"


@pytest.mark.parametrize("factor", [1, 1.5, 4, 64])
@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3", "dynamic"])
def test_wavelengths_and_turns_are_those_of_stock_transformers(name: str, factor: float) -> None:
    scheme = "rope" if name == "default" else name
    found = picture(embedded(), "wavelengths", scheme, factor)
    turning = picture(embedded(), "turning", scheme, factor)
    assert found is not None
    assert turning is not None
    length = round(WINDOW * factor)
    parameters = {"rope_type": name, "rope_theta": BASE, "factor": factor} | (
        {"original_max_position_embeddings": WINDOW} if name in ("yarn", "llama3") else {}
    )
    if name == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, max_position_embeddings=WINDOW, rope_parameters=parameters
    )
    if name == "default":
        angles, attention_factor = BASE ** (-torch.arange(0, DIM, 2) / DIM), 1.0
    else:
        angles, attention_factor = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=length)
    expected = 2 * math.pi / angles.double().numpy()
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)
    never = [int((expected > tokens).sum()) for tokens in (WINDOW, length)]
    assert found[1] == (
        f"{never[0]} of {DIM // 2} pairs complete no turn within {WINDOW} tokens, {never[1]} none within {length}"
    )
    assert [drawn["pair"] for drawn in turning[0]] == [0, DIM // 4, DIM // 2 - 1]
    for drawn in turning[0]:
        positions = np.arange(24) * (drawn["last"] / 23)
        angle = positions * float(angles[drawn["pair"]])
        points = attention_factor * np.stack((np.cos(angle), np.sin(angle)), axis=-1)
        np.testing.assert_allclose(drawn["points"], points, atol=1e-3)
        assert drawn["turn"] == pytest.approx(expected[drawn["pair"]], rel=1e-4)


def test_a_sinusoidal_table_and_its_similarities_are_those_of_the_formula() -> None:
    width = HEADS * DIM
    table = np.array(
        [
            [(math.sin, math.cos)[c % 2](p / 10000 ** ((c - c % 2) / width)) for c in range(width)]
            for p in range(64 * WINDOW)
        ]
    )
    found = picture(embedded(), "table", "sinusoidal", 64)
    assert found is not None
    values = cells(found[0])
    scale = 0.02 * 2**0.5  # it has the root mean square of a table before training
    np.testing.assert_allclose(values / scale, table[:128], atol=0.03)
    found = picture(embedded(), "similarity", "sinusoidal", 64)
    assert found is not None
    at = found[0]["distances"]
    assert (at[0], at[-1]) == (0, 64 * WINDOW - 1)
    np.testing.assert_allclose(found[0]["values"], table[at] @ table[0] / (width / 2), atol=1e-4)
    farthest = max(d for d, value in zip(at, found[0]["values"], strict=True) if d and value > 0.5)
    assert found[1] == f"the farthest row that is more than half alike is {farthest} away"


def test_a_tiled_table_is_alike_a_window_apart_and_a_stretched_one_nearby() -> None:
    tiled, stretched = (picture(embedded(), "similarity", name, 8) for name in ("learned", "learned_interpolated"))
    assert tiled is not None
    assert stretched is not None
    same = [d for d, value in zip(tiled[0]["distances"], tiled[0]["values"], strict=True) if value > 0.999]
    assert same == [WINDOW * k for k in range(8)]
    alike = [d for d, value in zip(stretched[0]["distances"], stretched[0]["values"], strict=True) if value > 0.6]
    assert alike == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("text", [
    "sinusoidal", "sinusoidal:layout=halves,scale=1", "sinusoidal:ridge=10", "learned", "learned:extend=interpolate",
    "learned:extend=group", "learned:extend=hierarchical", "learned:extend=random", "learned:extend=reinit",
])  # fmt: skip
def test_rows_alone_are_those_of_the_whole_table(text: str) -> None:
    subject = shown(make_scheme(text), sample_geometry(heads=2, dim=8, length=20), factor=5)
    at = torch.tensor([0, 3, 19, 20, 21, 57, 99])
    torch.testing.assert_close(numbers.rows_at(subject, at), numbers.table_rows(subject)[at], atol=1e-6, rtol=0)


def test_rows_of_a_subclass_with_a_table_of_its_own_are_its_own() -> None:
    @dataclass(frozen=True)
    class Doubled(Learned):
        def table(self, old: Tensor, rows: int, geometry: Geometry) -> Tensor:
            return 2 * super().table(old, rows, geometry)

    shape, at = sample_geometry(heads=1, dim=4, length=16), torch.tensor([0, 3, 20])
    own, doubled = (numbers.rows_at(shown(scheme, shape, factor=2), at) for scheme in (Learned(), Doubled()))
    torch.testing.assert_close(doubled, 2 * own)


def test_a_large_table_is_drawn_narrower() -> None:
    subject = shown(make_scheme("learned"), sample_geometry(32, 128, 2**17), factor=2)
    assert numbers.rows_at(subject, torch.tensor([0, 2**17 + 1])).shape == (2, 16)


@pytest.mark.slow
def test_every_registered_scheme_is_drawn_or_has_a_reason() -> None:
    found, choices = data.page_data(data.SHAPES)
    by_name = {choice.name: choice for choice in choices}
    assert by_name.keys() >= dict(SCHEMES.items()).keys()
    for shape in found["shapes"]:  # type: ignore[attr-defined]
        assert [step["factor"] for step in shape["steps"]] == list(data.FACTORS)
        for step in shape["steps"]:
            assert step["drawn"].keys() == by_name.keys()
            for name, drawn in step["drawn"].items():
                assert bool(drawn.get("pictures")) != bool(drawn.get("refused")), (name, drawn)
                assert by_name[name].group in data.GROUPS or drawn.get("refused") == by_name[name].reason
    undrawn = {name: choice.reason for name, choice in by_name.items() if choice.group is None}
    assert undrawn == {
        name: "is for images, but these pictures show positions in a text."
        for name, scheme in SCHEMES.items()
        if "text" not in scheme.inputs
    }
    page = render_page()
    assert all(reason in page for reason in undrawn.values())
    numbers_of = [choice.number for choice in choices]
    assert len({*numbers_of}) == len(choices)
    assert all(choice.number == scheme_number(choice.name) for choice in choices if scheme_number(choice.name))


@dataclass(frozen=True)
class Reversed(RotaryScheme):
    """Its fastest pair is its last."""

    name: ClassVar[str] = "reversed"
    summary: ClassVar[str] = "RoPE, pairs in the other order"
    source: ClassVar[str] = "https://example.org"

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        pairs = self.rotary_dim(geometry) // 2
        return self.filled("base") ** (-(torch.arange(pairs, dtype=dtype).flip(0)) / pairs)


@dataclass(frozen=True)
class Doubled(Alibi):
    """ALiBi by another name."""

    name: ClassVar[str] = "doubled"
    summary: ClassVar[str] = "ALiBi by another name"


@dataclass(frozen=True)
class Ramp(TableScheme):
    """A table of ramps."""

    name: ClassVar[str] = "ramp"
    summary: ClassVar[str] = "ramps"
    source: ClassVar[str] = "https://example.org"
    trainable: ClassVar[bool] = False

    def table(self, old: Tensor, rows: int, geometry: Geometry) -> Tensor:
        return torch.linspace(-1, 1, rows)[:, None].expand(rows, geometry.row_width)


@dataclass(frozen=True)
class Broken(RotaryScheme):
    """It cannot compute its angles."""

    name: ClassVar[str] = "broken"
    summary: ClassVar[str] = "it raises"
    source: ClassVar[str] = "https://example.org"

    def theta(self, geometry: Geometry, length: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise ZeroDivisionError("no angle today")


@pytest.fixture
def registered() -> Iterator[None]:
    mine = (Reversed, Doubled, Ramp, Broken)
    for scheme in mine:
        SCHEMES.register(scheme.name)(scheme)
    yield
    for scheme in mine:
        SCHEMES.remove(scheme.name)


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_schemes_of_another_package_appear_without_an_edit() -> None:
    found, choices = data.page_data([tiny()])
    found = json.loads(json.dumps(found))
    groups = {choice.name: choice.group for choice in choices}
    assert [groups[name] for name in ("reversed", "doubled", "ramp", "broken")] == [
        data.GROUPS[0], data.GROUPS[2], data.GROUPS[3], None,
    ]  # fmt: skip
    waves, own = (picture(found, "wavelengths", name, 4) for name in ("reversed", "rope"))
    assert waves is not None
    assert own is not None
    np.testing.assert_allclose(waves[0], own[0][::-1], rtol=1e-4)
    assert picture(found, "bias", "doubled", 4) == picture(found, "bias", "alibi", 4)
    ramp = picture(found, "table", "ramp", 1)
    assert ramp is not None
    np.testing.assert_allclose(cells(ramp[0])[:, 0], np.linspace(-1, 1, WINDOW), atol=0.005)
    page = render_page(geometry=sample_geometry(heads=1, dim=4, length=16))
    assert 'value="reversed"' in page
    assert 'value="broken"' not in page
    assert "broken: ZeroDivisionError: no angle today" in page


def test_a_requested_scheme_is_drawn_with_its_options() -> None:
    requested = make_scheme("yarn:beta_fast=2")
    found = embedded(requested, 100)
    steps = found["shapes"][0]["steps"]
    assert [step["length"] for step in steps][:6] == [32, 48, 64, 96, 100, 128]
    name = "yarn:beta_fast=2"
    asked, default = (picture(found, "wavelengths", each, 8) for each in (name, "yarn"))
    assert asked is not None
    assert default is not None
    expected = numbers.wavelengths(shown(requested, tiny().geometry, factor=8))
    np.testing.assert_allclose(asked[0], expected, rtol=1e-4)
    assert asked[0] != default[0]


def test_a_scheme_that_reaches_less_is_drawn_as_far_as_it_reaches() -> None:
    found = embedded(make_scheme("yarn:factor=2"))
    step = next(step for step in found["shapes"][0]["steps"] if step["factor"] == 8)
    assert step["drawn"]["yarn:factor=2"]["name"] == "yarn:factor=2, to 64 tokens"
    scores = picture(found, "scores", "yarn:factor=2", 8)
    assert scores is not None
    assert scores[0]["distances"][-1] == 63


def test_a_page_of_a_model_draws_in_its_shape_and_selects_what_was_requested() -> None:
    config = GPT2Config(n_layer=4, n_head=2, n_embd=16, vocab_size=9, n_positions=16)
    page = render_page(model_facts(config, make_scheme("alibi:interpolation=2"), max_length=40))
    settings = json.loads(page.partition('id="settings">')[2].partition("</script>")[0])
    assert settings["start"]["settings"]["factor"] == 2.5
    assert settings["start"]["schemes"] == ["sinusoidal", "alibi:interpolation=2"]
    packed = page.partition('id="data">')[2].partition("</script>")[0]
    (shape,) = json.loads(zlib.decompress(base64.b64decode(packed)))["shapes"]
    assert [shape[key] for key in ("window", "heads", "dim", "base")] == [16, 2, 8, None]
    assert 40 in [step["length"] for step in shape["steps"]]


def test_an_encoder_sees_keys_on_both_sides() -> None:
    shape = data.Shape("encoder", dataclasses.replace(sample_geometry(2, 8, 64), causal=False))
    found, _ = data.page_data([shape])
    found = json.loads(json.dumps(found))
    (relative, _), (bias, _) = picture(found, "relative", "rope", 1), picture(found, "bias", "alibi", 1)  # type: ignore
    ahead = np.triu(np.ones((64, 64), dtype=bool))
    assert not np.isnan(cells(relative)).any()
    assert (cells(relative)[ahead] == 0).all()  # the colours of distances begin at 0
    both = cells(bias["maps"][0])
    np.testing.assert_allclose(both, both.T)


def test_distances_are_counted_in_the_angles_that_a_scaled_model_has() -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(num_hidden_layers=2, max_position_embeddings=512, rope_parameters=scaling)
    geometry = hf_posswap.explain(config).report.geometry
    window = geometry.original_length
    places = torch.tensor([0, window // 2, 2 * window - 1])
    kept = numbers.apparent_distances(shown(make_scheme("rerope"), geometry, factor=2), places, places)
    assert float(kept.nan_to_num(0).max()) == pytest.approx(window // 4)
    plain = numbers.apparent_distances(shown(make_scheme("rope"), geometry, factor=2), places, places)
    assert plain[2, 0].item() == pytest.approx(8 * (2 * window - 1), rel=1e-5)  # it takes the scaling away


def test_distances_of_other_regions_are_measured() -> None:
    """Dynamic NTK whose angles follow each query's own position: its regions are not those of `Piecewise`."""
    subject = shown(make_scheme("dynamic:follow=query"), sample_geometry(2, 16, 64), factor=4)
    scheme: Any = subject.scheme
    places = torch.tensor([0, 40, 100, 255])
    found = numbers.apparent_distances(subject, places, places)
    for row, i in enumerate(places.tolist()):
        length = torch.tensor([scheme.bucket_length(int(scheme.bucket(torch.tensor([i]))))])  # rounded up
        slowest = float(scheme.angles(subject.geometry, length).exact.flatten()[-1])
        expected = [(i - j) * slowest * 10000 ** (14 / 16) for j in places.tolist()[: row + 1]]
        np.testing.assert_allclose(found[row, : row + 1], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_a_page_is_small() -> None:
    assert len(render_page()) < 4e6
    facts = model_facts(LlamaConfig(num_hidden_layers=2, max_position_embeddings=4096))
    assert len(render_page(facts)) < 1.5e6


def test_neither_device_nor_precision_of_the_caller_changes_the_data() -> None:
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found, _ = data.page_data([tiny()])
    assert json.loads(json.dumps(found)) == embedded()


def test_a_shape_is_given_once() -> None:
    facts = model_facts(LlamaConfig(num_hidden_layers=2))
    with pytest.raises(hf_posswap.errors.OptionError, match="facts and geometry are given"):
        render_page(facts, geometry=sample_geometry())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 0}, "heads is a whole number from 1 to 1,024; got 0"),
        ({"dim": 3}, "dim must be even"),
        (
            {"length": 2**30},
            "length is a whole number from 2 to 16,777,216 tokens, the original window; got 1073741824",
        ),
        ({"base": 1.0}, "base (rope_theta) is a number above 1, got 1.0"),
        ({"base": math.inf}, "base (rope_theta) is a number above 1, got inf"),
    ],
)
def test_sizes_that_no_model_has_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(hf_posswap.errors.OptionError, match=re.escape(message)):
        sample_geometry(**sizes)
