"""Positions of cached keys go wherever the keys go (reordered, repeated, cropped, copied), or the call stops."""

from __future__ import annotations

import copy
import gc
import importlib.util
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer

from hf_posswap import evict_keys, patch_model, unpatch_model
from hf_posswap.errors import OptionError, PosswapError, UnsupportedSwapError
from hf_posswap.patching.sites.attention import cached_keys, edits
from hf_posswap.patching.sites.attention.forward_memo import Span, Standing
from hf_posswap.patching.sites.attention.positions import find_span
from hf_posswap.schemes import schemes_for
from tests.contract.models import TINY, build
from tests.contract.others import ALL
from tests.contract.pairs import NOISE, Pair, gap, refusal, words
from tests.stock import RELEASE, cache_in, with_cache

IDS = words(3, 16)
ROWS = torch.tensor([[*range(5), *range(7, 18)], [*range(9), *range(11, 18)], [*range(16)]])
"""Where the tokens stand: each row has its hole elsewhere, and the last has none."""
HALF = 10
SCHEMES = ("alibi", "self_extend")


class Lossless(QuantizedLayer):
    """A quantised layer that loses nothing, so that what it says is exactly what an ordinary one says."""

    def __init__(self) -> None:
        super().__init__(residual_length=4)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.clone()

    def _dequantize(self, q_tensor: Tensor) -> Tensor:
        return q_tensor


def swapped(name: str = "llama", scheme: str = "alibi", **changes: Any) -> Any:
    model = build(name, **changes)
    patch_model(model, scheme, max_length=64)
    return model


def run(model: Any, ids: Tensor, at: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
    """Return the logits of `ids` at positions `at`; all that is cached is seen."""
    held = 0 if cache is None else int(cache.get_seq_length())
    mask = torch.ones(len(ids), held + ids.shape[1], dtype=torch.long)
    with torch.no_grad():
        return model(
            input_ids=ids, position_ids=at, attention_mask=mask, use_cache=cache is not None,
            **with_cache(model, cache), **kwargs,
        ).logits  # fmt: skip


def empty(kind: str, model: Any) -> Any:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=32)
    if kind == "quantised":
        return DynamicCache.__mro__[1](layers=[Lossless() for _ in range(model.config.num_hidden_layers)])
    return DynamicCache(config=model.config) if kind == "by config" else DynamicCache()


def filled(kind: str, model: Any, ids: Tensor = IDS, at: Tensor = ROWS) -> Any:
    cache = empty(kind, model)
    run(model, ids[:, :HALF], at[:, :HALF], cache)
    return cache


def rest(model: Any, cache: Any, rows: Any = slice(None)) -> Tensor:
    return run(model, IDS[rows, HALF:], ROWS[rows, HALF:], cache)


def expected(model: Any, rows: Any = slice(None)) -> Tensor:
    return run(model, IDS[rows], ROWS[rows])[:, HALF:]


KINDS = ("dynamic", "by config", "static", "quantised")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_reordered_keep_their_positions(kind: str, scheme: str) -> None:
    if kind == "quantised" and RELEASE < (5, 23):
        pytest.skip("this release of transformers does not reorder what is quantised")
    model, order = swapped(scheme=scheme), torch.tensor([2, 0, 0])
    cache = filled(kind, model)
    cache.reorder_cache(order)
    assert gap(rest(model, cache, order), expected(model, order)) < NOISE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["dynamic", "by config"])
def test_rows_that_are_repeated_or_selected_keep_their_positions(kind: str, scheme: str) -> None:
    model = swapped(scheme=scheme)
    cache = filled(kind, model)
    cache.batch_repeat_interleave(2)
    twice = torch.tensor([0, 0, 1, 1, 2, 2])
    assert gap(rest(model, copy.deepcopy(cache), twice), expected(model, twice)) < NOISE
    cache.batch_select_indices(torch.tensor([5, 2]))
    assert gap(rest(model, cache, [2, 1]), expected(model, [2, 1])) < NOISE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["dynamic", "by config"])
