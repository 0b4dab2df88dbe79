"""Encoders and decoders with a position table: found right, swapped, proved from outside, and taken back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_posswap
from hf_posswap import Alibi, Rope, patch_model, patched, swap_plan, unpatch_model, verify_swap
from hf_posswap.errors import PositionRangeError, PosswapError, SwapVerificationError, UnsupportedSwapError
from hf_posswap.families import locate
from hf_posswap.testing.contract.models import WAYS, copied
from tests.contract.pairs import CHANGE, NOISE, gap
from tests.families.oracles import penalty, rotated, turn, without_tables
from tests.families.single import (
    DECODERS,
    ENCODERS,
    IDS,
    KINDS,
    LENGTH,
    PADDING,
    build,
    logits,
    stepwise,
    words,
)

DAILY = ("ElectraForMaskedLM", "XLMRobertaForMaskedLM", "DistilBertForMaskedLM", "AlbertForMaskedLM", *DECODERS)
"""One of each kind; the others run every swap with `-m exhaustive`."""
CELLS = [
    pytest.param(name, scheme, marks=[] if name in DAILY else pytest.mark.exhaustive)
    for name in KINDS
    for scheme in ("rope", "alibi", "learned", "sinusoidal", "nope")
    if not (scheme == "nope" and name not in DECODERS)
]
cells = pytest.mark.parametrize(("name", "scheme"), CELLS)


def swapped(name: str, scheme: Any, length: int = 2 * LENGTH, **changes: Any) -> Any:
    model = build(name, **changes)
    patch_model(model, scheme, max_length=length)
    return model


@pytest.mark.parametrize("name", list(KINDS))
def test_the_first_token_reads_the_row_that_the_offset_says(name: str) -> None:
    model = build(name)
    sites = locate(model)
    rows, moved = model.get_submodule(sites.table_path or "").weight, []
    before = logits(model, IDS[:, :1])
    for row in range(6):
        kept = rows[row].clone()
        with torch.no_grad():
            rows[row] += torch.randn(rows.shape[1])
        if gap(logits(model, IDS[:, :1]), before) > 0:
            moved.append(row)
        with torch.no_grad():
            rows[row] = kept
    assert moved == [sites.table_offset] == [KINDS[name].offset]
    assert (sites.geometry.original_length, sites.geometry.row_width) == (LENGTH, rows.shape[1])


@pytest.mark.parametrize("name", list(KINDS))
def test_what_is_called_causal_is(name: str) -> None:
    other = IDS.clone()
    other[:, -1] = (other[:, -1] + 1) % 90 + 5
    model = build(name)
    change = gap(logits(model, other)[:, :-1], logits(model)[:, :-1])
    assert (change == 0) == locate(model).geometry.causal == (name in DECODERS)


@cells
def test_the_swap_is_proved_and_taken_back_bit_by_bit(name: str, scheme: str) -> None:
    model = build(name)
    before, config = logits(model), model.config.to_dict()
    tensors = {key: (id(t), t._version) for key, t in model.state_dict(keep_vars=True).items()}
    own = [(path, type(m), sorted(vars(m)), dict(m._forward_pre_hooks)) for path, m in model.named_modules()]
    with patched(model, scheme, max_length=2 * LENGTH):
        verify_swap(model)
        assert (gap(logits(model), before) < NOISE) == (scheme == "learned")
    assert {key: (id(t), t._version) for key, t in model.state_dict(keep_vars=True).items()} == tensors
    assert [(p, type(m), sorted(vars(m)), dict(m._forward_pre_hooks)) for p, m in model.named_modules()] == own
    assert model.config.to_dict() == config
    assert gap(logits(model), before) == 0


@cells
def test_saved_and_loaded_it_is_the_same(name: str, scheme: str, tmp_path: Path) -> None:
    model, ids = swapped(name, scheme), words(2, LENGTH + 8)
    expected, stock = logits(model, ids), getattr(transformers, name)
    hf_posswap.save(model, tmp_path / "model")
    loaded = hf_posswap.load(tmp_path / "model")
    assert gap(logits(loaded, ids), expected) == 0
    assert loaded.config.posswap == model.config.posswap
    verify_swap(loaded)
    if model._posswap.plan.route == "native":
        assert gap(logits(stock.from_pretrained(tmp_path / "model").eval(), ids), expected) == 0
    else:
        with pytest.raises((RuntimeError, KeyError, ValueError)):
            stock.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("scheme", ["learned", "sinusoidal"])
@pytest.mark.parametrize("name", list(KINDS))
def test_tables_are_what_a_longer_stock_model_holds(name: str, scheme: str) -> None:
    model, ids = swapped(name, scheme), words(2, 2 * LENGTH)
    longer = build(name, max_position_embeddings=model.config.max_position_embeddings)
    longer.load_state_dict(model.state_dict(), strict=True)
    assert gap(logits(longer, ids), logits(model, ids)) == 0
    with pytest.raises(PositionRangeError, match=f"ends at {2 * LENGTH}"):
        logits(model, words(1, 2 * LENGTH + 1))


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.projections])
def test_rope_is_a_rotation_of_queries_and_keys(name: str) -> None:
    oracle = without_tables(build(name))
    projections: Any = KINDS[name].projections
    rotated(oracle, locate(oracle).main, projections)
    assert (
        gap(logits(swapped(name, "rope")), logits(oracle, use_cache=False) if name in DECODERS else logits(oracle))
        < NOISE
    )


def test_rope_in_attention_of_one_key_head_is_a_rotation_of_both() -> None:
    """GPT-BigCode's projection gives all queries, one key and one value."""
    name = "GPTBigCodeForCausalLM"
    oracle = without_tables(build(name))
    geometry = locate(oracle).geometry
    assert geometry.num_kv_heads == 1
    width = geometry.hidden_size + geometry.head_dim
    for path in locate(oracle).attention:
        oracle.get_submodule(f"{path}.c_attn").register_forward_hook(turn(geometry.num_heads + 1, width))
    assert gap(logits(swapped(name, "rope")), logits(oracle, use_cache=False)) < NOISE


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.masks_2d])
def test_alibi_is_an_additive_mask(name: str) -> None:
    oracle = without_tables(build(name))
    geometry = locate(oracle).geometry
    mask = penalty(geometry.num_heads, IDS.shape[1], causal=geometry.causal).expand(2, -1, -1, -1)
    given = {"position_ids": torch.arange(IDS.shape[1])[None]} if name == "OPTForCausalLM" else {}
    assert gap(logits(swapped(name, "alibi")), logits(oracle, attention_mask=mask, **given)) < NOISE


