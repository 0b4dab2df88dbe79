"""Prompts hold what they ask for and nothing that contradicts it; a model that knows scores 1, one that guesses 0."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.evaluation import Scorer
from hf_posswap.evaluation.ruler_lite import TASKS, RulerPrompt, ruler_prompt, ruler_score
from hf_posswap.training import byte_tokenizer

TOKENIZER = byte_tokenizer()


def text_of(prompt: RulerPrompt) -> str:
    return bytes(prompt.ids[1 : prompt.spans[0][0]]).decode()


def answers_of(prompt: RulerPrompt) -> list[str]:
    return [bytes(prompt.ids[start:stop]).decode().strip() for start, stop in prompt.spans]


def solve(task: str, text: str) -> list[str]:
    """Return the answers, found by reading the prompt as a person would."""
    facts, question = text.rsplit("\n", 1)
    if task.startswith("niah"):
        numbers = re.findall(r"The number of (\w+) is (\d+)\.", facts)
        asked = re.findall(r"\w+", re.search(r"numbers? of (.*)\?", question)[1].replace(" and ", ", "))
        return [value for name in asked for found, value in numbers if found == name]
    if task == "variable_tracking":
        value, held = re.search(r"value (\d+)", question)[1], {}
        for name, given in re.findall(r"VAR (\w+) = (\w+)", facts):
            held[name] = held.get(given, given)
        return [name for name, found in held.items() if found == value]
    counts = Counter(re.findall(r"[a-z]+", facts))
    return sorted(word for word, _ in counts.most_common(3))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1200, 3001])
def test_each_prompt_has_its_length_and_its_answers_follow_from_its_text(task: str, length: int) -> None:
    for sample in range(20):
        prompt = ruler_prompt(TOKENIZER, task, length=length, sample=sample)
        assert len(prompt.ids) == length
        assert prompt.ids[0] == TOKENIZER.bos_token_id
        assert prompt.spans[-1][1] == length
        assert solve(task, text_of(prompt)) == answers_of(prompt)


def test_there_are_eight_tasks_and_their_prompts_depend_on_their_numbers_alone() -> None:
    assert len(TASKS) == 8
    for task in TASKS:
        one = ruler_prompt(TOKENIZER, task, length=1500, seed=1, sample=2)
        assert one == ruler_prompt(TOKENIZER, task, length=1500, seed=1, sample=2)
        assert one != ruler_prompt(TOKENIZER, task, length=1500, seed=1, sample=3)
        assert one != ruler_prompt(TOKENIZER, task, length=1500, seed=2, sample=2)


def test_needles_stand_in_all_of_the_text() -> None:
    places = [
        text_of(ruler_prompt(TOKENIZER, "niah_single", length=2000, sample=i)).index("The number") for i in range(60)
    ]
    assert min(places) < 300
    assert max(places) > 1500


def test_the_score_is_the_share_of_answers_spelt_right(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=1024, n_embd=16, n_layer=1, n_head=2)).eval()
    prompt = ruler_prompt(TOKENIZER, "niah_multiquery", length=900)
    assert ruler_score(Scorer(model), prompt) == 0.0

    def knows(self: Scorer, ids: torch.Tensor, count: int) -> torch.Tensor:
        logits = torch.zeros(1, count, 257).scatter_(-1, ids[:, -count:, None], 9.0)
        logits[0, 7, 5] = 20.0  # a wrong byte in the second answer of five bytes each
        return logits

    monkeypatch.setattr(Scorer, "last_logits", knows)
    assert ruler_score(Scorer(model), prompt) == 0.75


def test_real_tokenizers_keep_length_and_answers(shared_checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_checkpoints / "gpt2-books-256")
    for task in TASKS:
        prompt = ruler_prompt(tokenizer, task, length=900)
        assert len(prompt.ids) == 900
        text = tokenizer.decode(prompt.ids)
        for start, stop in prompt.spans:
            assert tokenizer.decode(prompt.ids[start:stop]).strip() in text


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"a niah_single prompt takes at least \d+ tokens here, got length 20"):
        ruler_prompt(TOKENIZER, "niah_single", length=20)
    with pytest.raises(UnknownNameError, match="unknown ruler_lite task 'niah'"):
        ruler_prompt(TOKENIZER, "niah", length=900)