def test_a_cropped_cache_goes_on_from_where_it_was_cut(kind: str, scheme: str) -> None:
    model = swapped(scheme=scheme)
    cache = filled(kind, model)
    run(model, words(3, 4, seed=9), 30 + torch.arange(4)[None], cache)
    cache.crop(-4)
    assert gap(rest(model, cache), expected(model)) < NOISE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_was_reset_begins_anew(kind: str, scheme: str) -> None:
    model = swapped(scheme=scheme)
    cache = filled(kind, model, words(3, 16, seed=8), ROWS.flip(0))
    cache.reset()
    if cache.get_seq_length() != 0 or (kind == "quantised" and RELEASE < (5, 23)):
        pytest.skip("this release of transformers fills a cache that is reset with zeros, and goes on behind them")
    run(model, IDS[:, :HALF], ROWS[:, :HALF], cache)
    assert gap(rest(model, cache), expected(model)) < NOISE


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_cache_are_told_as_well(kind: str, copied: Callable[[Any], Any]) -> None:
    model = swapped()
    cache = filled(kind, model)
    twin = copied(cache)
    assert gap(rest(model, twin), expected(model)) < NOISE
    twin.reorder_cache(torch.tensor([1, 1, 1]))
    assert gap(rest(model, cache), expected(model)) < NOISE  # the copy has positions of its own


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_keeps_the_classes_of_its_layers_and_is_freed_at_once(kind: str) -> None:
    model = swapped()
    before = [type(layer) for layer in empty(kind, model).layers] or [DynamicLayer] * 2
    cache = filled(kind, model)
    assert all(isinstance(layer, cls) for layer, cls in zip(cache.layers, before, strict=True))
    dead = weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert dead() is None  # no circle: its keys are freed with it
    finally:
        gc.enable()


def test_layers_that_see_a_window_and_layers_that_see_all_share_one_record() -> None:
    types = ["sliding_attention", "full_attention"]
    model = swapped("qwen2", layer_types=types, use_sliding_window=True, sliding_window=6)
    expected = run(model, IDS, ROWS)
    for kind in ("by config", "static"):
        cache, parts = empty(kind, model), []
        for start, stop in ((0, 3), (3, 4), (4, 9), (9, 10), (10, 11), (11, 16)):
            parts.append(run(model, IDS[:, start:stop], ROWS[:, start:stop], cache))
        assert gap(torch.cat(parts, dim=1), expected) < NOISE, kind
    assert isinstance(filled("by config", model).layers[0], DynamicSlidingWindowLayer)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *itertools.product(("gpt2", "opt"), ("rope", "alibi", "t5")),
        *itertools.product(("llama", "gpt_neox"), ("alibi", "self_extend", "dual_chunk")),
        ("bart", "alibi"),
        ("bart", "rope"),
    ],
)
def test_layers_that_are_called_alike_are_looked_at_once(
    name: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build(name) if name in TINY else ALL[name].build()
    patch_model(model, scheme, max_length=64)
    inputs, asked = ({"input_ids": IDS}, 0)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS

    def counted(*args: Any, **kwargs: Any) -> Span:
        nonlocal asked
        asked += 1
        return find_span(*args, **kwargs)

    monkeypatch.setattr(edits, "find_span", counted)
    with torch.no_grad():
        cache = cache_in(model(**inputs, use_cache=True))
        again = copy.deepcopy(cache)
        asked = 0
        found = model(**inputs, **with_cache(model, cache), use_cache=True).logits
        assert asked == 1 + 2 * model.config.is_encoder_decoder  # no cache keeps what the encoder's two layers do
        monkeypatch.setattr(Standing, "matches", lambda *_: False)
        assert torch.equal(found, model(**inputs, **with_cache(model, again), use_cache=True).logits)
    assert asked > 2


def test_one_row_of_positions_stays_one_row() -> None:
    model, at = swapped(), ROWS[:1]
    cache = filled("dynamic", model, at=at)
    assert cache.layers[0].posswap_positions.shape == (1, HALF)
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    order = torch.tensor([1, 0, 2])
    found = run(model, IDS[order, HALF:], at[:, HALF:].expand(3, -1), cache)
    assert gap(found, run(model, IDS[order], at)[:, HALF:]) < NOISE


def test_an_encoder_decoder_keeps_them_in_its_decoders_cache() -> None:
    tiny = ALL["bart"]
    model: Any = tiny.build()
    patch_model(model, "alibi", max_length=64)
    source = words(3, 6, seed=5)
    with torch.no_grad():
        whole = model(input_ids=source, decoder_input_ids=IDS, decoder_position_ids=ROWS).logits
        out = model(input_ids=source, decoder_input_ids=IDS[:, :HALF], decoder_position_ids=ROWS[:, :HALF])
        cache, order = cache_in(out), torch.tensor([1, 2, 0])
        cache.reorder_cache(order)
        out = model(input_ids=source[order], decoder_input_ids=IDS[order, HALF:],
                    decoder_position_ids=ROWS[order, HALF:], **with_cache(model, cache))  # fmt: skip
    assert gap(out.logits, whole[order, HALF:]) < NOISE


def test_a_forward_that_failed_half_way_leaves_no_trace() -> None:
    model = swapped()
    cache = filled("dynamic", model)
    hook = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, words(3, 4, seed=9), 40 + torch.arange(4)[None], cache)
    hook.remove()
    assert gap(rest(model, cache), expected(model)) < NOISE


