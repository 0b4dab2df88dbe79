"""ctx_gain, short_reg, offset_probe, eff_len and longppl against loops over transformers' own losses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_posswap import patch_model
from hf_posswap.errors import DataError, NumericError, PositionRangeError
from hf_posswap.evaluation import Scorer
from hf_posswap.evaluation.ctx_gain import context_gain, context_losses, contexts_of
from hf_posswap.evaluation.longppl import KeySpans, find_key_spans, long_perplexity
from hf_posswap.evaluation.offset_probe import offset_change, offset_losses, offsets_of
from hf_posswap.evaluation.passkey import effective_length
from hf_posswap.evaluation.short_reg import compare_short, short_regression
from hf_posswap.evaluation.statistics import wilson_interval

WINDOW = 32


def gpt2(scheme: str | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=WINDOW, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    if scheme is not None:
        patch_model(model, scheme, max_length=8 * WINDOW)
    return model


def documents(count: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50, (count, length))


def own_losses(model: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    row = torch.from_numpy(ids)[None]
    with torch.no_grad():
        return functional.cross_entropy(model(row).logits[0, :-1].double(), row[0, 1:], reduction="none")


def test_the_tail_is_read_with_each_context_from_position_0() -> None:
    model, document = gpt2("rope"), documents(1, 100)[0]
    contexts, tail = contexts_of(WINDOW, 100)
    assert (contexts, tail) == ([2, 4, 8, 16, 32, 64, 84], 16)
    found = context_losses(Scorer(model), document, contexts, tail)
    for context, value in zip(contexts, found, strict=True):
        assert value == pytest.approx(own_losses(model, document[-context - tail :])[-tail:].sum().item(), rel=1e-5)
    with pytest.raises(DataError, match="do not fit 100 tokens"):
        context_losses(Scorer(model), document, [85], tail)


def test_gains_are_paired_differences_from_the_reference() -> None:
    random = np.random.default_rng(0)
    levels = random.normal(40.0, 10.0, (30, 1))  # documents differ by far more than contexts do
    losses = levels + np.array([4.0, 0.0, -2.0]) + random.normal(0.0, 0.1, (30, 3))
    worse, reference, better = context_gain(losses, [8, 16, 32], 10, reference=16)
    assert (reference.gain, reference.low, reference.high, reference.reference) == (0.0, 0.0, 0.0, True)
    assert better.gain == pytest.approx((losses[:, 1] - losses[:, 2]).mean() / 10)
    assert 0.19 < better.low < better.gain < better.high < 0.21
    assert worse.high < -0.39
    with pytest.raises(DataError, match="do not hold the reference 64"):
        context_gain(losses, [8, 16, 32], 10, reference=64)
    with pytest.raises(DataError, match="tail 40, window 32, 100"):
        contexts_of(32, 100, tail=40)


def test_short_regression_is_loss_divergence_and_agreement_of_the_full_distributions() -> None:
    base, swapped, ids = gpt2(), gpt2("rope"), documents(9, WINDOW)
    found = [compare_short(Scorer(base, chunk=7), Scorer(swapped, chunk=7), row) for row in ids]
    rows = torch.from_numpy(ids)
    with torch.no_grad():
        p, q = (model(rows).logits[:, :-1].double().log_softmax(-1) for model in (base, swapped))
    result = short_regression(found)
    divergence = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
    assert result.divergence == pytest.approx(divergence.item(), rel=1e-4)
    assert result.agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    losses = [-log.gather(-1, rows[:, 1:, None]).mean().item() for log in (p, q)]
    assert result.loss.difference == pytest.approx(losses[1] - losses[0], abs=1e-5)
    assert result.loss.documents == 9
    assert result.divergence > 0.01


def test_models_that_cannot_be_compared_are_refused() -> None:
    other = GPT2LMHeadModel(GPT2Config(vocab_size=51, n_positions=WINDOW, n_embd=32, n_layer=1, n_head=4)).eval()
    with pytest.raises(DataError, match="different vocabularies: 50 and 51 tokens"):
        compare_short(Scorer(gpt2()), Scorer(other), documents(1, WINDOW)[0])
    scorer = Scorer(broken := gpt2())
    with torch.no_grad():
        broken.transformer.wpe.weight[3] = torch.nan
    with pytest.raises(NumericError, match="not finite within the original window"):
        compare_short(Scorer(gpt2()), scorer, documents(1, WINDOW)[0])


@pytest.mark.parametrize("scheme", ["rope", "alibi", "nope"])
def test_where_only_distances_matter_an_offset_changes_nothing(scheme: str) -> None:
    scorer, passages = Scorer(gpt2(scheme)), documents(3, 20)
    offsets = offsets_of(WINDOW)
    assert offsets == [0, 16, 32, 64, 128]
    losses = np.stack([offset_losses(scorer, passage, offsets) for passage in passages])
    assert max(abs(score.change) for score in offset_change(losses, offsets, 19)) < 1e-4


def test_where_positions_matter_an_offset_shows() -> None:
    model, passage = gpt2("sinusoidal"), documents(1, 20)[0]
    losses = offset_losses(Scorer(model), passage, [0, 64])
    ids = torch.from_numpy(passage)[None]
    with torch.no_grad():
        logits = model(ids, position_ids=torch.arange(64, 84)[None]).logits[0, :-1]
    assert losses[1] == pytest.approx(functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item(), rel=1e-5)
    assert abs(losses[1] - losses[0]) > 0.1
    scores = offset_change(losses[None], [0, 64], 19)
    assert scores[1].change == pytest.approx((losses[1] - losses[0]) / 19)


def test_offsets_that_cannot_be_taken_are_refused() -> None:
    with pytest.raises(PositionRangeError):
        offset_losses(Scorer(gpt2("learned")), documents(1, 20)[0], [8 * WINDOW])
    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(DataError, match="BloomForCausalLM takes no position_ids"):
        offset_losses(Scorer(bloom), documents(1, 20)[0], [0])
    with pytest.raises(DataError, match="positions of at least 0"):
        offset_losses(Scorer(gpt2("rope")), documents(1, 20)[0], [-1])
    with pytest.raises(DataError, match="a column for each of 3 offsets"):
        offset_change(np.ones((2, 2)), [0, 1, 2], 19)


def test_the_effective_length_ends_before_the_first_length_that_falls_short() -> None:
    answers = {128: (50, 50), 256: (48, 50), 512: (30, 50), 1024: (50, 50)}
    assert wilson_interval(48, 50)[0] >= 0.85
    found = effective_length(answers)
    assert (found.length, found.base, found.bar, found.no_verdict) == (256, 1.0, 0.85, None)  # 1024 is beyond a fall
    assert effective_length({128: (25, 50), 256: (50, 50)}).length == 256  # its own standard, half right
    assert effective_length({128: (0, 50), 256: (40, 50), 512: (20, 50)}, base_length=256).length == 256
    alike = effective_length({length: (40, 50) for length in (128, 256, 512)})  # it does not degrade
    assert (alike.length, alike.no_verdict) == (
        None,
        "50 questions per length cannot show 85 % of 80 %: ask at least 52.",
    )
    assert "no answer was right at the base length of 128" in str(effective_length({128: (0, 50)}).no_verdict)
    assert "ask at least 22" in str(effective_length({128: (10, 10)}).no_verdict)
    with pytest.raises(DataError, match=r"base length 64, got \[128\]"):
        effective_length({128: (1, 2)}, base_length=64)


@pytest.mark.slow
def test_key_tokens_are_what_the_whole_text_tells_and_a_part_does_not() -> None:
    model, ids = gpt2("rope"), list(documents(3, 90))
    found = find_key_spans(Scorer(model), "tiny", ids, short=24, stride=8, gain=0.05, limit=5.0)
    keys = 0
    for document, mask in zip(ids, found.masks(ids), strict=True):
        whole = own_losses(model, document)
        for t in range(1, 90):
            stop = 24 if t < 24 else min(90, 24 + 8 * ((t - 24) // 8 + 1))  # of the window that scores t first
            start = 0 if t < 24 else stop - 24 if stop < 90 else 24 + 8 * ((t - 24) // 8 + 1) - 24
            short = own_losses(model, document[start:stop])[t - start - 1]
            is_key = short - whole[t - 1] > 0.05 and whole[t - 1] < 5.0
            assert mask[t - 1] == bool(is_key)
            keys += bool(is_key)
    assert keys > 3
    losses = [own_losses(model, document).numpy() for document in ids]
    value, count = long_perplexity(losses, found.masks(ids))
    chosen = np.concatenate([part[mask] for part, mask in zip(losses, found.masks(ids), strict=True)])
    assert (value, count) == (pytest.approx(np.exp(chosen.mean())), keys)


def test_key_spans_are_kept_with_their_evaluator_and_their_documents(tmp_path: Path) -> None:
    ids = list(documents(2, 40))
    spans = find_key_spans(Scorer(gpt2("rope")), "tiny", ids, short=16, stride=4, gain=0.05, limit=9.0)
    assert any(spans.spans)
    spans.save(tmp_path / "keys.json")
    assert KeySpans.load(tmp_path / "keys.json") == spans
    other = copy.deepcopy(ids)
    other[1][3] = (other[1][3] + 1) % 50
    with pytest.raises(DataError, match="evaluator 'tiny' belong to 2 other documents"):
        spans.masks(other)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match=r"other.json holds no key spans of version 1"):
        KeySpans.load(tmp_path / "other.json")
    with pytest.raises(DataError, match="longer than the short context of 40, got one of 40"):
        find_key_spans(Scorer(gpt2("rope")), "tiny", ids, short=40)
    with pytest.raises(DataError, match="the evaluator found none"):
        long_perplexity([np.ones(3)], [np.zeros(3, bool)])


@pytest.mark.parametrize(
    "spans", [3, [3], [[3]], [[[1]]], [[[1, "2"]]], [[[2, 1]]], [[[-1, 2]]], [[], []], [[[1, 2.5]]]]
)
def test_edited_key_spans_are_refused(tmp_path: Path, spans: Any) -> None:
    path = tmp_path / "keys.json"
    KeySpans("tiny", 4, 2, 2.0, 2.0, ("0" * 16,), (((1, 2),),)).save(path)
    assert KeySpans.load(path).spans == (((1, 2),),)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"spans": spans}))
    with pytest.raises(DataError, match="keys.json holds .*spans.*find them again"):
        KeySpans.load(path)
