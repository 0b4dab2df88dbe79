"""Prompts of an exact length that hold their key; answers judged as greedy decoding would."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_posswap.errors import DataError
from hf_posswap.evaluation import PasskeyTask, Scorer, passkey_grid
from hf_posswap.evaluation.passkey import FILLER, HEADER, NEEDLE, QUESTION
from hf_posswap.evaluation.retrieval import retrieval_documents
from hf_posswap.evaluation.ruler_lite import ruler_prompt
from hf_posswap.training import byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.integers(320, 3000), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(1, 50_000))
def test_a_prompt_has_its_length_and_reads_as_the_papers_does(length: int, depth: float, key: int) -> None:
    ids, answer = PasskeyTask(TOKENIZER).prompt(length=length, depth=depth, key=key)
    assert len(ids) == length
    assert ids[0] == TOKENIZER.bos_token_id
    text = TOKENIZER.decode(ids[1:])
    needle = NEEDLE.format(key=key)
    assert text.startswith(HEADER)
    assert text.endswith(f"{QUESTION} {key}")
    assert text.count(needle) == 1
    assert TOKENIZER.decode(ids[-answer:]) == f" {key}"
    before = text.index(needle) - len(HEADER)
    room = len(text) - len(HEADER) - len(needle) - len(QUESTION) - len(f" {key}")
    assert before == round(depth * room)
    assert (FILLER * 99).startswith(text[len(HEADER) : len(HEADER) + before])


@pytest.mark.parametrize(
    "make",
    [
        lambda tokenizer: PasskeyTask(tokenizer).prompt(length=900, depth=0.5, key=7),
        lambda tokenizer: ruler_prompt(tokenizer, "niah_single", length=900),
    ],
)
def test_a_tokenizer_is_not_heard_on_texts_that_are_longer_than_its_window(
    make: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 16
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        make(tokenizer)
        assert "longer than the specified maximum" not in caplog.text
        tokenizer("a text of more than 16 tokens, by itself")
        assert "longer than the specified maximum" in caplog.text
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)


def test_the_shortest_prompt_is_the_shortest_and_the_header_makes_it_longer() -> None:
    for header in (True, False):
        task = PasskeyTask(TOKENIZER, header=header)
        assert len(task.prompt(length=task.shortest, depth=0.5, key=50_000)[0]) == task.shortest
        with pytest.raises(
            DataError, match=f"takes at least {task.shortest} tokens here, got length {task.shortest - 1}"
        ):
            task.prompt(length=task.shortest - 1, depth=0.5, key=50_000)
    assert PasskeyTask(TOKENIZER).shortest - PasskeyTask(TOKENIZER, header=False).shortest == len(HEADER)


@pytest.mark.parametrize("name", ["stories260K", "gpt2-books-256"])
def test_real_tokenizers_keep_length_and_answer(shared_checkpoints: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_checkpoints / name)
    ids, answer = PasskeyTask(tokenizer).prompt(length=400, depth=0.5, key=31337)
    assert len(ids) == 400
    assert "31337" in tokenizer.decode(ids[-answer:]).replace(" ", "")
    assert tokenizer.decode(ids).replace(" ", "").count("31337") == 3


def test_a_tokenizer_without_digits_is_refused() -> None:
    letters = {chr(97 + i): i for i in range(26)} | {"?": 26}
    inner = Tokenizer(models.WordLevel(letters, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match="cannot write the passkey prompt"):
        PasskeyTask(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?"))


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=256, n_embd=32, n_layer=1, n_head=2, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


def test_a_cell_is_what_greedy_generation_and_the_models_loss_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = small_model(), PasskeyTask(TOKENIZER, header=False)
    ids, answer = task.prompt(length=160, depth=0.5, key=777)
    prompt = torch.tensor([ids[:-answer]])
    greedy = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=answer, do_sample=False, pad_token_id=256
    )[0, len(ids) - answer :].tolist()
    assert greedy != ids[-answer:]
    # the same prompt, once with the true answer and once with what the model would say itself
    for said, found in ((ids[-answer:], 0), (greedy, 1)):
        whole = [*ids[:-answer], *said]
        monkeypatch.setattr(task, "prompt", lambda *, length, depth, key, whole=whole: (whole, answer))
        cell = passkey_grid(model, task, lengths=[160], depths=[0.5], trials=1)[0]
        labels = torch.tensor([[-100] * (160 - answer) + said])
        with torch.no_grad():
            loss = model(torch.tensor([whole]), labels=labels).loss.item()
        assert (cell.exact, cell.trials) == (found, 1)
        assert cell.answer_nll == pytest.approx(loss, abs=1e-4)


def test_keys_depend_on_the_seed_and_the_cell_alone() -> None:
    model, task = small_model(), PasskeyTask(TOKENIZER, header=False)
    grid = passkey_grid(model, task, lengths=[128, 160], depths=[0.0, 1.0], trials=2, seed=3)
    assert [(cell.length, cell.depth) for cell in grid] == [(128, 0.0), (128, 1.0), (160, 0.0), (160, 1.0)]
    assert passkey_grid(model, task, lengths=[160], depths=[1.0], trials=2, seed=3) == grid[-1:]
    assert passkey_grid(model, task, lengths=[160], depths=[1.0], trials=2, seed=4) != grid[-1:]


def test_a_model_that_copies_finds_every_key() -> None:
    task, model = PasskeyTask(TOKENIZER, header=False), small_model()
    scorer_logits = Scorer.last_logits

    def perfect(self: Scorer, ids: torch.Tensor, count: int) -> torch.Tensor:
        logits = scorer_logits(self, ids, count)
        return torch.zeros_like(logits).scatter_(-1, ids[:, -count:, None], 20.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "last_logits", perfect)
        cells = passkey_grid(model, task, lengths=[128], depths=[0.0, 0.5], trials=3)
    assert [cell.exact for cell in cells] == [3, 3]
    assert np.allclose([cell.answer_nll for cell in cells], 0.0, atol=1e-5)


@pytest.mark.parametrize("scheme", ["never", "always", "first"])
@pytest.mark.parametrize("header", [True, False])
def test_parts_are_joined_as_the_whole_text_is_written(scheme: str, header: bool) -> None:
    """SentencePiece puts a space before the first word of all, and not before that of each part."""
    characters = {character: n for n, character in enumerate(["<s>", *sorted({*map(chr, range(33, 127)), "▁", "\n"})])}
    raw = Tokenizer(models.BPE(vocab=characters, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    names = {n: character for character, n in characters.items()}

    def check(ids: list[int]) -> None:
        text = "".join(names[n] for n in ids).replace("▁", " ")
        text = text if scheme == "never" else text.removeprefix(" ")
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert "  " not in text

    for depth in (0.5, 1.0):
        ids, answer = PasskeyTask(tokenizer, header=header).prompt(length=600, depth=depth, key=1234)
        check(ids[1:])
        assert "".join(names[n] for n in ids[-answer:]) == "▁1234"
    check(retrieval_documents(tokenizer, ["A fact."], 300)[0])
