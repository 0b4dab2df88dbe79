"""What the studies measure, against the models' own losses on the same tokens, and what they conclude from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hf_posswap
from hf_posswap.comparison import EvalDocuments
from hf_posswap.evaluation import RunStore, mask_groups
from hf_posswap.training import byte_tokenizer
from recipes.studies.effects import compared
from recipes.studies.measuring import LAST, LAST_ALONE, WINDOW, Means, Texts, difference, document_means
from tests.training.tiny_models import VOCABULARY, tiny

WINDOW_TOKENS, COUNT, PIECES = 16, 3, 2


def texts(tokenizer: Any = None) -> Texts:
    """Return random documents of two pieces of eight windows each."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (COUNT, PIECES * 8 * WINDOW_TOKENS)).astype(np.int32)
    documents = EvalDocuments("random", tuple(map(str, range(COUNT))), tokens)
    return Texts(documents, WINDOW_TOKENS, tokenizer or byte_tokenizer())


def means_of(model: Any, read: Texts, teacher: Any = None) -> Means:
    with RunStore(None) as store:
        return document_means(model, read, store, teacher)


def own_loss(model: Any, rows: np.ndarray, skip: int = 0) -> float:
    """Return the mean loss of the tokens of `rows` after the first `skip`, as transformers computes it."""
    ids = torch.from_numpy(rows.astype(np.int64))
    labels = ids.clone()
    labels[:, :skip] = -100
    with torch.no_grad():
        return float(model(input_ids=ids, labels=labels).loss)


def test_a_causal_model_loses_what_transformers_says() -> None:
    model, read = tiny("gpt2", n_positions=WINDOW_TOKENS), texts()
    assert set(means_of(model, read)) == {WINDOW, "1"}  # it ends at its table
    hf_posswap.patch_model(model, "rope", max_length=8 * WINDOW_TOKENS)
    found = means_of(model, read)
    for number, document in enumerate(read.documents.tokens):
        pieces = document.reshape(PIECES, -1)
        for windows in (1, 2, 4, 8):
            wanted = own_loss(model, pieces[:, : windows * WINDOW_TOKENS])
            assert found[str(windows)][number] == pytest.approx(wanted, abs=1e-5)
        assert found[WINDOW][number] == pytest.approx(own_loss(model, document.reshape(-1, WINDOW_TOKENS)), abs=1e-5)
        alone = own_loss(model, pieces[:, -WINDOW_TOKENS:])
        assert found[LAST_ALONE][number] == pytest.approx(alone, abs=1e-5)
        after = own_loss(model, pieces, skip=1 + 7 * WINDOW_TOKENS)
        assert found[LAST][number] == pytest.approx(after, abs=1e-5)


def encoder_texts() -> Texts:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    return texts(tokenizer)


def test_an_encoder_loses_what_transformers_says_of_the_masked_tokens() -> None:
    model, read = tiny("bert", max_position_embeddings=WINDOW_TOKENS), encoder_texts()
    found = means_of(model, read)
    assert set(found) == {WINDOW, "1"}
    groups = mask_groups(WINDOW_TOKENS)[:2]
    for number, document in enumerate(read.documents.tokens):
        losses = [_masked_loss(model, row, groups, read) for row in document.reshape(-1, WINDOW_TOKENS)]
        assert found[WINDOW][number] == pytest.approx(np.concatenate(losses).mean(), abs=1e-5)


def _masked_loss(model: Any, row: np.ndarray, groups: list[np.ndarray], read: Texts) -> np.ndarray:
    losses = []
    for group in groups:
        ids = torch.from_numpy(row.astype(np.int64))[None]
        wanted = ids[0, group].clone()
        ids[0, group] = read.tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, group]
        losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none").numpy())
    return np.concatenate(losses)


def test_an_encoder_is_held_against_its_teacher() -> None:
    teacher, read = tiny("bert", max_position_embeddings=WINDOW_TOKENS), encoder_texts()
    same = means_of(tiny("bert", max_position_embeddings=WINDOW_TOKENS), read, teacher)
    assert np.abs(same[WINDOW]).max() < 1e-6
    model = tiny("bert", max_position_embeddings=WINDOW_TOKENS)
    hf_posswap.patch_model(model, "rope", max_length=8 * WINDOW_TOKENS)
    found = means_of(model, read, teacher)
    document = torch.from_numpy(read.documents.tokens[1].astype(np.int64)).reshape(PIECES, -1)

    def pooled(encoder: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(encoder.bert(input_ids=ids).last_hidden_state.mean(1), dim=-1)

    with torch.no_grad():
        wanted = sum(pooled(teacher, part) for part in document[:, : 2 * WINDOW_TOKENS].split(WINDOW_TOKENS, dim=1))
        ours = pooled(model, document[:, : 2 * WINDOW_TOKENS])
        distance = 1 - torch.nn.functional.cosine_similarity(ours, wanted, dim=-1)
    assert found["2"][1] == pytest.approx(float(distance.mean()), abs=1e-5)


def test_what_was_measured_is_found_again(tmp_path: Any) -> None:
    model, read = tiny("gpt2", n_positions=WINDOW_TOKENS), texts()
    with RunStore(tmp_path) as store:
        first = document_means(model, read, store)
    with RunStore(tmp_path) as store:
        again = document_means(model, read, store)
        assert store.computed == 0
        with torch.no_grad():
            model.transformer.wte.weight[VOCABULARY - 1] += 1
        document_means(model, read, store)
        assert store.computed == 1
    assert {key: row.tolist() for key, row in first.items()} == {key: row.tolist() for key, row in again.items()}


def constant(window: float, one: float, longest: float, count: int = 8) -> Means:
    """Return means whose documents differ from one another, but not from model to model."""
    own = np.linspace(0, 1, count)
    kinds = {WINDOW: window, "1": one, "2": one, "4": one, "8": longest, LAST: longest, LAST_ALONE: one}
    return {key: own + value for key, value in kinds.items()}


def test_a_row_says_what_a_model_that_ends_early_cannot_run() -> None:
    swapped = constant(3.5, 3.0, 3.2)
    plain = {WINDOW: swapped[WINDOW] - 0.25, "1": swapped["1"]}
    found = compared({"base": plain, "control": plain, "before": swapped, "after": swapped})
    assert found["in_window"]["difference"] == pytest.approx(0.25)
    assert [sorted(row) for row in found["lengths"]][1] == ["after", "before", "windows"]
    assert found["last_window"]["difference"] == pytest.approx(0.2)


def test_the_interval_of_a_difference_is_paired() -> None:
    before = np.linspace(0, 10, 20)
    found = difference(before, before + 0.5)
    assert (found["low"], found["high"]) == (pytest.approx(0.5), pytest.approx(0.5))
