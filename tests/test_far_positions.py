"""Far positions: every rotary scheme and the sinusoidal tables against float64, where float32 angles would be noise.

The oracles are the papers' formulas in Python's floats, whose own error at 2^24 is some 1e-8. Bound: 5e-7 on cos and
sin, two or three roundings of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_posswap import patch_model
from hf_posswap.geometry import Geometry
from hf_posswap.rope_math import CosSin, Frequencies, cos_sin, rotate
from hf_posswap.schemes import Blend, Rope, Rope2D, RotaryScheme, Sinusoidal, XPos, make_scheme
from hf_posswap.schemes.base import SCHEMES
from tests.schemes.small import geometry, image_geometry

FAR = (32_768, 131_071, 1_000_003, 2**20 - 1, 2**24 - 1)
AT = torch.tensor([*range(65), *FAR])
NEAR = 5e-7
DIM, BASE, ORIGINAL = 16, 10000.0, 128
SHAPE = geometry(original_length=ORIGINAL)
PLAIN = [BASE ** (-2 * i / DIM) for i in range(DIM // 2)]
LONG = tuple(1.0 + 0.7 * i for i in range(DIM // 2))
Thetas = list[float]


def yarn(factor: float, turns: bool = False) -> Thetas:
    """Return YaRN's angles: https://arxiv.org/abs/2309.00071, its ramp over the index as in the authors' code."""

    def index(rotations: float) -> float:
        return DIM * math.log(ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(BASE))

    low, high = max(math.floor(index(32.0)), 0), min(math.ceil(index(1.0)), DIM - 1)
    ramps = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(DIM // 2)]
    if turns:
        ramps = [1 - min(max((ORIGINAL * theta / (2 * math.pi) - 1) / 31, 0.0), 1.0) for theta in PLAIN]
    return [ramp * theta / factor + (1 - ramp) * theta for ramp, theta in zip(ramps, PLAIN, strict=True)]


def llama3(factor: float) -> Thetas:
    """Return Llama 3.1's angles, low and high frequency factor 1 and 4."""
    kept = [min(max((ORIGINAL * theta / (2 * math.pi) - 1) / 3, 0.0), 1.0) for theta in PLAIN]
    return [(1 - k) * theta / factor + k * theta for k, theta in zip(kept, PLAIN, strict=True)]


def whole_waves(thetas: Thetas) -> Thetas:
    """Return angles whose wavelengths are rounded to tokens."""
    return [2 * math.pi / round(2 * math.pi / theta) for theta in thetas]


