"""The hooks of filling and loading, as the transformers and the torch that are installed call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_posswap.compat.transformers_loading import LoadingHooks, ignore_on_load, ignored_on_load

TINY = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
TABLE = "wpe.weight"


class Halved(ConversionOps):
    """Halves a weight."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        ((_, held),) = input_dict.items()
        return {target_patterns[0]: (held[0] if isinstance(held, list) else held) / 2}


class Plain(LoadingHooks, GPT2Model):
    """A GPT-2 that leaves all hooks alone."""

    __module__ = GPT2Model.__module__  # models of other packages are filled with other random numbers


class Hooked(LoadingHooks, GPT2Model):
    """A GPT-2 whose position table begins as sevens, and is halved and frozen when it is loaded."""

    def posswap_fill(self, module: nn.Module) -> bool:
        table = isinstance(module, nn.Embedding) and module.num_embeddings == TINY.n_positions
        if table:
            nn.init.constant_(module.weight, 7.0)  # type: ignore[arg-type]
        return table

    def posswap_read(self, state: dict[str, Any], prefix: str, metadata: Any) -> Any:
        if prefix + TABLE in state:
            state[prefix + TABLE] = state[prefix + TABLE] / 2
        return {"version": 5}

    @classmethod
    def posswap_conversions(cls, model: Any) -> list[Any]:
        return [WeightConverter(TABLE.replace(".", r"\.") + "$", TABLE, operations=[Halved()])]

    @classmethod
    def posswap_loaded(cls, model: Any) -> None:
        model.wpe.requires_grad_(False)


@pytest.fixture
def stock() -> GPT2Model:
    torch.manual_seed(0)
    return GPT2Model(TINY)


def same(one: Any, other: Any) -> bool:
    """Return whether two models have the same weights, but for the position table."""
    theirs = other.state_dict()
    return all(torch.equal(held, theirs[name]) for name, held in one.state_dict().items() if name != TABLE)


def test_posswap_fill() -> None:
    made: Any = Hooked(TINY)
    made.init_weights()
    assert bool((made.wpe.weight == 7).all())
    assert 0 < made.wte.weight.std() < 0.1  # the stock class fills the others


def test_posswap_read(stock: Any) -> None:
    made = Hooked(TINY)
    made.load_state_dict(stock.state_dict())
    assert torch.equal(made.state_dict()[TABLE], stock.state_dict()[TABLE] / 2)
    assert same(made, stock)


def test_posswap_read_gives_the_metadata_to_go_by(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    native = nn.Module._load_from_state_dict

    def watching(module: nn.Module, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if isinstance(module, Hooked):
            seen.append(metadata)
        native(module, state, prefix, metadata, *rest)

    monkeypatch.setattr(nn.Module, "_load_from_state_dict", watching)
    Hooked(TINY).load_state_dict(stock.state_dict())
    assert seen == [{"version": 5}]


def test_posswap_conversions(stock: Any, tmp_path: Path) -> None:
    stock.save_pretrained(tmp_path / "stock")
    made = Hooked.from_pretrained(tmp_path / "stock")
    assert torch.equal(made.state_dict()[TABLE], stock.state_dict()[TABLE] / 2)
    assert same(made, stock)
    made.save_pretrained(tmp_path / "again")  # as it is: saving does not undo the conversion
    again = GPT2Model.from_pretrained(tmp_path / "again")
    assert torch.equal(again.state_dict()[TABLE], made.state_dict()[TABLE])


def test_posswap_loaded(stock: Any, tmp_path: Path) -> None:
    stock.wpe.requires_grad_(False)
    stock.save_pretrained(tmp_path)
    assert Plain.from_pretrained(tmp_path).wpe.weight.requires_grad  # which is what the hook is for
    made = Hooked.from_pretrained(tmp_path)
    assert [name for name, held in made.named_parameters() if not held.requires_grad] == [TABLE]


def test_hooks_that_nobody_overrides_change_nothing(stock: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    built = Plain(TINY)
    stock.save_pretrained(tmp_path)
    loaded, filled = Plain.from_pretrained(tmp_path), Plain(TINY)
    filled.load_state_dict(stock.state_dict())
    for one in (built, loaded, filled):
        assert same(one, stock)
        assert torch.equal(one.state_dict()[TABLE], stock.state_dict()[TABLE])


def test_ignored_on_load_is_what_loading_leaves_out_without_a_word() -> None:
    model = GPT2Model(TINY)
    assert any("attn.bias" in pattern for pattern in ignored_on_load(model))
    assert ignored_on_load(nn.Module.__new__(Plain)) == ignored_on_load(model)


def test_ignore_on_load_is_for_one_model_alone() -> None:
    model, other = GPT2Model(TINY), GPT2Model(TINY)
    before = ignored_on_load(other)
    ignore_on_load(model, ["nothing"])
    assert (ignored_on_load(model), ignored_on_load(other)) == (["nothing"], before)
