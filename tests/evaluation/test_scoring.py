"""Losses equal the model's own, whatever the family does after its last hidden state, and in little memory.

What a model can run is what its plan declares, and what it then does.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_posswap
from hf_posswap import patch_model
from hf_posswap.compat.transformers_calls import cache_in
from hf_posswap.errors import DataError, NumericError, PositionRangeError, UnsupportedModelError, UnsupportedSwapError
from hf_posswap.evaluation import Scorer, attention_by_distance, embed, mask_groups, masked_losses, reach_of, token_nll
from hf_posswap.evaluation.cost import choose_prefill, forward_need, measure_cost
from hf_posswap.evaluation.scoring import apart_in_chunks
from hf_posswap.families.locating import family_of
from hf_posswap.schemes import schemes_for
from hf_posswap.testing.tiny import tiny_model

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
ROTARY = {**SHAPE, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": None}
CONFIGS = {
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, n_positions=64),
    "opt": OPTConfig(**SHAPE, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=16),
    "llama": LlamaConfig(**ROTARY),
    "gemma2 with soft-capped logits": Gemma2Config(**ROTARY, final_logit_softcapping=0.3),
    "granite with scaled logits": GraniteConfig(**ROTARY, logits_scaling=3.0),
    "cohere with scaled logits": CohereConfig(**SHAPE, intermediate_size=64, logit_scale=0.25),
}


def build(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # far from the uniform guess of a fresh model
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def gpt2() -> PreTrainedModel:
    return build(CONFIGS["gpt2"])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_the_mean_is_the_models_own_loss(name: str, chunk: int) -> None:
    model = build(CONFIGS[name])
    ids = torch.randint(3, 99, (2, 33))
    scorer = Scorer(model, chunk)
    assert scorer.chunked
    losses = scorer.nll(ids)
    assert losses.shape == (2, 32)
    assert losses.dtype == torch.float32
    with torch.no_grad():
        assert losses.mean().item() == pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-5)


def test_each_loss_is_minus_the_log_probability_of_its_token(gpt2: PreTrainedModel) -> None:
    ids = torch.randint(0, 99, (2, 20))
    with torch.no_grad():
        probabilities = gpt2(ids).logits.double().softmax(-1)
    losses = token_nll(gpt2, ids, chunk=6)
    for row in range(2):
        for t in range(19):
            assert losses[row, t].item() == pytest.approx(-math.log(probabilities[row, t, ids[row, t + 1]]), abs=1e-4)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal"])
def test_a_swapped_model_is_scored_as_it_runs(gpt2: PreTrainedModel, scheme: str) -> None:
    patch_model(gpt2, scheme, max_length=128)
    ids = torch.randint(0, 99, (1, 100))  # beyond the native table
    with torch.no_grad():
        assert token_nll(gpt2, ids).mean().item() == pytest.approx(gpt2(ids, labels=ids).loss.item(), abs=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_of_peft_are_scored_with_the_chunked_head(gpt2: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    patch_model(gpt2, "alibi")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    adapted = peft.get_peft_model(gpt2, config).eval()
    ids = torch.arange(1, 25)[None]
    scorer = Scorer(adapted, chunk=5)
    assert scorer.chunked
    with torch.no_grad():
        expected = adapted(ids, labels=ids).loss
    torch.testing.assert_close(scorer.nll(ids).mean(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2 with soft-capped logits"])
@pytest.mark.parametrize("prefill", [1, 7, 16, 40])
def test_reading_in_pieces_gives_the_same_losses(name: str, prefill: int) -> None:
    model, ids = build(CONFIGS[name]), torch.randint(3, 99, (2, 33))
    whole, pieces = Scorer(model), Scorer(model, prefill=prefill)
    torch.testing.assert_close(pieces.nll(ids), whole.nll(ids), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(pieces.last_logits(ids, 9), whole.last_logits(ids, 9), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal", "nope", "fire"])
def test_a_swapped_model_is_read_in_pieces_too(gpt2: PreTrainedModel, scheme: str) -> None:
    patch_model(gpt2, scheme, max_length=128)
    ids = torch.randint(0, 99, (1, 100))
    torch.testing.assert_close(Scorer(gpt2, prefill=32).nll(ids), token_nll(gpt2, ids), atol=2e-5, rtol=1e-5)


def test_what_was_read_before_changes_nothing() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    config = LlamaConfig(**ROTARY, max_position_embeddings=16, rope_parameters=rope)
    ids = torch.randint(3, 99, (1, 64))
    model = build(config)
    with torch.no_grad():
        wanted = model(ids[:, :40], labels=ids[:, :40]).loss.item()
    scorer = Scorer(build(config))
    scorer.nll(ids)  # stock dynamic NTK would keep these frequencies for the next text of 40 tokens
    assert scorer.nll(ids[:, :40]).mean().item() == pytest.approx(wanted, abs=1e-5)


def test_a_model_that_follows_the_total_length_is_not_read_in_pieces() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    model = build(LlamaConfig(**ROTARY, max_position_embeddings=16, rope_parameters=rope))
    with pytest.raises(DataError, match="by rope type dynamic its losses depend on the total length"):
        Scorer(model, prefill=8)


@pytest.mark.parametrize("scored", [1, 5, 32])
def test_the_last_tokens_alone(gpt2: PreTrainedModel, scored: int) -> None:
    ids, seen = torch.randint(0, 99, (3, 33)), []
    whole, scorer = token_nll(gpt2, ids), Scorer(gpt2, chunk=12)
    gpt2.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[:2]))
    torch.testing.assert_close(scorer.nll(ids, scored=scored), whole[:, -scored:], atol=1e-5, rtol=1e-5)
    assert sum(shape[1] for shape in seen) == scored  # the head ran on nothing else
    assert max(shape.numel() for shape in seen) <= 12
    with pytest.raises(DataError, match="of 33 tokens between 1 and 32 can be scored, got 33"):
        scorer.nll(ids, scored=33)


def test_a_text_can_start_at_any_position(gpt2: PreTrainedModel) -> None:
    ids = torch.randint(0, 99, (1, 20))
    with torch.no_grad():
        logits = gpt2(ids, position_ids=torch.arange(30, 50)[None]).logits[:, :-1]
    own = nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none")
    for prefill in (None, 8):
        torch.testing.assert_close(Scorer(gpt2, prefill=prefill).nll(ids, start=30)[0], own, atol=1e-5, rtol=1e-5)
    assert (token_nll(gpt2, ids)[0] - own).abs().max() > 1e-2


class Odd(GPT2LMHeadModel):
    """A model that does something of its own after its head."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.7
        return output


