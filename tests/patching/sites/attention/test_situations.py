"""Padded, packed, windowed and cached calls by every backend: in float64 against the formula over all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from hf_posswap import patch_model, set_backend
from hf_posswap.kernels import flex, row_bias
from hf_posswap.patching.sites.attention import backends
from hf_posswap.schemes.mechanism import Mechanism
from tests.patching.sites.attention.encoders import swapped_bert
from tests.stock import cache_in, with_cache

LENGTH, ROWS = 40, 4
EXACT = 1e-10
"""Between logits of float64 models, whose norms are float32 in parts, and whose sums run in another order."""
WAYS = [
    ("alibi", {}, "row"),
    ("alibi", {}, "row_windowed"),
    ("alibi", {}, "hankel"),
    ("t5", {"init_std": 1.0}, "hankel"),
    ("kerple", {}, "hankel"),
    ("fire", {}, "chunked"),
    ("t5", {"init_std": 1.0}, "chunked"),
    ("self_extend", {"window": 6}, "merge"),
    ("rerope", {"window": 6}, "merge"),
    ("dual_chunk", {"chunk": 9, "local": 3}, "merge"),
    ("string", {"shift": 9, "local": 3, "original_length": 160}, "merge"),
]
IDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH).mul(7).remainder(61) + 3


def mask_of(*shown: tuple[int, int]) -> Tensor:
    at = torch.arange(LENGTH)
    return torch.stack([(at >= low) & (at < high) for low, high in shown]).long()


LEFT = mask_of((0, 40), (9, 40), (25, 40), (39, 40))
RIGHT = mask_of((0, 40), (0, 31), (0, 7), (0, 1))
BOTH = mask_of((3, 36), (0, 40), (10, 11), (20, 21)).index_fill(0, torch.tensor([3]), 0)  # the last row shows nothing
INSIDE = LEFT.index_fill(1, torch.arange(28, 33), 0)


def counted(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as `generate` counts


def documents(*lengths: int) -> tuple[Tensor, Tensor]:
    """Return position ids [1, L] and a mask [1, 1, L, L] of documents in one row."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & (document == document[:, None])
    return torch.cat([torch.arange(n) for n in lengths])[None], seen[None, None]


def added(mask: Tensor, lowest: float) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, lowest)


AT, BLOCKS = documents(17, 1, 13, 9)
SITUATIONS: dict[str, dict[str, Any]] = {
    "left": {"attention_mask": LEFT},
    "left, counted": {"attention_mask": LEFT, "position_ids": counted(LEFT)},
    "right": {"attention_mask": RIGHT},
    "right, counted": {"attention_mask": RIGHT, "position_ids": counted(RIGHT)},
    "both sides and an empty row": {"attention_mask": BOTH, "position_ids": counted(BOTH)},
    "inside": {"attention_mask": INSIDE},
    "inside, counted": {"attention_mask": INSIDE, "position_ids": counted(INSIDE)},
    "packed": {"position_ids": AT},
    "packed, block mask": {"position_ids": AT, "attention_mask": BLOCKS},
    "packed, added mask": {"position_ids": AT, "attention_mask": added(BLOCKS, torch.finfo(torch.float64).min)},
    "packed, -inf mask": {"position_ids": AT, "attention_mask": added(BLOCKS, -torch.inf)},
    "rows from elsewhere": {
        "position_ids": torch.arange(LENGTH) + torch.tensor([[0], [5], [0], [11]]), "attention_mask": LEFT * 0 + 1,
    },
    "a prefix both ways": {"attention_mask": documents(LENGTH)[1] | (torch.arange(LENGTH) < 10)},
    "gaps": {"attention_mask": BLOCKS | (torch.arange(LENGTH) < 3)},
}  # fmt: skip
REGULAR = {name for name in SITUATIONS if "inside" not in name and name != "gaps"}


def llama(**more: Any) -> Any:
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, initializer_range=0.3, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mistral() -> Any:
    config = MistralConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, initializer_range=0.3, sliding_window=11,
    )  # fmt: skip
    return MistralForCausalLM(config)


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=24, initializer_range=0.3, bos_token_id=0,
        eos_token_id=1, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "mistral": mistral, "gpt2": gpt2}


