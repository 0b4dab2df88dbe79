"""`swap.centre`: the mean of the table goes into the token embeddings before the swap, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_posswap
from hf_posswap.errors import ConfigError, UnsupportedSwapError
from hf_posswap.training import byte_tokenizer
from tests.training.engine_runs import assert_same_weights, recipe, trained, write_model


def write_shifted(folder: Path) -> Path:
    """Write a GPT-2 whose table's rows have something in common."""
    write_model(folder)
    model = hf_posswap.load(folder)
    with torch.no_grad():
        model.transformer.wpe.weight += torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(3))
    return hf_posswap.save(model, folder, tokenizer=byte_tokenizer(), overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["next-token", "distill"])
def test_it_is_the_training_of_a_centred_checkpoint(tmp_path: Path, kind: str) -> None:
    by_hand, by_recipe = tmp_path / "by-hand", tmp_path / "by-recipe"
    for place in (by_hand, by_recipe):
        place.mkdir()
        write_shifted(place / "gpt2")
    model = hf_posswap.load(by_hand / "gpt2")
    hf_posswap.centre_table(model)
    hf_posswap.save(model, by_hand / "gpt2", tokenizer=byte_tokenizer(), overwrite=True)
    said = trained(by_recipe, "swap.centre=true", f"objective.kind={kind}")
    assert_same_weights(said, trained(by_hand, f"objective.kind={kind}"))
    assert any("the table's mean, of norm" in line for line in said.report["phases"][0]["gates"])


def test_there_must_be_a_swap_and_a_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="swap.centre: needs a swap, and swap.scheme is none."):
        recipe(tmp_path, "swap.scheme=null", "swap.max_length=null", "swap.centre=true")
    with pytest.raises(
        UnsupportedSwapError, match="swap.centre: .*LlamaForCausalLM has none: there is no mean.*Or swap.centre="
    ):
        trained(tmp_path, "swap.centre=true", kind="llama")


def test_adapters_do_not_hold_what_it_changes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="swap.centre: it changes the base's own token embeddings, which adapters do"):
        recipe(tmp_path, "swap.centre=true", "peft.r=2")