def test_keys_that_another_hand_put_there_are_taken_to_stand_first_or_refused() -> None:
    model = swapped()
    own = filled("dynamic", model, at=torch.arange(16)[None])
    plain = [(layer.keys, layer.values) for layer in own.layers]
    at = torch.arange(HALF, 16)[None]
    found = run(model, IDS[:, HALF:], at, DynamicCache(plain))
    assert gap(found, run(model, IDS, torch.arange(16)[None])[:, HALF:]) < NOISE
    with pytest.raises(PosswapError, match=r"holds 10 tokens that this model did not put there.*at 10 and so on.*What"):
        run(model, IDS[:, HALF:], at + 1, DynamicCache(plain))
    static = StaticCache(config=model.config, max_cache_len=32)
    for index, (keys, values) in enumerate(plain):
        static.update(keys, values, index)
    assert gap(run(model, IDS[:, HALF:], at, copy.deepcopy(static)), found) < NOISE
    with pytest.raises(PosswapError, match="did not put there"):
        run(model, IDS[:, HALF:], at + 1, static)


def test_tokens_that_were_cached_while_the_swap_was_undone_are_refused() -> None:
    model = swapped()
    cache = filled("dynamic", model)
    unpatch_model(model)
    run(model, words(3, 2), torch.arange(18, 20)[None], cache)
    patch_model(model, "alibi", max_length=64)
    with pytest.raises(PosswapError, match=r"holds 12 tokens, and where they stand is known of 10 alone"):
        run(model, words(3, 1), torch.tensor([[20]]), cache)


def test_rows_that_were_changed_by_other_means_are_refused() -> None:
    model = swapped()
    cache = filled("dynamic", model)
    with pytest.raises(PosswapError, match=r"the cache holds 3 rows, and 2 come: its rows were changed by other means"):
        rest(model, copy.deepcopy(cache), [0, 1])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:2], layer.values[:2]
    with pytest.raises(PosswapError, match=r"layer 0 .*replaced by other means .*were \[3, 2, 10, 16\], and are \[2,"):
        rest(model, cache, [0, 1])


KEPT = torch.tensor([0, 2, 3, 7, 9])
"""Which of the first ten tokens stay in a cache."""


def evictable() -> list[Any]:
    """Return every scheme in a model without and one with a rotation of its own, at every site."""
    names = [(name, scheme, site) for name in ("llama", "gpt2") for scheme in schemes_for("text")
             for site in ("auto", "attention")]  # fmt: skip
    pairs = [Pair(name, scheme, site) for name, scheme, site in names]  # type: ignore[arg-type]
    native = [pair for pair in pairs if refusal(pair) is None and (pair.site == "auto" or pair.plan.route == "plugin")]
    return [pytest.param(pair, id=str(pair)) for pair in native]


def evict(cache: Any, keep: Tensor = KEPT, layers: slice = slice(None)) -> Any:
    """Keep of each layer's keys those at `keep`, as eviction methods do."""
    for layer in cache.layers[layers]:
        layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
    return cache


def without(model: Any, at: Tensor) -> Tensor:
    """Return logits of all tokens at once, of which those behind the first ten do not see what is not kept."""
    index = torch.arange(16)
    gone = (index[:, None] >= HALF) & (index < HALF) & ~torch.isin(index, KEPT)
    mask = (index <= index[:, None]) & ~gone
    with torch.no_grad():
        return model(input_ids=IDS, position_ids=at, attention_mask=mask[None, None], use_cache=False).logits[:, HALF:]