def test_a_model_with_an_unknown_end_is_scored_from_its_own_logits() -> None:
    torch.manual_seed(0)
    model = Odd(CONFIGS["gpt2"]).eval()
    ids = torch.randint(0, 99, (1, 12))
    scorer = Scorer(model)
    assert not scorer.chunked
    with torch.no_grad():
        own = nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert scorer.nll(ids).mean().item() == pytest.approx(own.item(), abs=1e-5)


def test_no_more_logits_than_a_chunk_are_ever_made(gpt2: PreTrainedModel) -> None:
    seen: list[int] = []
    scorer = Scorer(gpt2, chunk=8)
    gpt2.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    scorer.nll(torch.randint(0, 99, (1, 50)))
    assert seen == [8, 8, 8, 8, 8, 8, 1]


def test_last_logits_are_those_that_predict_the_last_tokens(gpt2: PreTrainedModel) -> None:
    ids = torch.randint(0, 99, (1, 15))
    with torch.no_grad():
        wanted = gpt2(ids).logits[:, -4:-1]
    torch.testing.assert_close(Scorer(gpt2).last_logits(ids, 3), wanted, atol=1e-5, rtol=1e-5)


def test_a_loss_without_a_perplexity_is_an_error(gpt2: PreTrainedModel) -> None:
    model = copy.deepcopy(gpt2)
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(1e6)
    with pytest.raises(NumericError, match=r"mean loss of 11 tokens is .* nats, too large for a perplexity; look for"):
        Scorer(model).nll(torch.randint(0, 99, (1, 12)))


def test_what_is_no_number_is_an_error(gpt2: PreTrainedModel) -> None:
    scorer = Scorer(gpt2)
    with torch.no_grad():
        gpt2.transformer.wpe.weight[0] = math.nan
    with pytest.raises(NumericError, match=r"GPT2LMHeadModel: the loss of token 1 is not finite; it is in float32"):
        scorer.nll(torch.randint(0, 99, (1, 12)))
    with pytest.raises(NumericError, match=r"logits at length 12 are not finite"):
        scorer.last_logits(torch.randint(0, 99, (1, 12)), 2)