def swapped(make: Callable[[], Any], scheme: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = make().double().eval()
    patch_model(model, scheme, max_length=160, **options)
    for name, parameter in model.named_parameters():
        if "posswap" in name:  # float32, as it was made; seen in float64 the comparison is of the mathematics
            parameter.data = parameter.data.double()
    return model


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backend of each call; blocks are so small that each way has several."""
    monkeypatch.setattr(row_bias, "BLOCK", 16)
    monkeypatch.setattr(row_bias, "SMALLEST", 4)
    found: list[str] = []
    real = backends.choose

    def choose(request: Any) -> str:
        found.append(real(request))
        return found[-1]

    monkeypatch.setattr(backends, "choose", choose)
    return found


def by_formula(model: Any, run: Callable[[], Any]) -> Any:
    set_backend(model, "plain")
    try:
        return run()
    finally:
        set_backend(model, "auto")


@pytest.mark.parametrize("name", [*SITUATIONS])
@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=lambda one: str(one))
def test_a_batch_equals_the_formula(
    scheme: str, options: dict[str, Any], way: str, name: str, taken: list[str]
) -> None:
    arguments = SITUATIONS[name]
    for make in (llama, mistral) if way != "row_windowed" else (llama,):
        model = swapped(make, scheme, options)
        ids = IDS if name != "packed" else IDS[:1]  # without a mask documents are found in one row alone
        with torch.no_grad():
            set_backend(model, "plain")
            expected = model(ids, use_cache=False, **arguments).logits
            taken.clear()
            set_backend(model, way)
            found = model(ids, use_cache=False, **arguments).logits
        assert found.isfinite().all()
        shown = arguments.get("attention_mask")
        real = shown.bool() if shown is not None and shown.dim() == 2 else torch.ones_like(ids, dtype=torch.bool)
        assert (found - expected)[real].abs().max() < EXACT
        if way == "chunked" or (name in REGULAR and make is llama):
            assert set(taken) == {way}


@pytest.mark.parametrize("name", ["left", "right, counted", "packed", "packed, block mask", "inside"])
@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=lambda one: str(one))
def test_gradients_equal_the_formula_s(
    scheme: str, options: dict[str, Any], way: str, name: str, taken: list[str]
) -> None:
    arguments = SITUATIONS[name]
    model = swapped(llama, scheme, options).train()
    ids = IDS if name != "packed" else IDS[:1]
    shown = arguments.get("attention_mask")
    labels = ids
    if shown is not None and shown.dim() == 2:  # no loss of padding, nor of the first token, which padding predicts
        labels = ids.masked_fill((shown == 0) | (shown.roll(1, dims=1) == 0), -100)

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad()
        model(ids, labels=labels, use_cache=False, **arguments).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = by_formula(model, gradients)
    set_backend(model, way)
    taken.clear()
    for checkpointed in (False, True):
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        found = gradients()
        assert way in taken or name == "inside"
        for parameter, grad in expected.items():
            assert (found[parameter] is None) == (grad is None), parameter
            if grad is not None:
                scale = max(1.0, float(grad.abs().max()))
                assert (found[parameter] - grad).abs().max() < 1e-6 * scale, parameter  # c, M and slopes: float32


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("model_name", [*MODELS])
@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=lambda one: str(one))
def test_chunks_upon_a_cache_equal_the_whole(
    scheme: str, options: dict[str, Any], way: str, model_name: str, kind: str, taken: list[str]
) -> None:
    model = swapped(MODELS[model_name], scheme, options)
    positions = counted(LEFT)
    with torch.no_grad():
        arguments = {"attention_mask": LEFT, "position_ids": positions}
        expected = by_formula(model, lambda: model(IDS, use_cache=False, **arguments).logits)
        set_backend(model, way)
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + 6) if kind == "static" else None
        logits = []
        for start, stop in ((0, 13), (13, 14), (14, 33), (33, LENGTH)):
            taken.clear()
            out = model(
                IDS[:, start:stop], attention_mask=LEFT[:, :stop], position_ids=positions[:, start:stop],
                **with_cache(model, cache), use_cache=True,
            )  # fmt: skip
            cache = cache_in(out)
            logits.append(out.logits)
            assert set(taken) == ({way} if stop - start > 1 else set()), "one query has no ways to choose from"
    found = torch.cat(logits, dim=1)
    assert found.isfinite().all()
    assert (found - expected)[LEFT.bool()].abs().max() < EXACT


@pytest.mark.parametrize("model_name", [*MODELS])
@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=lambda one: str(one))
def test_a_text_into_an_empty_static_cache_equals_the_whole(
    scheme: str, options: dict[str, Any], way: str, model_name: str, taken: list[str]
) -> None:
    """Without a mask, as stock leaves it out: there are more keys than queries, and those beyond are seen by none."""
    model = swapped(MODELS[model_name], scheme, options)
    with torch.no_grad():
        expected = by_formula(model, lambda: model(IDS, use_cache=False).logits)
        set_backend(model, way)
        taken.clear()
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + 9)
        found = model(IDS, **with_cache(model, cache), use_cache=True).logits
    assert set(taken) == {way}
    assert (found - expected).abs().max() < EXACT


@pytest.mark.parametrize("shown", [LEFT, RIGHT, INSIDE], ids=["left", "right", "inside"])
@pytest.mark.parametrize("scheme", ["alibi", "t5", "kerple", "fire"])
def test_a_padded_encoder_equals_the_formula(scheme: str, shown: Tensor, taken: list[str]) -> None:
    model = swapped_bert(scheme)
    way = "chunked" if scheme == "fire" else "hankel"
    with torch.no_grad():
        expected = by_formula(model, lambda: model(IDS, attention_mask=shown).last_hidden_state)
        set_backend(model, way)
        taken.clear()
        found = model(IDS, attention_mask=shown).last_hidden_state
    assert (found - expected)[shown.bool()].abs().max() < EXACT
    assert way in taken or shown is INSIDE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "options", "way"), WAYS, ids=lambda one: str(one))
def test_short_dtypes_err_no_more_than_the_formula(
    scheme: str, options: dict[str, Any], way: str, dtype: torch.dtype
) -> None:
    exact_model = swapped(llama, scheme, options)
    model = swapped(llama, scheme, options)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "posswap" in name else dtype)
    rounded = dict(model.named_parameters())
    for name, parameter in exact_model.named_parameters():
        parameter.data = rounded[name].data.double()
    arguments = {"attention_mask": RIGHT, "use_cache": False}
    with torch.no_grad():
        exact = exact_model(IDS, **arguments).logits
        plain = by_formula(model, lambda: model(IDS, **arguments).logits)
        set_backend(model, way)
        found = model(IDS, **arguments).logits
    assert found.dtype == dtype
    real = RIGHT.bool()
    ours, theirs = (float((one.double() - exact)[real].abs().mean()) for one in (found, plain))
    assert ours < 2 * theirs


REGIONS = [entry[:2] for entry in WAYS if entry[2] == "merge"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of a GPU that calls by regions took; the formula over the pairs of their blocks stands for these."""
    called: list[str] = []

    def by_pairs(kernel: str, pairs: Any, value: Tensor, blocks: Any, *, scaling: float) -> Tensor:
        called.append(kernel)
        share = pairs[0][0].shape[1] // value.shape[1]
        batch, _, length, _ = pairs[0][0].shape
        scores = torch.full((batch, pairs[0][0].shape[1], length, value.shape[2]), -torch.inf, dtype=value.dtype)
        for (query, key), block_mask in zip(pairs, blocks, strict=True):
            held = create_mask(block_mask.mask_mod, batch, None, length, value.shape[2], device="cpu")
            assert scores.isneginf()[held.expand_as(scores)].all(), "no pair is in two regions"
            scores = torch.where(held, query @ key.repeat_interleave(share, dim=1).mT * scaling, scores)
        return scores.softmax(-1).nan_to_num(0.0) @ value.repeat_interleave(share, dim=1)

    monkeypatch.setattr(backends, "attend_by_regions", by_pairs)
    monkeypatch.setattr(backends, "fits_joined", lambda kernel, query, key, value: True)
    return called


@pytest.mark.parametrize("name", [*SITUATIONS, "one text", "one text from 5"])
@pytest.mark.parametrize(("scheme", "options"), REGIONS, ids=str)
def test_regions_by_flex_equal_the_formula(
    scheme: str, options: dict[str, Any], name: str, kernels: list[str], taken: list[str]
) -> None:
    """Any mask of a GPU that shows or hides, and one whole text without any; what adds numbers is for the formula."""
    whole = {"one text": {}, "one text from 5": {"position_ids": torch.arange(5, 5 + LENGTH)[None]}}
    arguments = (SITUATIONS | whole)[name]
    given = arguments.get("attention_mask", torch.ones_like(IDS))
    for make in (llama, mistral):
        model = swapped(make, scheme, options)
        ids = IDS if name != "packed" else IDS[:1]
        with torch.no_grad():
            set_backend(model, "plain")
            expected = model(ids, use_cache=False, **arguments).logits
            taken.clear()
            kernels.clear()
            set_backend(model, "flex")
            found = model(ids, use_cache=False, **arguments).logits
        real = given.bool() if given.dim() == 2 else torch.ones_like(ids, dtype=torch.bool)
        assert (found - expected)[real if name != "packed" else real[:1]].abs().max() < EXACT
        assert set(taken) == ({"plain"} if given.is_floating_point() or _jumps(make, name) else {"flex"})
        if "flex" in taken:
            without_mask = flex.CHUNK_REGIONS if scheme == "dual_chunk" else flex.REGIONS
            expected_kernel = without_mask if make is llama and name in whole else flex.MASKED_REGIONS
            assert set(kernels) == {expected_kernel}


def _jumps(make: Any, name: str) -> bool:
    """Return whether rows stand at other positions where stock makes no mask."""
    return make is llama and name == "rows from elsewhere"


@pytest.mark.parametrize("model_name", [*MODELS])
@pytest.mark.parametrize(("scheme", "options"), REGIONS, ids=str)
def test_chunks_upon_a_cache_by_flex_equal_the_whole(
    scheme: str, options: dict[str, Any], model_name: str, kernels: list[str], taken: list[str]
) -> None:
    model, cache, logits = swapped(MODELS[model_name], scheme, options), None, []
    with torch.no_grad():
        arguments = {"attention_mask": LEFT, "position_ids": counted(LEFT)}
        expected = by_formula(model, lambda: model(IDS, use_cache=False, **arguments).logits)
        set_backend(model, "flex")
        taken.clear()
        for part in torch.arange(LENGTH).split(15):
            seen = LEFT[:, : int(part[-1]) + 1]
            given = {"attention_mask": seen, "position_ids": counted(LEFT)[:, part], **with_cache(model, cache)}
            out = model(IDS[:, part], **given, use_cache=True)
            cache = cache_in(out)
            logits.append(out.logits)
    assert set(taken) == {"flex"}
    assert set(kernels) == {flex.MASKED_REGIONS}
    assert (torch.cat(logits, dim=1) - expected)[LEFT.bool()].abs().max() < EXACT


def test_what_a_padding_query_gets_is_what_stock_sdpa_gives_it() -> None:
    """Zeros, where it sees nothing, and no NaN: then its layers add nothing to what it was."""
    model = swapped(llama, "alibi", {})
    set_backend(model, "row")
    attentions: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: attentions.append(args[0]))
    with torch.no_grad():
        model(IDS, attention_mask=LEFT, use_cache=False)
    assert len(attentions) == 2
    for one in attentions:
        assert (one[LEFT == 0] == 0).all()
        assert (one[LEFT == 1] != 0).all(dim=-1).all()