@pytest.mark.parametrize("pair", evictable())
def test_keys_that_another_hand_evicts_take_their_positions_along_or_are_refused(pair: Pair) -> None:
    model, at = pair.specimen(), torch.arange(16).expand(3, -1)

    def later(model: Any, cache: Any) -> Tensor:
        parts = [run(model, IDS[:, start:stop], at[:, start:stop], cache) for start, stop in ((10, 14), (14, 15))]
        return torch.cat(parts, dim=1)

    stock = pair.native()
    assert gap(later(stock, evict(filled("dynamic", stock, at=at))), without(stock, at)[:, :-1]) < NOISE
    cache = evict(filled("dynamic", model, at=at))
    knows = any(hasattr(layer, "posswap_keys") for layer in cache.layers)  # a scheme that asks where keys stand
    if knows:
        with pytest.raises(PosswapError, match=r"layer 0 .*\[3, \d, 10, \d+\], and are \[3, \d, 5.*What works: hf_pos"):
            later(model, cache)
    else:
        assert gap(later(model, cache), without(model, at)[:, :-1]) < NOISE
    assert knows or pair.scheme not in ("alibi", "t5", "kerple", "fire", "self_extend", "rerope", "dual_chunk")
    assert not (knows and pair.scheme in ("rope", "xpos", "nope", "yarn", "learned", "sinusoidal"))


@pytest.mark.parametrize("pair", evictable())
def test_evict_keys_takes_the_positions_along(pair: Pair) -> None:
    """Steps after it equal a forward upon all tokens with a mask that hides those that are gone."""
    model, at = pair.specimen(), torch.arange(16).expand(3, -1)
    cache = filled("dynamic", model, at=at)
    evict_keys(cache, KEPT)
    parts = [run(model, IDS[:, start:stop], at[:, start:stop], cache) for start, stop in ((10, 14), (14, 15), (15, 16))]
    assert gap(torch.cat(parts, dim=1), without(model, at)) < NOISE


@pytest.mark.parametrize("scheme", ["rope", "t5", "dual_chunk", "rerope", *SCHEMES])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_evict_keys_of_rows_of_their_own_and_again(name: str, scheme: str) -> None:
    """Each row keeps other keys; later more go, as in a sliding window, the cache is reordered, cropped and copied."""
    model = swapped(name, scheme)
    cache = filled("dynamic", model)
    keep = torch.stack([torch.tensor([0, 2, 3, 7, 9]), torch.tensor([1, 2, 4, 5, 6]), torch.tensor([0, 1, 7, 8, 9])])
    evict_keys(cache, keep)
    run(model, IDS[:, HALF:13], ROWS[:, HALF:13], cache)
    evict_keys(cache, torch.tensor([True, False, True, True, False, True, True, True]))
    run(model, IDS[:, 13:14], ROWS[:, 13:14], cache)
    cache.crop(-1)
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    found = run(model, IDS[rows, 13:14], ROWS[rows, 13:14], cache)
    # queries at 10 to 12 saw what was kept first, the one at 13 what was kept then
    mask = torch.ones(14, 14, dtype=torch.bool).tril().repeat(3, 1, 1)
    for row in range(3):
        gone = [n for n in range(HALF) if n not in keep[row]]
        mask[row, HALF:, gone] = False
        mask[row, 13, keep[row, [1, 4]]] = False
    expected = model(input_ids=IDS[:, :14], position_ids=ROWS[:, :14], attention_mask=mask[:, None], use_cache=False)
    assert gap(found, expected.logits[rows, 13:].detach()) < NOISE