@pytest.mark.parametrize(
    ("name", "scheme"),
    [(name, scheme) for name in DECODERS for scheme in ("learned", "nope", "rope", "alibi", "self_extend")],
)
def test_cached_equals_full_beyond_the_original_length(name: str, scheme: str) -> None:
    model, ids = swapped(name, scheme), words(2, LENGTH + 8)
    assert gap(stepwise(model, ids), logits(model, ids)) < NOISE


@pytest.mark.parametrize("scheme", ["rope", "alibi", "self_extend"])
@pytest.mark.parametrize("name", list(DECODERS))
def test_left_padded_prompts_are_gone_on_with_as_alone(name: str, scheme: str) -> None:
    model = swapped(name, scheme)
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[1, :6], mask[1, :6] = PADDING, 0
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    alone = model.generate(IDS[1:, 6:], max_new_tokens=6, do_sample=False)
    assert torch.equal(together[1, -6:], alone[0, -6:])


def padded(left: bool) -> tuple[Tensor, Tensor, slice]:
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    where, kept = (slice(0, 6), slice(6, None)) if left else (slice(-6, None), slice(0, -6))
    ids[1, where], mask[1, where] = PADDING, 0
    return ids, mask, kept


CONVOLVED = ("ConvBertForMaskedLM", "MobileBertForMaskedLM")
"""Models whose own code mixes padding with the words beside it, before or beside attention."""


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in CONVOLVED])
def test_padding_is_not_seen(name: str, left: bool) -> None:
    ids, mask, kept = padded(left)
    for scheme in ("rope", "alibi", "learned"):
        if scheme == "learned" and left and not KINDS[name].skips_padding:
            continue  # the native model counts padding too
        model = swapped(name, scheme)
        found = logits(model, ids, attention_mask=mask)
        assert gap(found[1, kept], logits(model, IDS[1:, kept])[0]) < NOISE, scheme


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.projections and kind.takes_positions])
def test_position_ids_reach_the_attention(name: str) -> None:
    """Positions with holes act, also where a model does not tell its attention of them."""
    holes = torch.cat((torch.arange(8), torch.arange(15, 27)))
    model, oracle = swapped(name, "rope"), without_tables(build(name))
    first = locate(oracle).first_position
    projections: Any = KINDS[name].projections
    rotated(oracle, locate(oracle).main, projections, positions=holes)
    expected = logits(oracle, use_cache=False) if name in DECODERS else logits(oracle)
    assert gap(logits(model, position_ids=holes[None] + first), expected) < NOISE
    assert gap(logits(model), expected) > CHANGE


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.told and kind.checkpoints])
def test_position_ids_that_layers_would_miss_in_the_backward_are_refused(name: str) -> None:
    model = swapped(name, "rope").train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    positions = torch.arange(IDS.shape[1])[None]
    kwargs = {"use_cache": False} if name in DECODERS else {}
    with pytest.raises(UnsupportedSwapError, match="is not told of position ids, and under gradient checkpointing"):
        model(IDS, position_ids=positions, **kwargs)
    model(IDS, labels=IDS, **kwargs).loss.backward()
    model.eval()
    assert gap(logits(model, position_ids=positions), logits(model)) < NOISE