def test_a_table_that_ends_a_missing_head_and_a_bad_chunk_are_errors(gpt2: PreTrainedModel) -> None:
    with pytest.raises(DataError, match="chunk is a number of tokens, at least 1, got 0"):
        Scorer(gpt2, chunk=0)
    with pytest.raises(DataError, match="prefill is a number of tokens, at least 1, got 0"):
        Scorer(gpt2, prefill=0)
    with pytest.raises(DataError, match="GPT2Model has no output head"):
        Scorer(GPT2Model(CONFIGS["gpt2"]))
    bert = BertForMaskedLM(BertConfig(**SHAPE, intermediate_size=64))
    with pytest.raises(DataError, match="BertForMaskedLM is bidirectional"):
        Scorer(bert)
    patch_model(bert, "rope")
    with pytest.raises(DataError, match="BertForMaskedLM is bidirectional"):
        Scorer(bert)
    gemma = patch_model(tiny_model("Gemma3ForCausalLM", meta=False), "alibi")
    gemma.config.use_bidirectional_attention = True  # after the swap, whose plan says that it is causal
    with pytest.raises(DataError, match="Gemma3ForCausalLM is bidirectional"):
        Scorer(gemma)
    patch_model(gpt2, "learned", max_length=80)
    with pytest.raises(PositionRangeError):
        token_nll(gpt2, torch.randint(0, 99, (1, 100)))


WINDOW, LONG = 16, 64
OPTIONS = {
    "longrope": {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0, 4.0]},
    "linear": {"factor": 4.0},
}


def llama(rope: dict[str, object] | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=WINDOW, initializer_range=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0} | (rope or {}),
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def swapped(scheme: str) -> PreTrainedModel | None:
    model = llama()
    try:
        hf_posswap.patch_model(model, scheme, max_length=LONG, **OPTIONS.get(scheme, {}))
    except (UnsupportedSwapError, hf_posswap.errors.SchemeError, hf_posswap.errors.OptionError):
        return None
    return model


def prefixes_agree(model: PreTrainedModel) -> bool:
    """Return whether the losses of a short text are those of its place in a long one."""
    ids = torch.randint(0, 50, (2, LONG))
    short = Scorer(model).nll(ids[:, :WINDOW])
    long = Scorer(model).nll(ids)[:, : WINDOW - 1]
    return bool((short - long).abs().max() < 1e-4)


@pytest.mark.parametrize("scheme", sorted(schemes_for("text")))
def test_the_plan_decides_and_the_model_does_as_it_says(scheme: str) -> None:
    model = swapped(scheme)
    if model is None:
        pytest.skip(f"{scheme} takes options, or no Llama")
    reach = reach_of(model)
    assert reach.prefix_consistent == model._posswap.plan.cached_equals_full
    assert (reach.window, reach.why) == (WINDOW, "the plan of its swap")
    assert prefixes_agree(model) == reach.prefix_consistent


def test_schemes_of_both_kinds_are_there() -> None:
    kinds = {reach_of(model).prefix_consistent for name in ("yarn", "dynamic") if (model := swapped(name))}
    assert kinds == {True, False}


def test_a_native_model_is_judged_by_its_rope_type() -> None:
    assert reach_of(llama()).prefix_consistent
    dynamic = reach_of(llama({"rope_type": "dynamic", "factor": 4.0}))
    assert (dynamic.prefix_consistent, dynamic.limit, dynamic.why) == (False, None, "rope type dynamic")


@pytest.mark.parametrize("one_list", [True, False])
def test_longrope_follows_the_length_by_its_two_lists_alone(one_list: bool) -> None:
    pairs = len(llama().model.rotary_emb.inv_freq)
    lists = {"short_factor": [2.0 if one_list else 1.0] * pairs, "long_factor": [2.0] * pairs}
    sizes = {"factor": 4.0, "original_max_position_embeddings": WINDOW}
    model = llama({"rope_type": "longrope"} | lists | sizes)
    assert reach_of(model).prefix_consistent == one_list == prefixes_agree(model)


def test_a_table_ends_and_a_longer_one_ends_later(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=WINDOW, n_embd=16, n_layer=1, n_head=2))
    assert reach_of(model).limit == WINDOW
    hf_posswap.patch_model(model, "learned", max_length=LONG)
    assert (reach_of(model).limit, reach_of(model).window) == (LONG, WINDOW)
    hf_posswap.save(model, tmp_path / "saved")
    again = reach_of(hf_posswap.load(tmp_path / "saved"))
    assert (again.limit, again.window) == (LONG, WINDOW)


def test_of_an_unknown_model_nothing_is_assumed() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    reach = reach_of(MambaForCausalLM(config))
    assert (reach.limit, reach.prefix_consistent, reach.why) == (None, False, "no family describes it")


