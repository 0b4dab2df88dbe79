"""An encoder is compared by masked tokens and retrieval, and never by the loss of a next token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, PreTrainedModel

from hf_posswap.comparison import EvalSettings, evaluate
from hf_posswap.evaluation.masked import mask_groups, masked_losses

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.'?,"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
TOKENIZER = BertTokenizer(vocab={word: number for number, word in enumerate(VOCABULARY)})
TEXTS = [f"text {number} says {number**3} and {number**5} and more of it " * 6 for number in range(3, 12)]


def bert() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=64, initializer_range=0.3, **shape)
    return BertForMaskedLM(config).eval()


def test_masked_tokens_and_retrieval_by_length() -> None:
    model = bert()
    settings = EvalSettings(lengths=(64, 128), metrics=("mlm_pos", "pseudo_ppl", "ppl_prefix", "cost"))
    run = evaluate(model, "rope", documents=TEXTS, tokenizer=TOKENIZER, settings=settings)
    native, rope = run.results["models"].values()
    assert native["cannot_run"] == {"128": "ends at 64 tokens"}
    assert [row["length"] for row in rope["mlm_pos"]["lengths"]] == [64, 128]
    ids = [np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"][:62]) for text in TEXTS]
    own = np.stack([masked_losses(model, TOKENIZER, row, mask_groups(62)) for row in ids])
    assert native["mlm_pos"]["lengths"][0]["perplexity"] == pytest.approx(math.exp(own.mean()), rel=1e-5)
    assert native["pseudo_ppl"][0]["tokens"] == 9 * 62
    assert "sees both sides of a token: this metric is for causal models" in rope["not_measured"]["ppl_prefix"]
    assert "cost" in rope["not_measured"]
    assert "| ■ BertForMaskedLM+rope | " in str(run)


def test_the_metrics_of_an_encoder_are_chosen_for_it() -> None:
    settings = EvalSettings(lengths=(64, 128), documents=2)
    results = evaluate(bert(), "alibi", documents=TEXTS, tokenizer=TOKENIZER, settings=settings).results
    assert results["metrics"] == ["mlm_pos", "retrieval"]
    native, alibi = results["models"].values()
    assert "no length holds a passkey document" in native["not_measured"]["retrieval"]
    assert [row["length"] for row in alibi["retrieval"]] == [128]
    assert alibi["retrieval"][0]["documents"] == 50
