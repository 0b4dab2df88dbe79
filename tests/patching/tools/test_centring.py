"""The mean of a position table, moved into the token embeddings: outputs stay, and a swap takes positions alone."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BioGptConfig, BioGptForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from hf_posswap import centre_table, patch_model
from hf_posswap.errors import AlreadyPatchedError, UnsupportedSwapError
from hf_posswap.families.locating import locate
from hf_posswap.testing.tiny import tiny_model
from tests.contract.models import FIRST_WORD, LENGTH, TINY, VOCABULARY, build

TABLES = ("gpt2", "opt", "bert", "roberta", "DistilBertForMaskedLM", "ElectraForMaskedLM", "AlbertForMaskedLM")


def made(name: str) -> PreTrainedModel:
    """Return a tiny model whose table's rows have something in common."""
    model = build(name) if name in TINY else tiny_model(name, meta=False)
    table = table_of(model)
    with torch.no_grad():
        table += 3.0 * torch.randn(table.shape[1], generator=torch.Generator().manual_seed(2))
    return model.eval()


def table_of(model: PreTrainedModel) -> torch.Tensor:
    path = locate(model).table_path
    assert path is not None
    return model.get_submodule(path).weight


def probabilities(model: PreTrainedModel) -> torch.Tensor:
    length, top = locate(model).geometry.original_length, model.get_input_embeddings().weight.shape[0]
    words = torch.randint(FIRST_WORD, top, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=words).logits.double().softmax(dim=-1)


@pytest.mark.parametrize("name", TABLES)
def test_probabilities_stay_and_the_table_has_no_mean(name: str) -> None:
    model = made(name)
    before = probabilities(model)
    mean = centre_table(model)
    assert mean.abs().max() > 1.0
    torch.testing.assert_close(probabilities(model), before, atol=1e-5, rtol=1e-4)
    assert centre_table(model).abs().max() < 1e-5  # there is none left


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_nope_afterwards_is_the_model_with_its_mean_at_every_position(name: str) -> None:
    model = made(name)
    levelled = copy.deepcopy(model)
    table, first = table_of(levelled), locate(levelled).stacks[0].table_offset
    with torch.no_grad():
        table[first:] = table[first:].mean(dim=0)
    centre_table(model)
    patch_model(model, "nope")
    torch.testing.assert_close(probabilities(model), probabilities(levelled), atol=1e-5, rtol=1e-4)


def test_centring_under_scaled_token_embeddings_changes_no_prediction() -> None:
    config = BioGptConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=LENGTH, scale_embedding=True, tie_word_embeddings=False,
    )  # fmt: skip
    model = BioGptForCausalLM(config).eval()
    assert model.get_input_embeddings().embed_scale == 8.0
    before = probabilities(model)
    centre_table(model)
    torch.testing.assert_close(probabilities(model), before, atol=1e-5, rtol=1e-4)


def test_a_sum_that_is_not_one_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("gpt2")
    state = copy.deepcopy(model.state_dict())
    model.get_input_embeddings().register_forward_hook(lambda module, given, found: 2.0 * found)
    with pytest.raises(UnsupportedSwapError, match="are not simply added. The model is unchanged."):
        centre_table(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("llama"), "needs a position table in checkpoints, and LlamaForCausalLM has none"),
        (lambda: tiny_model("T5ForConditionalGeneration", meta=False), "T5ForConditionalGeneration has several stacks"),
        (lambda: build("gpt2").to(torch.bfloat16), "has torch.bfloat16 on cpu. Load it with dtype=torch.float32."),
        (lambda: build("gpt2").to("meta"), "has torch.float32 on meta."),
        (
            lambda: OPTForCausalLM(
                OPTConfig(
                    vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=16, num_hidden_layers=1,
                    num_attention_heads=2, ffn_dim=16, max_position_embeddings=LENGTH,
                )
            ),
            "is 32 wide and its token embeddings 16: they are not added to each other.",
        ),
    ],
)  # fmt: skip
def test_other_models_are_refused(make: object, message: str) -> None:
    with pytest.raises(UnsupportedSwapError, match=message):
        centre_table(make())  # type: ignore[operator]


def test_before_the_swap_or_not_at_all() -> None:
    model = build("gpt2")
    patch_model(model, "rope")
    with pytest.raises(AlreadyPatchedError, match="call centre_table before patch_model"):
        centre_table(model)
