"""An encoder is compared by masked tokens and retrieval, and never by the loss of a next token."""

from __future__ import annotations

import copy
import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    EuroBertConfig,
    EuroBertForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaTokenizer,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from hf_posswap import patched, plan_swap
from hf_posswap.checkpoints.run_artifacts import evaluation, read_results
from hf_posswap.comparison import Candidate, EvalSettings, compare, evaluate
from hf_posswap.comparison.report import render_html
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
    assert "is bidirectional: this metric is for causal models" in rope["not_measured"]["ppl_prefix"]
    assert "cost" in rope["not_measured"]
    assert "| ◆ BertForMaskedLM+rope | " in str(run)


def test_retrieval_is_measured_anew_with_a_tokenizer_that_spells_keys_otherwise(tmp_path: Path) -> None:
    reversed_digits = str.maketrans("0123456789", "9876543210")
    other = BertTokenizer(vocab={word.translate(reversed_digits): n for n, word in enumerate(VOCABULARY)})
    settings = EvalSettings(lengths=(64, 128), metrics=("retrieval",))
    found = [
        evaluate(bert(), "rope", documents=TEXTS, tokenizer=tokenizer, settings=settings, out=tmp_path / folder)
        for tokenizer, folder in ((TOKENIZER, "one"), (other, "one"), (other, "two"))
    ]
    first, again, fresh = (run.results["models"]["BertForMaskedLM+rope"]["retrieval"] for run in found)
    assert again == fresh != first


def test_an_encoder_decoder_is_measured_by_its_encoder() -> None:
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    whole = T5ForConditionalGeneration(T5Config(vocab_size=len(VOCABULARY), **shape)).eval()
    encoder = T5EncoderModel(copy.deepcopy(whole.config)).eval()
    encoder.load_state_dict(whole.state_dict(), strict=False)
    how: dict[str, Any] = {"documents": TEXTS, "tokenizer": TOKENIZER, "lengths": [64, 128]}
    expected, found = (list(evaluate(m, "rope", **how).results["models"].values()) for m in (encoder, whole))
    for alone, inside in zip(expected, found, strict=True):
        assert inside["retrieval"] == alone["retrieval"]
        assert inside.get("vectors") == alone.get("vectors")
        assert "it is not a masked language model" in inside["not_measured"]["mlm_pos"]
    assert found[1]["vectors"][0]["cosine"] < 0.999
    (native, _) = evaluate(whole, "rope", metrics="ppl_prefix", **how).results["models"].values()
    assert "has an encoder: this metric is for causal models" in native["not_measured"]["ppl_prefix"]


def test_the_metrics_of_an_encoder_are_chosen_for_it() -> None:
    settings = EvalSettings(lengths=(64, 128), documents=2)
    results = evaluate(bert(), "alibi", documents=TEXTS, tokenizer=TOKENIZER, settings=settings).results
    assert results["metrics"] == ["mlm_pos", "retrieval", "vectors"]
    native, alibi = results["models"].values()
    assert "no length holds a passkey document" in native["not_measured"]["retrieval"]
    assert [row["length"] for row in alibi["retrieval"]] == [128]
    assert alibi["retrieval"][0]["documents"] == 50


def test_a_rotary_base_reads_what_its_window_holds_too() -> None:
    """It runs beyond its window, on which its vectors are no reference."""
    config = EuroBertConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3, mask_token_id=4,
    )  # fmt: skip
    model = EuroBertForMaskedLM(config).eval()
    settings = EvalSettings(lengths=(32, 128), metrics=("vectors",))
    run = evaluate(model, "ntk:factor=4", documents=TEXTS, tokenizer=TOKENIZER, settings=settings)
    rows = list(run.results["models"].values())[1]["vectors"]
    assert [(row["length"], row["base_reads"]) for row in rows] == [(32, 32), (128, 64)]