def test_a_length_that_changes_other_weights_is_no_native_swap(tmp_path: Path) -> None:
    """DeBERTa takes the size of its relative part from the length."""
    relative = {"relative_attention": True, "max_relative_positions": -1, "pos_att_type": "c2p|p2c"}
    model, ids = build("DebertaForMaskedLM", **relative), words(2, LENGTH + 8)
    plan = swap_plan(patch_model(model, "learned", max_length=2 * LENGTH))
    assert plan.route == "plugin"
    assert "Stock transformers would change other weights with the length." in plan.notes
    hf_posswap.save(model, tmp_path / "model")
    assert gap(logits(hf_posswap.load(tmp_path / "model"), ids), logits(model, ids)) == 0
    with pytest.raises((RuntimeError, KeyError, ValueError)):
        transformers.DebertaForMaskedLM.from_pretrained(tmp_path / "model")


def test_layers_that_share_their_weights_have_one_scheme() -> None:
    with pytest.raises(UnsupportedSwapError, match="per_layer gives layers different positions, and those of Albert"):
        patch_model(build("AlbertForMaskedLM"), Rope().per_layer({0: Alibi()}))


def test_closed_attention_is_refused_with_what_works() -> None:
    model = build("ElectraForMaskedLM")
    for path in locate(model).attention:
        native = model.get_submodule(path)
        body = {"__module__": __name__, "forward": lambda self, hidden_states, **kwargs: (hidden_states, None)}
        native.__class__ = type("Own", (type(native),), body)  # code without the interface
    with pytest.raises(UnsupportedSwapError, match=r"\(Own\).*AttentionInterface.*What works: sinusoidal, learned"):
        patch_model(model, "rope")
    assert not hasattr(model, "_posswap")


def test_attention_to_blocks_is_refused_with_what_works() -> None:
    model = build("BigBirdForMaskedLM", attention_type="block_sparse")
    with pytest.raises(UnsupportedSwapError, match=r"'block_sparse': its code .* attention_type='original_full'"):
        patch_model(model, "rope")
    assert swap_plan(patch_model(model, "sinusoidal")).route == "native"


@pytest.mark.parametrize("scheme", ["rope", "alibi"])
@pytest.mark.parametrize("reached", ["all", "one"])
def test_attention_that_is_exchanged_after_a_swap_does_not_drop_the_scheme(reached: str, scheme: str) -> None:
    """BigBird makes its attention modules anew where its attention type is set."""
    model, ids = build("BigBirdForMaskedLM"), words(2, 12)
    patch_model(model, scheme, site="attention")
    before = logits(model, ids)
    model.bert.set_attention_type("original_full")  # it is that already
    assert gap(logits(model, ids), before) == 0
    layers = model.bert.encoder if reached == "all" else model.bert.encoder.layer[1]
    for kind in ("block_sparse", "original_full"):
        layers.set_attention_type(kind)
    with pytest.raises(
        PosswapError, match=r"attention modules of BigBirdModel .* replaced since .*What works: load the model again"
    ):
        logits(model, ids)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "fire"])
@pytest.mark.parametrize("removed", [slice(0, 1), slice(1, 2), slice(2, 4)])
def test_a_model_that_is_pruned_after_a_swap_is_that_of_its_layers(scheme: str, removed: slice) -> None:
    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 320, "n_positions": 32}
    model, ids = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0)).eval(), words(2, 12)
    pruned_first = copy.deepcopy(model)
    patch_model(model, scheme, site="attention")
    for each in (pruned_first, model):
        del each.transformer.h[removed]
        for number, block in enumerate(each.transformer.h):
            block.attn.layer_idx = number
    expected = logits(model, ids)
    assert gap(expected, logits(patch_model(pruned_first, scheme, site="attention"), ids)) == 0
    for way in WAYS:
        assert gap(logits(copied(model, way), ids), expected) == 0
    with pytest.raises(SwapVerificationError, match=r"transformer\.h\.\d\.attn: its layer was removed since"):
        verify_swap(model)
    with pytest.raises(UnsupportedSwapError, match=r"attn of GPT2LMHeadModel was removed after the swap to \w+"):
        unpatch_model(model)
    assert swap_plan(model).scheme.name == scheme