# Types that end where no learned table does, differ between layers, keep states or no cache, or go wrong in chunks.
SPECIAL = (
    "bamba", "codegen", "ctrl", "gemma4_text", "gemma3n_text", "gptj", "moshi", "openai-gpt", "qwen3_5_text",
    "roformer", "xglm",
)  # fmt: skip
OTHERS = [
    pytest.param(name, marks=pytest.mark.exhaustive)
    for name in sorted(set(CONFIG_MAPPING) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(SPECIAL))
]


def described(kind: str) -> PreTrainedModel:
    """Return a tiny model of a type that has a family."""
    try:
        model = tiny_model(kind, meta=False)
        family_of(model.config)
    except UnsupportedModelError:
        pytest.skip(f"no family describes {kind}")
    except ImportError as error:
        pytest.skip(str(error))
    if not reach_of(model).causal:
        pytest.skip(f"{kind} is not causal")
    return model


def read(model: PreTrainedModel, length: int) -> torch.Tensor:
    words = min(60, model.config.get_text_config().vocab_size)
    return torch.randint(3, words, (1, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [*SPECIAL, *OTHERS])
def test_every_type_is_read_up_to_its_limit_and_its_sizes_are_known(kind: str) -> None:
    model = described(kind)
    reach = reach_of(model)
    losses = Scorer(model).nll(read(model, reach.window))
    assert losses.shape == (1, reach.window - 1)
    assert forward_need(model, 100).total > forward_need(model, 50).total
    longer = read(model, reach.window + 10)
    if reach.limit is None:
        assert bool(Scorer(model).nll(longer).isfinite().all())
        return
    assert reach.limit == reach.window
    with pytest.raises(PositionRangeError, match=f"ends at {reach.limit} tokens, and this text reaches"):
        Scorer(model).nll(longer)
    with pytest.raises((IndexError, RuntimeError)):  # so does the model itself
        model(longer)


@pytest.mark.parametrize("kind", [*SPECIAL, *OTHERS])
def test_every_type_is_read_in_chunks_only_where_that_changes_no_loss(kind: str) -> None:
    model = described(kind)
    length = min(100, reach_of(model).limit or 100)
    ids = read(model, length)
    whole = Scorer(model).nll(ids)
    if reach_of(model).prefix_consistent and apart_in_chunks(model, length // 4) is None:
        torch.testing.assert_close(Scorer(model, prefill=length // 4).nll(ids), whole, atol=2e-3, rtol=0)
        return
    assert choose_prefill(model, 1 << 20) is None
    with pytest.raises(DataError, match="cannot be read in chunks"):
        Scorer(model, prefill=length // 4)


def tensors_below(value: object, seen: set[int]) -> list[torch.Tensor]:
    """Return all tensors that can be reached from `value` through attributes, lists and dicts, each once."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    own = vars(value).values() if type(value).__module__.startswith("transformers.cache") else ()
    return [tensor for part in (*parts, *own) for tensor in tensors_below(part, seen)]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text", "granitemoehybrid", "falcon_h1", "mamba2"])
def test_the_cost_counts_every_tensor_of_a_cache(kind: str) -> None:
    model = tiny_model(kind, meta=False)
    ids = read(model, 16)
    cache = cache_in(model(ids, use_cache=True))
    assert measure_cost(model, ids, new_tokens=2).cache_bytes == sum(t.nbytes for t in tensors_below(cache, set())) > 0


def test_a_model_in_training_mode_is_measured_without_dropout_and_each_module_keeps_its_mode() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    ids = torch.arange(32)[None]
    expected, vectors = token_nll(model, ids), embed(model, [[1, 2, 3]])
    model.train()
    model.transformer.h[0].eval()  # as for a frozen block
    modes = {name: module.training for name, module in model.named_modules()}
    scorer = Scorer(model, prefill=16)
    assert scorer.chunked
    logits = scorer.logits(ids, 31)
    next(logits)
    assert model.training, "a caller that holds the generator trains on"
    state = torch.get_rng_state()
    assert torch.allclose(token_nll(model, ids), expected, atol=1e-6)
    assert torch.allclose(scorer.nll(ids), expected, atol=1e-5)
    assert torch.equal(embed(model, [[1, 2, 3]]), vectors)
    assert measure_cost(model, ids).length == 32
    attention_by_distance(model, ids.numpy())
    assert torch.equal(torch.get_rng_state(), state), "dropout would have drawn"
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_masked_model_in_training_mode_is_measured_without_dropout() -> None:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    model = BertForMaskedLM(BertConfig(vocab_size=7, **shape)).train()
    losses = [masked_losses(model, tokenizer, np.array([5, 6, 5]), mask_groups(3, share=0.0)) for _ in range(2)]
    assert np.array_equal(*losses)
    assert all(module.training for module in model.modules())