def test_vectors_are_held_against_those_of_the_base_by_length() -> None:
    """As transformers computes them: of the base on what its window holds, of the swapped model on all of it."""
    model = bert()
    settings = EvalSettings(lengths=(32, 64, 128), metrics=("vectors",))
    run = evaluate(model, "alibi", documents=TEXTS, tokenizer=TOKENIZER, settings=settings)
    native, rows = (found.get("vectors") for found in run.results["models"].values())
    assert native is None
    assert [(row["length"], row["base_reads"]) for row in rows] == [(32, 32), (64, 64), (128, 64)]
    with patched(bert(), "alibi", max_length=128) as swapped, torch.no_grad():
        for row in rows:
            cosines = []
            for text in TEXTS:
                ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
                new, old = (
                    one.bert(torch.tensor([[2, *ids[: length - 2], 3]])).last_hidden_state.mean(1)
                    for one, length in ((swapped, row["length"]), (model, row["base_reads"]))
                )
                cosines.append(float(torch.cosine_similarity(new, old)))
            assert row["cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)
            assert row["low"] <= row["cosine"] <= row["high"] <= 1 + 1e-6
            assert row["documents"] == len(TEXTS)
    page = render_html(run.results)
    assert all(
        f"{row['cosine']:.3f} ({row['low']:.3f} to {row['high']:.3f}) at {row['length']}" in page for row in rows
    )
    assert f"32: {rows[0]['cosine']:.3f}, 64: {rows[1]['cosine']:.3f}, 128: {rows[2]['cosine']:.3f}" in str(run)


def test_the_start_token_of_an_encoder_is_around_its_text_and_not_in_it() -> None:
    """RoBERTa's tokenizer has one, which it puts around texts already."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    tokenizer = RobertaTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    config = RobertaConfig(vocab_size=len(words), max_position_embeddings=66, initializer_range=0.3, **shape)
    model = RobertaForMaskedLM(config).eval()
    settings = EvalSettings(lengths=(64,), metrics=("mlm_pos", "vectors"))
    candidates = [Candidate(model, name="base"), Candidate(model, "alibi", name="alibi")]
    found = compare(candidates, documents=TEXTS, tokenizer=tokenizer, settings=settings).results["models"]
    texts = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"][:62]) for text in TEXTS]
    losses = np.stack([masked_losses(model, tokenizer, text, mask_groups(62)) for text in texts])
    assert found["base"]["mlm_pos"]["lengths"][0]["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    with patched(copy.deepcopy(model), "alibi") as swapped, torch.no_grad():
        ids = torch.tensor([[0, *text, 2] for text in texts])
        new, old = (one.roberta(ids).last_hidden_state.mean(1) for one in (swapped, model))
    cosine = float(torch.cosine_similarity(new, old).mean())
    assert found["alibi"]["vectors"][0]["cosine"] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_loss_by_position_counts_the_special_tokens_before_a_text(before: int) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    frame = TemplateProcessing(single="[CLS] " * before + "$A", special_tokens=[("[CLS]", tokenizer.cls_token_id)])
    tokenizer.backend_tokenizer.post_processor = frame
    settings = EvalSettings(lengths=(32,), metrics=("mlm_pos",))
    found = compare([bert()], documents=TEXTS, tokenizer=tokenizer, settings=settings).results["models"]
    losses: dict[int, list[float]] = {}
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"][:32]])
        for group in mask_groups(32 - before):
            masked = ids.clone()
            masked[0, group + before] = tokenizer.mask_token_id
            with torch.no_grad():
                row = bert()(masked).logits.log_softmax(-1)[0]
            for position in (group + before).tolist():
                losses.setdefault(position, []).append(-float(row[position, ids[0, position]]))
    (result,) = (model["mlm_pos"]["positions"] for model in found.values())
    assert [row["start"] for row in result] == [1, 2, 4, 8, 16][max(0, before - 1) :]
    for row in result:
        bucket = [loss for position in range(row["start"], row["stop"]) for loss in losses[position]]
        assert row["loss"] == pytest.approx(sum(bucket) / len(bucket), rel=1e-5)


def test_an_encoder_is_as_near_to_itself_as_can_be() -> None:
    settings = EvalSettings(lengths=(32, 64), metrics=("vectors",))
    candidates = [Candidate(bert(), name="one"), Candidate(bert(), name="same")]
    same = compare(candidates, documents=TEXTS, tokenizer=TOKENIZER, settings=settings).results["models"]["same"]
    assert [row["cosine"] for row in same["vectors"]] == pytest.approx([1.0, 1.0], abs=1e-6)


def test_the_curves_of_an_encoder_are_in_their_file(tmp_path: Path) -> None:
    settings = EvalSettings(lengths=(32, 128), metrics=("mlm_pos",))
    found = evaluate(bert(), "alibi", documents=TEXTS, tokenizer=TOKENIZER, settings=settings, out=tmp_path).results
    with (tmp_path / "curves.csv").open(newline="") as file:
        rows = [
            (row["model"], row["metric"], int(row["to_token"]), float(row["value"])) for row in csv.DictReader(file)
        ]
    for name, model in found["models"].items():
        curves = [(name, "perplexity", row["length"], row["perplexity"]) for row in model["mlm_pos"]["lengths"]]
        curves += [(name, "loss", row["stop"], row["loss"]) for row in model["mlm_pos"]["positions"]]
        assert [row for row in rows if row[0] == name] == curves


def test_the_card_of_an_encoder_has_its_perplexities_and_how_near_it_is() -> None:
    settings = EvalSettings(lengths=(32, 128), metrics=("mlm_pos", "vectors"))
    found = evaluate(bert(), "alibi", documents=TEXTS, tokenizer=TOKENIZER, settings=settings).results
    plan = plan_swap(bert(), "alibi")
    text, entries = evaluation(read_results(found), plan, None, "fill-mask")
    model = found["models"]["BertForMaskedLM+alibi"]
    assert [entry.metric_value for entry in entries] == [row["perplexity"] for row in model["mlm_pos"]["lengths"]]
    assert all(f"{row['cosine']:.3f} at {row['length']} tokens" in text for row in model["vectors"])