@pytest.mark.slow
@pytest.mark.usefixtures("stock_compiles")
def test_a_compiled_padded_model_is_one_graph(taken: list[str]) -> None:
    model = swapped(llama, "alibi", {})
    set_backend(model, "row")
    torch._dynamo.reset()
    forward = torch.compile(
        lambda ids, mask: model(ids, attention_mask=mask, use_cache=False).logits, fullgraph=True, backend="eager"
    )
    with torch.no_grad():
        found, expected = forward(IDS, LEFT), model(IDS, attention_mask=LEFT, use_cache=False).logits
    assert (found - expected)[LEFT.bool()].abs().max() < EXACT


def test_a_mask_is_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posswap.patching.sites.attention import backends

    read = []
    real = backends.segments_of
    monkeypatch.setattr(backends, "segments_of", lambda *args: read.append(args) or real(*args))
    model = swapped(llama, "alibi", {})
    set_backend(model, "row")
    with torch.no_grad():
        for shown in (LEFT, RIGHT):
            model(IDS, attention_mask=shown, use_cache=False)
    assert len(read) == 2
    memo = next(hook.memos.of_thread() for module in model.modules() for hook in module._forward_pre_hooks.values()
                if hasattr(hook, "memos"))  # fmt: skip
    assert not memo.masks, "nothing of a forward outlives it"


def test_auto_leaves_the_formula_for_padded_batches(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "MIN_QK_PAIRS", LENGTH**2)
    for scheme, options, way in WAYS:
        if way in ("row_windowed", "chunked") and scheme != "fire":
            continue
        model = swapped(llama, scheme, options)
        assert {m.backend for m in model.modules() if isinstance(m, Mechanism)} == {"auto"}
        taken.clear()
        with torch.no_grad():
            model(IDS, attention_mask=LEFT, use_cache=False)
        assert set(taken) == ({"row"} if scheme == "alibi" else {way})