def test_tokens_that_would_stand_among_kept_keys_are_refused() -> None:
    """Without position ids a model counts the keys that are left."""
    model, at = swapped(), torch.arange(16).expand(3, -1)
    cache = filled("dynamic", model, at=at)
    evict_keys(cache, KEPT)
    twin = copy.deepcopy(cache)
    message = "evicted from this cache, and the new tokens stand at 5 and so on, not behind the kept keys.*stands at 9"
    with pytest.raises(PosswapError, match=message):
        model(IDS[:, HALF:11], **with_cache(model, cache))
    with pytest.raises(PosswapError, match=message):
        model.generate(IDS[:, :6], max_new_tokens=2, **with_cache(model, twin))
    stock = build("llama")  # whose cache knows no positions
    foreign = filled("dynamic", stock, at=at)
    evict_keys(foreign, KEPT)
    with pytest.raises(PosswapError, match="holds 5 tokens that this model did not put there"):
        model(IDS[:, HALF:11], **with_cache(model, foreign))
    cache.reset()
    if not cache.get_seq_length():  # older releases fill it with zeros, and go on behind them
        run(model, IDS[:, :HALF], at[:, :HALF], cache)
        assert gap(run(model, IDS[:, HALF:], at[:, HALF:], cache), run(model, IDS, at)[:, HALF:]) < NOISE


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_compiled_forward_upon_kept_keys_is_right_or_refused(scheme: str) -> None:
    model, at = swapped(scheme=scheme), torch.arange(16).expand(3, -1)
    cache = filled("dynamic", model, at=at)
    evict_keys(cache, KEPT)
    right = run(model, IDS[:, HALF:12], at[:, HALF:12], copy.deepcopy(cache))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        found = compiled(IDS[:, HALF:12], position_ids=at[:, HALF:12], **with_cache(model, copy.deepcopy(cache)))
        assert gap(found.logits, right) < NOISE
        with pytest.raises(PosswapError, match="the new tokens stand at 5 and so on, not behind the kept keys"):
            compiled(IDS[:, HALF:12], **with_cache(model, copy.deepcopy(cache)))
        torch._dynamo.reset()
        whole = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="(?s)evicted from this cache|Observed exception"):
            whole(IDS[:, HALF:12], position_ids=at[:, HALF:12], **with_cache(model, copy.deepcopy(cache)))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([0, 1], "keep is list; give a tensor: indices"),
        (torch.tensor([0.0, 1.0]), "keep is Tensor; give a tensor"),
        (torch.tensor([3, 1]), r"keep is \[3, 1\]; give indices \[K\] or \[3, K\], ascending, of the 10 keys"),
        (torch.tensor([3, 3]), "each once"),
        (torch.tensor([0, 10]), r"keep is \[0, 10\]"),
        (torch.tensor([-1, 3]), r"keep is \[-1, 3\]"),
        (torch.tensor([], dtype=torch.long), r"shape \[0\].*at least one"),
        (torch.tensor([[0, 1], [1, 2]]), r"shape \[2, 2\]; give indices"),
        (torch.ones(9, dtype=torch.bool), r"bool \[9\]; give .* or bool \[10\]"),
    ],
    ids=str,
)
def test_evict_keys_refuses_what_does_not_fit_and_changes_nothing(keep: Any, message: str) -> None:
    model = swapped()
    cache = filled("dynamic", model)
    with pytest.raises(OptionError, match=message):
        evict_keys(cache, keep)
    assert gap(rest(model, cache), expected(model)) < NOISE


