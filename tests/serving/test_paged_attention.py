"""A scheme's own attention over a paged cache, without vLLM: what is gathered, blocks of queries, whole models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posswap import patch_model
from hf_posswap.errors import UnsupportedSwapError
from hf_posswap.geometry import Geometry
from hf_posswap.integrations.vllm import paged_attention, vllm_model
from hf_posswap.integrations.vllm.paged_attention import (
    LayerSettings,
    PagedBatch,
    attend_paged,
    stored_form,
    write_keys,
)
from hf_posswap.integrations.vllm.vllm_model import SchemeAttention, ServedSwap, batch_of, serve_attention
from hf_posswap.patching.inspect.paged import needs_own_attention
from hf_posswap.patching.sites.attention import backends
from hf_posswap.patching.sites.attention.split_attention import attend_split
from hf_posswap.schemes.base import make_scheme
from hf_posswap.schemes.mechanism import Mechanism
from tests.contract.models import build

BLOCK = 16  # tokens of a block of the cache
ORIGINAL, LENGTH = 64, 192
HEADS, GROUPS, WIDTH = 4, 2, 16


class Cache:
    """Blocks of one layer's keys and values, given to texts in no order.

    Args:
        texts: how many.
        length: of the longest.
        seed: of the order.
    """

    def __init__(self, texts: int, length: int, seed: int = 0) -> None:
        blocks = -(-length // BLOCK)
        order = torch.randperm(texts * blocks, generator=torch.Generator().manual_seed(seed)) + 1  # 0 is nobody's
        self.table = order.view(texts, blocks)
        self.blocks = texts * blocks + 1

    def empty(self, groups: int, width: int) -> Tensor:
        """Return the cache of a layer, with numbers that nobody may read."""
        return torch.full((self.blocks, groups, BLOCK, 2 * width), torch.nan)

    def batch(self, past: list[int], new: list[int]) -> PagedBatch:
        """Return a batch in which each text that has `past` tokens gets `new` ones."""
        starts, slots = [0], []
        for text, (before, count) in enumerate(zip(past, new, strict=True)):
            starts.append(starts[-1] + count)
            at = torch.arange(before, before + count)
            slots.append(self.table[text, at // BLOCK] * BLOCK + at % BLOCK)
        lengths = [before + count for before, count in zip(past, new, strict=True)]
        return PagedBatch(starts, lengths, self.table.int(), torch.cat(slots))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mechanism_of(scheme: Any, **changes: Any) -> Mechanism:
    geometry = Geometry(
        hidden_size=HEADS * WIDTH, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=WIDTH, num_layers=1,
        original_length=ORIGINAL, causal=True, **changes,
    )  # fmt: skip
    return make_scheme(scheme).resolve(geometry, 1024).mechanism(geometry)


def test_keys_and_values_are_gathered_in_the_order_of_the_text() -> None:
    cache = Cache(texts=2, length=100)
    states = cache.empty(GROUPS, WIDTH)
    key, value = noise(150, GROUPS, WIDTH), noise(150, GROUPS, WIDTH, seed=1)
    batch = cache.batch([0, 0], [60, 90])
    write_keys(states, key, value, batch.slots)
    for window in (None, 7):
        first, second = batch.requests(window, BLOCK)
        assert torch.equal(first.gather(states[..., :WIDTH])[0], key[:60].transpose(0, 1))
        assert torch.equal(second.gather(states[..., WIDTH:])[0], value[60:].transpose(0, 1))
    later = cache.batch([60, 90], [0, 3])
    write_keys(states, key[:3], value[:3], later.slots)
    (request,) = later.requests(7, BLOCK)  # the first text has no new token
    assert request.rows == slice(0, 3)
    assert request.span.query.tolist() == [[90, 91, 92]]
    assert request.span.key.tolist() == [[*range(84, 93)]]
    expected = torch.cat((key[60 + 84 :], key[:3])).transpose(0, 1)
    assert torch.equal(request.gather(states[..., :WIDTH])[0], expected)


SCHEMES: dict[str, Any] = {
    "self_extend": "self_extend",
    "dual_chunk": "dual_chunk",
    "dynamic": {"name": "dynamic", "factor": 16.0, "follow": "query", "step": 200},
    "kerple": "kerple",
    "learned slopes": "alibi:learned=true",
    "fire": "fire",
}


def formula(mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
    """Return attention [1, q, H, D] with all scores at once, from keys [1, G, K, D] that are not rotated."""
    length, keys = query.shape[2], key.shape[2]
    at, of_keys = torch.arange(keys - length, keys)[None], torch.arange(keys)[None]
    apart = at[:, :, None] - of_keys[:, None]
    mask = ((apart >= 0) & (apart < (settings.window or keys)))[:, None]
    if mechanism.splits:
        if mechanism.rotates:
            key = mechanism.rotate_key(key, mechanism.prepare(of_keys, torch.tensor([[[[keys]]]])))
        form = "rotated" if mechanism.rotates else "raw"
        pieces = mechanism.pieces(at, of_keys, keys=form)  # type: ignore[arg-type]
        options: dict[str, Any] = {"causal": False, "scaling": settings.scaling, "weights": True}
        return attend_split(query, key, value, pieces, at, of_keys, mask, **options)[0]
    bias = mechanism.bias(at, of_keys).masked_fill(~mask, -torch.inf)
    scores = torch.matmul(query, key.repeat_interleave(2, 1).transpose(-1, -2)) * settings.scaling
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    return torch.matmul((scores + bias).softmax(-1), value.repeat_interleave(2, 1)).transpose(1, 2)


def attended(mechanism: Mechanism, past: int, new: int, settings: LayerSettings) -> tuple[Tensor, Tensor]:
    """Return the attention of `new` tokens behind `past` ones from the paged cache, and by the formula."""
    length = past + new
    query, key, value = noise(1, HEADS, new, WIDTH), noise(1, GROUPS, length, WIDTH), noise(1, GROUPS, length, WIDTH)
    cache = Cache(1, length)
    states = cache.empty(GROUPS, WIDTH)
    stored = key
    if stored_form(mechanism) != "raw":
        table = mechanism.prepare(torch.arange(length)[None], torch.tensor([[[[length]]]]))
        rotate = mechanism.rotate_far if stored_form(mechanism) == "far" else mechanism.rotate_key
        stored = rotate(key, table)
    write_keys(states, *(x[0].transpose(0, 1) for x in (stored, value)), cache.batch([0], [length]).slots)
    out = torch.empty(new, HEADS, WIDTH)
    attend_paged(cache.batch([past], [new]), mechanism, query[0].transpose(0, 1), states, out, settings)
    return out[None], formula(mechanism, query, key, value, settings)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("past", "new"), [(0, 1), (0, 33), (150, 1), (150, 33), (100, 600), (400, 600)])
@pytest.mark.parametrize("name", list(SCHEMES))
@torch.no_grad()
def test_blocks_of_queries_give_what_the_formula_gives(
    name: str, past: int, new: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism, settings = mechanism_of(SCHEMES[name]), LayerSettings(0.3, window)
    for backend, most in (("auto", 2**24), ("plain", 2**14)):
        mechanism.backend = backend
        monkeypatch.setattr(paged_attention, "MOST_SCORES", most)
        paged, expected = attended(mechanism, past, new, settings)
        torch.testing.assert_close(paged, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("past", "new"), [(0, 20), (150, 1)])
@torch.no_grad()
def test_a_bias_is_added_after_the_limit_on_the_scores(past: int, new: int) -> None:
    paged, expected = attended(mechanism_of("kerple"), past, new, LayerSettings(2.0, softcap=3.0))
    torch.testing.assert_close(paged, expected, atol=2e-5, rtol=1e-4)
    without, _ = attended(mechanism_of("kerple"), past, new, LayerSettings(2.0))
    assert not torch.allclose(paged, without, atol=1e-2)


@pytest.mark.parametrize(("name", "kernel"), [("dual_chunk", "merge"), ("kerple", "hankel"), ("fire", "chunked")])
@torch.no_grad()
def test_many_queries_are_left_to_the_fused_kernels(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    def told(request: Any) -> str:
        chosen.append(choose(request))
        return chosen[-1]

    choose = backends.choose
    monkeypatch.setattr(backends, "choose", told)
    for past, new in ((400, 600), (400, 6)):
        attended(mechanism_of(SCHEMES[name]), past, new, LayerSettings(0.3, 300))
    assert chosen == [kernel, "plain"]


@torch.no_grad()
def test_no_more_scores_are_held_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(query.shape[1] * query.shape[2] * key.shape[2])
        return attend_split(query, key, *rest, **options)

    monkeypatch.setattr(paged_attention, "attend_split", counted)
    monkeypatch.setattr(paged_attention, "MOST_SCORES", 2**15)
    mechanism = mechanism_of("dual_chunk")
    mechanism.backend = "plain"
    attended(mechanism, 100, 200, LayerSettings(0.3))
    assert 2**14 < max(seen) <= 2**15


MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "alibi": ("llama", "alibi", {}, {}),
    "self_extend": ("llama", "self_extend", {}, {}),
    "rerope": ("llama", "rerope", {"log_scaling": True}, {}),
    "leaky_rerope": ("llama", "leaky_rerope", {}, {}),
    "dual_chunk": ("llama", "dual_chunk", {}, {}),
    "string": ("llama", "string", {"original_length": 180, "shift": 20, "local": 5}, {}),
    "kerple": ("llama", "kerple", {}, {}),
    "fire": ("gpt_neox", "fire", {}, {}),
    "t5": ("opt", "t5", {"init_std": 1.0}, {}),
    "rope and kerple": ("llama", "native + kerple", {}, {}),
    "two kinds of layers": ("llama", "per_layer", {"layers": {0: "dual_chunk"}, "default": "fire"}, {}),
    "sliding window": ("mistral", "rerope", {"window": 6}, {"sliding_window": 24}),
    "by query": ("gpt2", "dynamic", {"factor": 4.0, "follow": "query"}, {}),
    "lists by query": (
        "gpt2", "longrope", {"factor": 4.0, "follow": "query", "long_factor": [1.5 + i for i in range(8)]}, {}
    ),
}  # fmt: skip
STEPS = [[40, 33, 0], [50, 1, 64], [1, 1, 80], [1, 1, 1], [1, 1, 1], [30, 0, 5]]  # new tokens of three texts


@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_texts_in_parts_beside_others_have_the_logits_of_a_whole_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, scheme, options, sizes = MODELS[name]
    length_name = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    options = options if "factor" in options else options | {"max_length": LENGTH}
    model = patch_model(build(kind, **{length_name: ORIGINAL} | sizes), scheme, **options).eval()
    source = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 60, (1, sum(counts)), generator=source) for counts in zip(*STEPS, strict=True)]
    assert max(text.shape[1] for text in texts) > ORIGINAL
    expected = [model(text).logits[0] for text in texts]
    engine = Engine(model, max(text.shape[1] for text in texts))
    monkeypatch.setattr(vllm_model, "attention_function", lambda *_: engine.attend)
    serve_attention(model)
    past = [0, 0, 0]
    for new in STEPS:
        logits = engine.step(texts, past, new).split(new)
        for text, (before, count) in enumerate(zip(past, new, strict=True)):
            torch.testing.assert_close(logits[text], expected[text][before : before + count], atol=1e-4, rtol=1e-4)
        past = [before + count for before, count in zip(past, new, strict=True)]


class Engine:
    """What vLLM does around a swapped model: all new tokens of a batch in one row, one cache for each layer.

    Args:
        model: swapped.
        length: of the longest text.
    """

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.cache = model, Cache(texts=3, length=length)
        self.mechanisms = dict(vllm_model._mechanisms(model))
        self.modules = {module: path for path, module in model.named_modules()}
        self.states: dict[str, Tensor] = {}
        self.batch = self.cache.batch([0, 0, 0], [0, 0, 0])

    def step(self, texts: list[Tensor], past: list[int], new: list[int]) -> Tensor:
        """Return the logits of new tokens, [T, V]."""
        self.batch = self.cache.batch(past, new)
        spans = [range(before, before + count) for before, count in zip(past, new, strict=True)]
        ids = torch.cat([text[:, span.start : span.stop] for text, span in zip(texts, spans, strict=True)], dim=1)
        positions = torch.tensor([[position for span in spans for position in span]])
        return self.model(ids, position_ids=positions, use_cache=False).logits[0]

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        """Attend as vLLM's function for transformers' interface, through the class that its layer would have."""
        path = self.modules[module]
        mechanism = self.mechanisms[path]
        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, H, D]
        _, heads, width = query.shape
        groups, window = key.shape[1], kwargs.get("sliding_window")
        scale = kwargs.get("scaling")
        layer = SchemeAttention(
            heads, width, width**-0.5 if scale is None else scale, groups, sliding_window=window, mechanism=mechanism
        )
        states = self.states.setdefault(path, self.cache.empty(groups, width))
        out = torch.empty_like(query)
        layer.forward(None, query, key, value, states, self.batch, out)
        return out.flatten(1), None


class Built:
    """What vLLM's class does to parameters: gives them the dtype that it is told, or else the model's."""

    def init_parameters(self, module: Any, dtype: torch.dtype | None = None) -> None:
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.is_meta:
                    setattr(part, name, torch.nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="cpu")))


def test_what_a_scheme_learns_stays_float32_in_vllm() -> None:
    model = patch_model(build("llama"), "native + kerple").to("meta")
    type("Served", (ServedSwap, Built), {"__init__": lambda self: None})().init_parameters(model, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    learned = {name for name in dtypes if "raw_r" in name}
    assert len(learned) == 2
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == learned


def test_what_needs_its_own_attention() -> None:
    own = {name: needs_own_attention(mechanism_of(scheme)) for name, scheme in SCHEMES.items()}
    assert all(own.values())
    assert not any(needs_own_attention(mechanism_of(name)) for name in ("rope", "alibi", "xpos"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "a cache in fp8"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"alibi_slopes": [0.5]}, "slopes of another bias"),
        ({"attn_type": "encoder_only"}, "attention other than a decoder's"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "keys of another layer"),
        ({"logits_soft_cap": 50.0}, "a limit on its scores"),
    ],
)
def test_a_layer_of_vllm_that_asks_for_more_is_refused(changes: dict[str, Any], words: str) -> None:
    mechanism = mechanism_of("dual_chunk")
    with pytest.raises(UnsupportedSwapError, match=words):
        SchemeAttention(HEADS, WIDTH, 0.3, GROUPS, **changes, mechanism=mechanism)
    SchemeAttention(HEADS, WIDTH, 0.3, GROUPS, mechanism=mechanism)


def common(**changes: Any) -> Any:
    """Return what vLLM tells of a batch of two requests, padded to three."""
    values = {
        "causal": True,
        "num_reqs": 2,
        "num_actual_tokens": 5,
        "query_start_loc_cpu": torch.tensor([0, 4, 5, 5]),
        "seq_lens": torch.tensor([4, 30, 0]),
        "block_table_tensor": torch.tensor([[3, 0], [1, 2], [0, 0]]),
        "slot_mapping": torch.tensor([48, 49, 50, 51, 45, -1, -1, -1]),
    }
    return SimpleNamespace(**values | changes)


def test_the_requests_of_a_batch_are_those_of_vllm() -> None:
    batch = batch_of(common())
    assert (batch.starts, batch.lengths, batch.slots.tolist()) == ([0, 4, 5], [4, 30], [48, 49, 50, 51, 45])
    with pytest.raises(UnsupportedSwapError, match="not causal"):
        batch_of(common(causal=False))