def of_base(base: float) -> Thetas:
    return [base ** (-2 * i / DIM) for i in range(DIM // 2)]


SAME_EVERYWHERE: dict[str, tuple[str, dict[str, Any], Thetas]] = {
    "rope": ("rope", {}, PLAIN),
    "a base of one's own": ("rope", {"base": 523_456.7}, of_base(523_456.7)),
    "angles of one's own": ("rope", {"frequencies": [3.3 / 7**i for i in range(8)]}, [3.3 / 7**i for i in range(8)]),
    "linear": ("linear", {"factor": 3.7}, [theta / 3.7 for theta in PLAIN]),
    "ntk": ("ntk", {"factor": 3.0}, of_base(BASE * 3.0 ** (DIM / (DIM - 2)))),
    "dynamic": ("dynamic", {"factor": 3.0, "pin": 1000}, of_base(BASE * (1 + 3 * (1000 - 128) / 128) ** (16 / 14))),
    "ntk_by_parts": ("ntk_by_parts", {"factor": 5.0}, yarn(5.0)),
    "a ramp over turns": ("ntk_by_parts", {"factor": 5.0, "ramp": "turns"}, yarn(5.0, turns=True)),
    "yarn": ("yarn", {"factor": 5.0}, yarn(5.0)),
    "llama3": ("llama3", {"factor": 8.0}, llama3(8.0)),
    "longrope": (
        "longrope",
        {"factor": 4.0, "long_factor": LONG, "pin": 1000},
        [theta / divisor for theta, divisor in zip(PLAIN, LONG, strict=True)],
    ),
    "p_rope": ("p_rope", {"p": 0.5}, PLAIN[:4] + [0.0] * 4),
    "cope": ("cope", {"faded": 3}, PLAIN[:6] + [PLAIN[6] / 2, 0.0]),
    "resonance": ("resonance", {}, whole_waves(PLAIN)),
    "resonance_yarn": ("resonance_yarn", {"factor": 5.0}, whole_waves(yarn(5.0))),
}


def resolved(name: str, shape: Geometry = SHAPE, **options: Any) -> RotaryScheme:
    scheme = make_scheme(name, **options).resolve(shape, None)
    assert isinstance(scheme, RotaryScheme)
    return scheme


def prepared(scheme: RotaryScheme, positions: Tensor, length: int | None = None) -> CosSin:
    """Return cos and sin of a scheme's mechanism at `positions` [Q]."""
    tokens = torch.tensor([[[[int(positions.max()) + 1 if length is None else length]]]])
    return scheme.mechanism(SHAPE).prepare(positions[None], tokens)


def assert_exact(table: CosSin, places: Any, thetas: Any, factor: float = 1.0, near: float = NEAR) -> None:
    """Assert that `table` holds cos and sin of places [Q] times thetas [R/2] or [Q, R/2], times `factor`."""
    angles = np.asarray(places, dtype=np.float64)[:, None] * np.asarray(thetas, dtype=np.float64)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    np.testing.assert_allclose(table.cos[0, 0], factor * np.cos(angles), rtol=0, atol=factor * near)
    np.testing.assert_allclose(table.sin[0, 0], factor * np.sin(angles), rtol=0, atol=factor * near)


@pytest.mark.parametrize("case", SAME_EVERYWHERE)
def test_fixed_angles_are_those_of_float64(case: str) -> None:
    name, options, thetas = SAME_EVERYWHERE[case]
    scheme = resolved(name, **options)
    assert_exact(prepared(scheme, AT), AT, thetas, scheme.angles(SHAPE).attention_factor)


@pytest.mark.parametrize("length", [100, 1000, 2**20, 2**24])
def test_angles_that_follow_the_length_are_those_of_float64(length: int) -> None:
    at = AT[length > AT]
    grown = BASE * (1 + 3.0 * max(length - ORIGINAL, 0) / ORIGINAL) ** (DIM / (DIM - 2))
    assert_exact(prepared(resolved("dynamic", factor=3.0), at, length), at, of_base(grown))
    divisors = LONG if length > ORIGINAL else [1.0] * 8
    scheme = resolved("longrope", factor=4.0, long_factor=LONG)
    thetas = np.array(PLAIN) / divisors
    assert_exact(prepared(scheme, at, length), at, thetas, scheme.angles(SHAPE).attention_factor)


def test_the_first_positions_of_longrope_keep_theirs() -> None:
    scheme = resolved("longrope", factor=4.0, long_factor=LONG, original_positions=40_000, pin=1000)
    thetas = np.where((AT < 40_000)[:, None], PLAIN, np.array(PLAIN) / LONG)
    assert_exact(prepared(scheme, AT), AT, thetas, scheme.angles(SHAPE).attention_factor)


def test_each_query_takes_the_angles_of_its_own_length() -> None:
    scheme = resolved("longrope", factor=4.0, long_factor=LONG, follow="query")
    far = torch.tensor(FAR)
    (piece,) = scheme.mechanism(SHAPE).pieces(far[None], far[None])
    for table in (piece.query, piece.key):
        assert_exact(table, FAR, np.array(PLAIN) / LONG, scheme.angles(SHAPE).attention_factor)


def test_pairs_of_each_key_head_are_those_of_float64() -> None:
    chosen = [[0, 3], [1], [], [2, 7]]
    table = prepared(resolved("p_rope", select=chosen), AT)
    for head, turning in enumerate(chosen):
        thetas = [theta if pair in turning else 0.0 for pair, theta in enumerate(PLAIN)]
        assert_exact(CosSin(table.cos[:, head : head + 1], table.sin[:, head : head + 1]), AT, thetas)


W, GROUP, SLOW, CHUNK, LOCAL = 40, 5, 3.3, 96, 16
SIZE = CHUNK - LOCAL
Place = Callable[[int], float]
PARTS: dict[str, tuple[dict[str, Any], list[tuple[Place, Place]]]] = {
    "self_extend": (
        {"window": W, "group": GROUP},
        [(lambda i: i, lambda j: j), (lambda i: i // GROUP + W - W // GROUP, lambda j: j // GROUP)],
    ),
    "rerope": ({"window": W}, [(lambda i: i, lambda j: j), (lambda i: W, lambda j: 0)]),
    "leaky_rerope": (
        {"window": W, "slowdown": SLOW},
        [(lambda i: i, lambda j: j), (lambda i: (i - W) / SLOW + W, lambda j: j / SLOW)],
    ),
    "string": (
        {"shift": W, "local": LOCAL},
        [(lambda i: i, lambda j: j), (lambda i: i - W + LOCAL, lambda j: j)],
    ),
    "dual_chunk": (
        {"chunk": CHUNK, "local": LOCAL},
        [
            (lambda i: i % SIZE, lambda j: j % SIZE),
            (lambda i: min(i % SIZE + SIZE, CHUNK), lambda j: j % SIZE),
            (lambda i: min(2 * SIZE - 1, CHUNK), lambda j: j % SIZE),
        ],
    ),
}


@pytest.mark.parametrize("own", ["none", "plain", "scaled"])
@pytest.mark.parametrize("name", PARTS)
def test_both_sides_of_a_window_are_those_of_float64(name: str, own: str) -> None:
    """The angles: of the scheme's base, of the model's base, or the model's own ones, which are float32."""
    options, expected = PARTS[name]
    shape, thetas = SHAPE, PLAIN
    if own != "none":
        held = (resolved("rope") if own == "plain" else resolved("yarn", factor=5.0)).angles(SHAPE).inv_freq.tolist()
        shape = geometry(base=BASE, rotary_dim=DIM, layout="half", original_length=ORIGINAL, frequencies=tuple(held))
        thetas = PLAIN if own == "plain" else held
    mechanism = resolved(name, shape, **options).mechanism(shape)
    keys = mechanism.prepare(AT[None], torch.tensor([[[[int(AT.max()) + 1]]]]))
    past: list[Any] = [one for one in mechanism.pieces(AT[None], AT[None]) if not one.pairs.is_ahead]  # type: ignore[union-attr]
    for number, (piece, (query, key)) in enumerate(zip(past, expected, strict=True)):
        assert_exact(piece.query, [query(int(i)) for i in AT], thetas)
        table = keys if piece.key is None else piece.key
        assert_exact(table, [key(int(j)) for j in AT], thetas)
        cached = keys if mechanism.rotates else keys[number]
        assert torch.equal(cached.cos, table.cos)
        assert torch.equal(cached.sin, table.sin)


def test_xpos_turns_and_scales_as_float64() -> None:
    scale_base = 2.0**20
    scheme = XPos(scale_base=scale_base, centre=1).resolve(SHAPE, None)
    tables: Any = prepared(scheme, AT)
    zeta = (np.arange(0, DIM, 2) / DIM + 0.4) / 1.4
    factors = zeta ** ((AT.double().numpy()[:, None] - 1) / scale_base)
    for table, sizes in ((tables.query, factors), (tables.key, 1 / factors)):
        assert_exact(CosSin(*(part / torch.tensor(sizes).float() for part in table)), AT, PLAIN, near=2 * NEAR)


def test_xpos_keeps_its_scale_near_the_end_of_its_range() -> None:
    scheme = XPos(centre=1).resolve(SHAPE, None)
    at = torch.tensor([0, 1, 2, 30_000, 33_000, scheme.largest_position(SHAPE, torch.float32)])
    tables: Any = prepared(scheme, at)
    zeta = (np.arange(0, DIM, 2) / DIM + 0.4) / 1.4
    factors = zeta ** ((at.double().numpy()[:, None] - 1) / 512)
    size = (tables.query.cos.double() ** 2 + tables.query.sin.double() ** 2).sqrt()[0, 0]
    np.testing.assert_allclose(size, factors, rtol=6e-7)


def test_a_blend_turns_as_float64() -> None:
    own = tuple(torch.tensor(yarn(5.0)).tolist())
    shape = geometry(base=BASE, rotary_dim=DIM, layout="half", frequencies=own)
    mechanism = Blend(new=Rope(), weight=0.3).resolve(shape, None).mechanism(shape)
    thetas = [0.7 * old + 0.3 * new for old, new in zip(own, PLAIN, strict=True)]
    assert_exact(mechanism.prepare(AT[None], AT[None]), AT, thetas)


def test_rows_and_columns_turn_as_float64() -> None:
    shape = image_geometry()
    mechanism = Rope2D(base=100.0).resolve(shape, None).mechanism(shape)
    stride = 2**16
    places = torch.tensor([[row * stride + column for row in (0, 3, 900) for column in (0, 1, 40_000)]])
    table = mechanism.prepare(places, places)
    theta = [100.0 ** (-i / 4) for i in range(4)]
    rows, columns = (places[0] // stride).tolist(), (places[0] % stride).tolist()
    assert_exact(CosSin(table.cos[..., :4], table.sin[..., :4]), rows, theta)
    assert_exact(CosSin(table.cos[..., 4:], table.sin[..., 4:]), columns, theta)


def test_every_rotary_scheme_is_here() -> None:
    names = {name for name, cls in SCHEMES.items() if issubclass(cls, RotaryScheme)}
    assert names == {name for name, _, _ in SAME_EVERYWHERE.values()} | set(PARTS) | {"xpos"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sign", [1, -1])
def test_whole_positions_of_any_dtype_and_sign(dtype: torch.dtype, sign: int) -> None:
    scheme = resolved("rope")
    assert_exact(cos_sin(sign * AT[None].to(dtype), scheme.angles(SHAPE)), sign * AT, PLAIN)
    assert_exact(cos_sin(sign * AT[None].to(dtype), scheme.angles(SHAPE).to("cpu")), sign * AT, PLAIN)


def test_positions_between_tokens() -> None:
    between = AT + 0.25
    assert_exact(cos_sin(between[None].double(), resolved("rope").angles(SHAPE)), between, PLAIN)


def test_angles_that_are_only_known_in_float32_are_taken_at_their_word() -> None:
    held = torch.tensor(PLAIN, dtype=torch.float32)
    assert_exact(cos_sin(AT[None], Frequencies(held)), AT, held.double())
    other = resolved("rope").angles(SHAPE)._replace(inv_freq=held * 2)  # what was known better is another's
    assert_exact(cos_sin(AT[None], other), AT, (held * 2).double())


def test_half_a_turn_a_token() -> None:
    table = cos_sin(AT[None], Frequencies.of(torch.tensor([math.pi, 2 * math.pi, 7 * math.pi], dtype=torch.float64)))
    assert_exact(table, AT % 2, [math.pi, 0.0, math.pi])


@pytest.mark.parametrize("offset", [0, *FAR[:-1], 2**24 - 64])
def test_scores_depend_on_distances_alone_wherever_in_a_text(offset: int) -> None:
    q, k = torch.randn(2, 1, 4, 64, DIM)
    scheme = resolved("rope")
    here = prepared(scheme, torch.arange(64))
    there = prepared(scheme, torch.arange(64) + offset)
    expected = rotate(q.double(), here, "half") @ rotate(k.double(), here, "half").mT
    found = rotate(q, there, "half") @ rotate(k, there, "half").mT
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=53, n_positions=64, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval()


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=53,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model: Any, offset: int) -> Tensor:
    ids = torch.arange(24)[None] % 53
    return model(ids, position_ids=torch.arange(24)[None] + offset, attention_mask=torch.ones_like(ids)).logits.float()


@pytest.mark.parametrize(
    ("make", "scheme", "options"),
    [
        (gpt2, "rope", {}),
        (gpt2, "yarn", {"factor": 4.0}),
        (gpt2, "rerope", {"window": 8}),
        (gpt2, "leaky_rerope", {"window": 8, "slowdown": 4.0}),
        (llama, "rope", {"base": 5e5, "site": "attention"}),
        (llama, "linear", {"factor": 4.0, "site": "attention"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_swapped_model_reads_a_million_tokens_on_as_at_the_start(
    make: Callable[[], Any], scheme: str, options: dict[str, Any]
) -> None:
    options = dict(options)
    model, site = make(), options.pop("site", "auto")
    patch_model(model, make_scheme(scheme, **options), site=site)
    torch.testing.assert_close(logits(model, 2**24 - 64), logits(model, 0), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_low_precision_lose_no_more_far_out(dtype: torch.dtype) -> None:
    model = gpt2()
    patch_model(model, "rope")
    truth = logits(model, 0)
    model.to(dtype)
    near, far = ((logits(model, offset) - truth).abs().max() for offset in (0, 2**20))
    assert far < 1.5 * near


def test_a_model_that_rotates_by_itself_is_met_within_rounding() -> None:
    model = llama()
    stock = logits(model, 0)
    patch_model(model, "rope", site="attention")
    torch.testing.assert_close(logits(model, 0), stock, rtol=0, atol=5e-6)
    own = llama().model.rotary_emb
    at = torch.arange(8)[None]
    cos, sin = own(torch.zeros(1, 8, 16), at)
    ours = cos_sin(at, resolved("rope").angles(SHAPE))
    torch.testing.assert_close(cos[0, :, :8], ours.cos[0, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0, :, :8], ours.sin[0, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_far_rows_of_a_sinusoidal_table_are_those_of_float64(layout: str) -> None:
    width, rows = 8, 2**20
    shape = geometry(hidden_size=width)
    table = Sinusoidal(layout=layout, scale=1.0).table(torch.zeros(4, width), rows, shape)  # type: ignore[arg-type]
    at = AT[rows > AT]
    angles = at[:, None].double() * torch.tensor(
        [BASE ** (-i / width) for i in range(0, width, 2)], dtype=torch.float64
    )
    waves = (angles.sin(), angles.cos())
    expected = torch.cat(waves, dim=-1) if layout == "halves" else torch.stack(waves, dim=-1).flatten(-2)
    torch.testing.assert_close(table[at].double(), expected, rtol=0, atol=NEAR)


@pytest.mark.slow
def test_compiled_angles_are_those_of_float64() -> None:
    mechanism = resolved("rope").mechanism(SHAPE)
    compiled = torch.compile(lambda at: tuple(mechanism.prepare(at, at)), fullgraph=True, dynamic=True)
    for at in (AT, torch.arange(2**24 - 50, 2**24)):
        assert_exact(CosSin(*compiled(at[None])), at, PLAIN)
    beside = torch.compile(lambda start: tuple(mechanism.prepare(torch.arange(40)[None] + start, start)))
    assert_exact(CosSin(*beside(torch.tensor(2**23))), torch.arange(40) + 2**23, PLAIN)