def test_evict_keys_refuses_caches_that_hold_keys_otherwise() -> None:
    model = swapped()
    for cache in (DynamicCache(), None):
        with pytest.raises(OptionError, match="holds no tokens"):
            evict_keys(cache, KEPT)
    windowed = build("mistral (sliding_window)")
    for kind, name, owner in (
        *(("static", "StaticLayer", model), ("quantised", "Lossless", model)),
        ("by config", "DynamicSlidingWindowLayer", windowed),
    ):
        with pytest.raises(
            UnsupportedSwapError, match=f"layer 0 of this cache is a {name}.*What works: a DynamicCache"
        ):
            evict_keys(filled(kind, owner), KEPT)
    with pytest.raises(PosswapError, match="keys of layer 0 of this cache were replaced by other means"):
        evict_keys(evict(filled("dynamic", model), torch.arange(1, HALF)), KEPT[:3])
    cache = filled("dynamic", model)
    cache.layers[1].crop(-1)
    with pytest.raises(PosswapError, match="layer 1 .* does not hold as many keys as layer 0"):
        evict_keys(cache, KEPT)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_way_to_evict_is_noticed(scheme: str) -> None:
    model, at = swapped(scheme=scheme), torch.arange(16).expand(3, -1)
    cache = evict(filled("dynamic", model, at=at), layers=slice(1, None))
    with pytest.raises(PosswapError, match="the keys of layer 1 of this cache"):  # of one layer alone
        run(model, IDS[:, HALF:11], at[:, HALF:11], cache)
    cache = filled("dynamic", model, at=at)
    run(model, IDS[:, HALF:11], at[:, HALF:11], cache)
    evict(cache, torch.tensor([*range(4), *range(5, 11)]))  # one token a step, as many as came
    with pytest.raises(PosswapError, match=r"were \[3, 2, 11, 16\], and are \[3, 2, 10, 16\]"):
        run(model, IDS[:, 11:12], at[:, 11:12], cache)
    cache = evict(filled("dynamic", model, at=at), torch.arange(HALF).flip(0))  # as many, in another order
    with pytest.raises(PosswapError, match="the keys of layer 0 of this cache were replaced by other means"):
        rest(model, cache)
    for method in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        with pytest.raises(PosswapError, match="replaced by other means"):
            rest(model, method(cache))
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    with pytest.raises(PosswapError, match="replaced by other means"):  # what comes after does not hide it
        rest(model, cache)
    cache = filled("dynamic", model, at=at)
    for layer in cache.layers:  # heads that keep other tokens each
        keep = torch.stack([KEPT, KEPT.flip(0)]).expand(3, -1, -1)[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys = layer.keys.gather(2, keep)
    with pytest.raises(PosswapError, match="replaced by other means"):
        rest(model, cache)


def exchanged(cache: Any) -> None:
    """Put layers with the kept keys alone in the place of all but the first."""
    for at, layer in list(enumerate(cache.layers))[1:]:
        cache.layers[at] = DynamicLayer()
        cache.layers[at].update(layer.keys[:, :, KEPT], layer.values[:, :, KEPT])


def moved_to_the_front(cache: Any) -> None:
    """Write the kept keys over the first ones, and cut the rest off."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            places = getattr(layer, name)[:, :, : len(KEPT)]
            setattr(layer, name, places.copy_(getattr(layer, name)[:, :, KEPT].clone()))


def given_other_data(cache: Any) -> None:
    """Put the kept keys into the same tensors."""
    for layer in cache.layers:
        layer.keys.data, layer.values.data = layer.keys.data[:, :, KEPT], layer.values.data[:, :, KEPT]


@pytest.mark.parametrize("scheme", [*SCHEMES, "t5"])
@pytest.mark.parametrize("by", [exchanged, moved_to_the_front, given_other_data])
def test_evictions_in_place_and_of_some_layers_are_noticed(by: Any, scheme: str) -> None:
    model, at = swapped(scheme=scheme), torch.arange(16).expand(3, -1)
    cache = filled("dynamic", model, at=at)
    by(cache)
    for method in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), lambda cache: cache):
        with pytest.raises(PosswapError, match="of this cache were replaced by other means than the cache's own"):
            run(model, IDS[:, HALF:], at[:, HALF:], method(cache))


def turned_over(layer: Any) -> None:
    """Put as many keys in another order, as a tensor of its own."""
    layer.keys, layer.values = layer.keys.flip(2), layer.values.flip(2)


def shortened(layer: Any) -> None:
    """Put fewer keys into the same tensor."""
    layer.keys.data, layer.values.data = layer.keys.data[:, :, KEPT], layer.values.data[:, :, KEPT]


@pytest.mark.parametrize("scheme", [*SCHEMES, "t5"])
@pytest.mark.parametrize("change", [turned_over, shortened])
def test_one_layer_among_layers_that_are_called_alike_is_looked_at(change: Callable[[Any], None], scheme: str) -> None:
    model = swapped("llama", scheme, num_hidden_layers=4)
    for number in range(4):
        cache = filled("dynamic", model)
        change(cache.layers[number])
        with pytest.raises(PosswapError, match=f"keys of layer {number} of this cache were replaced"):
            rest(model, cache)


@pytest.mark.parametrize("scheme", [*SCHEMES, "rope"])
def test_keys_that_are_evicted_from_a_quantised_cache_are_noticed(scheme: str) -> None:
    """As kvpress does, too: what a layer has quantised is quantised anew, without the keys that go."""
    model, at = swapped(scheme=scheme), torch.arange(16).expand(3, -1)
    cache = filled("quantised", model, at=at)
    for layer in cache.layers:
        keys, values = (
            layer._dequantize(each)[:, :, KEPT] for each in (layer._quantized_keys, layer._quantized_values)
        )
        layer._quantized_keys, layer._quantized_values = layer._quantize(keys, 0), layer._quantize(values, 0)
        layer.cumulative_length = len(KEPT)
    if scheme == "rope":
        assert gap(run(model, IDS[:, HALF:], at[:, HALF:], cache), without(model, at)) < NOISE
        return
    for method in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), lambda cache: cache):
        with pytest.raises(PosswapError, match="the keys of layer 0 of this cache were replaced by other means than"):
            run(model, IDS[:, HALF:], at[:, HALF:], method(cache))


def test_a_hook_that_compresses_a_prompt_is_noticed() -> None:
    """As kvpress does: after each attention of the prompt the best keys of each head, by a score, stay in its cache."""
    model, at = swapped(), torch.arange(16)[None].expand(3, -1)

    def compress(module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        layer = next(value for value in kwargs.values() if hasattr(value, "layers")).layers[module.layer_idx]
        kept = layer.keys.norm(dim=-1).topk(5, dim=-1).indices[..., None]
        layer.keys = layer.keys.gather(2, kept.expand(-1, -1, -1, layer.keys.shape[-1])).contiguous()
        layer.values = layer.values.gather(2, kept.expand(-1, -1, -1, layer.values.shape[-1])).contiguous()
        return output

    hooks = [layer.self_attn.register_forward_hook(compress, with_kwargs=True) for layer in model.model.layers]
    cache = filled("dynamic", model, at=at)
    for hook in hooks:
        hook.remove()
    assert cache.get_seq_length() == 5
    with pytest.raises(PosswapError, match="the keys of layer 0 of this cache were replaced by other means"):
        rest(model, cache)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_first_keys_alone_and_other_values_in_their_places_are_taken(scheme: str) -> None:
    model = swapped(scheme=scheme)
    cache = filled("dynamic", model)
    run(model, words(3, 4, seed=9), 30 + torch.arange(4)[None], cache)
    for layer in cache.layers:  # as kvpress takes an answer out of a cache
        layer.keys, layer.values = layer.keys[:, :, :HALF], layer.values[:, :, :HALF]
    for method in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), lambda cache: cache):
        assert gap(rest(model, method(cache)), expected(model)) < NOISE
    cache = filled("dynamic", model)
    for layer in cache.layers:
        layer.keys.copy_(layer.keys.clone())
    assert gap(rest(model, cache), expected(model)) < NOISE
    assert gap(rest(model, moved(filled("dynamic", model))), expected(model)) < NOISE


def moved(cache: Any) -> Any:
    """Return a cache whose layers were on another device meanwhile, as far as a CPU has one."""
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    return cache


def test_a_cache_without_layers_is_refused() -> None:
    class Other(Cache):
        def __init__(self) -> None:
            self.layers = ()  # type: ignore[assignment]  # none that can be exchanged

        def get_query_offset(self, layer: int) -> int:
            return 0

        def get_mask_sizes(self, length: int, layer: int) -> tuple[int, int]:
            return length, 0

        def get_seq_length(self, layer: int = 0) -> int:
            return 0

    model = swapped()
    with pytest.raises(PosswapError, match="a cache of class Other has no layers that could keep where its keys stand"):
        model(input_ids=IDS, **with_cache(model, Other()), use_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cache_that_a_compiled_forward_makes_keeps_them(scheme: str) -> None:
    model = swapped(scheme=scheme)
    torch._dynamo.reset()
    whole = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = cache_in(whole(input_ids=IDS[:, :HALF], position_ids=ROWS[:, :HALF], use_cache=True,
                      attention_mask=torch.ones(3, HALF, dtype=torch.long)))  # fmt: skip
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert gap(rest(model, cache, [2, 0, 0]), expected(model, [2, 0, 0])) < NOISE


def layer_classes() -> int:
    """Return how many classes of cache layers there are, at any depth."""
    waiting, found = [CacheLayerMixin], {CacheLayerMixin}
    while waiting:
        new = set(waiting.pop().__subclasses__()) - found
        found |= new
        waiting += new
    return len(found)


def test_each_copy_of_the_code_makes_as_many_classes() -> None:
    """Each checkpoint with code of its own brings a copy of this module."""
    counts, copies = [], []
    for number in range(4):
        spec = importlib.util.spec_from_file_location(f"copy_{number}_of_key_positions", cached_keys.__file__)
        assert spec is not None
        assert spec.loader is not None
        copied = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copied)
        copied.prepare()
        copies.append(copied)  # its classes live as long
        counts.append(layer_classes())
    assert len({after - before for before, after in itertools.pairwise(counts)}) == 1
