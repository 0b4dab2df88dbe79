"""Prompts hold what they ask for and nothing that contradicts it; a model that knows scores 1, one that guesses 0."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaTokenizer, PreTrainedTokenizerFast

from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.evaluation import Scorer
from hf_posswap.evaluation.ruler_lite import (
    ASSOCIATIONS,
    CATEGORIES,
    IN_DOCUMENTS,
    PEOPLE,
    TASKS,
    RulerPrompt,
    ruler_prompt,
    ruler_score,
)
from hf_posswap.training import byte_tokenizer

TOKENIZER = byte_tokenizer()
OWN_FILLER = ("niah_crowd", "common_words", "frequent_words", "icl_labels")
FUNCTION_WORDS = set(
    "a an and as at behind beside for from has have had in into is lives neither nor not of on or out should so the "
    "them to up when with after among around before under".split()
) - {"lives"}


def text_of(prompt: RulerPrompt) -> str:
    return bytes(prompt.ids[1 : prompt.spans[0][0]]).decode()


def answers_of(prompt: RulerPrompt) -> list[str]:
    return [bytes(prompt.ids[start:stop]).decode().strip() for start, stop in prompt.spans]


def solve(task: str, text: str) -> list[str]:
    """Return the answers, found by reading the prompt as a person would."""
    facts, question = text.rsplit("\n", 1)
    if task == "niah_latent":
        implied = re.fullmatch(r"Who (.*)\? The one who \1 is named", question)[1]
        (fact,) = [fact for fact, follows in ASSOCIATIONS if follows == implied]
        return re.findall(rf"([A-Z][a-z]+) {fact}\.", facts)
    if task == "icl_labels":
        (category,) = [
            words for words in CATEGORIES if re.fullmatch(r"The word (\w+) has the label", question)[1] in words
        ]
        examples = re.findall(r"The word (\w+) has the label (\d+)\.", facts)
        return sorted({label for word, label in examples if word in category})
    if task.startswith(("niah", "rag")):
        numbers = re.findall(r"The number of (\w+) is (\d+)\.", facts)
        subjects = re.fullmatch(r"What .*numbers? of (.*?)(?:, in .*)?\? The numbers? of \1 (?:is|are)", question)[1]
        asked = re.findall(r"\w+", subjects.replace(" and ", ", "))
        return [value for name in asked for found, value in numbers if found == name]
    if task == "variable_tracking":
        value, held = re.search(r"value (\d+)", question)[1], {}
        for name, given in re.findall(r"VAR (\w+) = (\w+)", facts):
            held[name] = held.get(given, given)
        return [name for name, found in held.items() if found == value]
    counts = Counter(re.findall(r"[a-z]+", facts))
    return sorted(word for word, _ in counts.most_common(3))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1200, 1900, 3001])  # at 1900, two chains of variables start with one number
def test_each_prompt_has_its_length_and_its_answers_follow_from_its_text(task: str, length: int) -> None:
    for sample in range(20):
        prompt = ruler_prompt(TOKENIZER, task, length=length, sample=sample)
        assert len(prompt.ids) == length
        assert prompt.ids[0] == TOKENIZER.bos_token_id
        assert prompt.spans[-1][1] == length
        between = [stop - start for (_, start), (stop, _) in pairwise(prompt.spans)]
        assert all(bytes(prompt.ids[stop : stop + 1]) == b"," for _, stop in prompt.spans[:-1])
        assert between == [1] * (len(prompt.spans) - 1)
        assert solve(task, text_of(prompt)) == answers_of(prompt)


def test_there_are_eleven_tasks_and_their_prompts_depend_on_their_numbers_alone() -> None:
    assert len(TASKS) == 11
    for task in TASKS:
        one = ruler_prompt(TOKENIZER, task, length=1500, seed=1, sample=2)
        assert one == ruler_prompt(TOKENIZER, task, length=1500, seed=1, sample=2)
        assert one != ruler_prompt(TOKENIZER, task, length=1500, seed=1, sample=3)
        assert one != ruler_prompt(TOKENIZER, task, length=1500, seed=2, sample=2)


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_ends_within_the_sentence_that_the_answer_completes(task: str) -> None:
    """After a colon or a question, models that know the answer begin a new line, as SmolLM2 does."""
    text = text_of(ruler_prompt(TOKENIZER, task, length=1500))
    assert re.search(r" (is|are|named|label)$", text)


def stems(text: str) -> set[str]:
    """Return the beginnings of the content words of `text`, so that *bake* and *baker* are one."""
    return {word[:4] for word in re.findall(r"[a-z]+", text.lower()) if word not in FUNCTION_WORDS}


def test_a_latent_question_shares_no_content_word_with_any_fact_or_the_filler() -> None:
    assert len(ASSOCIATIONS) >= 24
    assert len({fact for fact, _ in ASSOCIATIONS}) == len({asked for _, asked in ASSOCIATIONS}) == len(ASSOCIATIONS)
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    for _, asked in ASSOCIATIONS:
        assert stems(asked)
        for fact, _ in ASSOCIATIONS:
            assert not stems(asked) & stems(fact), (asked, fact)
        assert not set(asked.split()) & set(re.findall(r"[a-z]+", filler.lower())) - FUNCTION_WORDS
        assert not stems(asked) & stems(" ".join(PEOPLE))


def test_a_latent_question_is_answered_by_one_of_the_facts_alone() -> None:
    seen = set()
    for sample in range(200):
        prompt = ruler_prompt(TOKENIZER, "niah_latent", length=700, sample=sample)
        text, (answer,) = text_of(prompt), answers_of(prompt)
        facts, question = text.rsplit("\n", 1)
        assert facts.count(answer) == 1
        assert sum(fact in facts for fact, _ in ASSOCIATIONS) == 5
        assert sum(name in facts for name in PEOPLE) == 5
        assert answer not in question
        seen.add(question)
    assert len(seen) == len(ASSOCIATIONS)


def test_labels_are_learned_from_examples_that_leave_out_the_word_of_the_question() -> None:
    words = sum(CATEGORIES, ())
    assert len(set(words)) == len(words) == 6 * len(CATEGORIES) == 144
    places = set()
    for sample in range(30):
        text = text_of(ruler_prompt(TOKENIZER, "icl_labels", length=4000, sample=sample))
        examples, question = text.rsplit("\n", 1)
        (asked,) = re.findall(r"The word (\w+) has the label", question)
        assert asked not in re.findall(r"\w+", examples)
        pairs = re.findall(r"The word (\w+) has the label (\d+)\.", examples)
        labels = {word: label for word, label in pairs}
        assert all(labels[word] == label for word, label in pairs)
        assert len({label for _, label in pairs[-24:]}) == 24  # the last ones have all labels
        assert examples.endswith(f"The word {pairs[-1][0]} has the label {pairs[-1][1]}.\n")
        by_category = [{labels[word] for word in category if word in labels} for category in CATEGORIES]
        assert all(len(found) == 1 for found in by_category)
        assert len(pairs) > 100
        places.add(labels[pairs[0][0]])
    assert len(places) > 5
    with pytest.raises(DataError, match=r"an? icl_labels prompt takes at least 8\d\d tokens here, got length 700"):
        ruler_prompt(TOKENIZER, "icl_labels", length=700)


TEXTS = [" ".join(f"{word} of text {n}," for word in category) for n, category in enumerate(CATEGORIES[:12])]
DOCUMENTS = [[TOKENIZER.bos_token_id, *text.encode()] for text in TEXTS]
"""As `posswap eval` has them, each with a begin-of-text token."""
FACTS = {
    "variable_tracking": r"VAR [A-Z]+ = \w+\n",
    "niah_latent": rf"(?:{'|'.join(PEOPLE)}) (?:{'|'.join(fact for fact, _ in ASSOCIATIONS)})\.\n",
}


@pytest.mark.parametrize("task", [task for task in TASKS if task not in OWN_FILLER])
def test_documents_replace_the_filler(task: str) -> None:
    pattern, starts = FACTS.get(task, r"The number of \w+ is \d+\.\n"), set()
    for sample in range(10):
        prompt = ruler_prompt(TOKENIZER, task, length=1900, sample=sample, documents=DOCUMENTS)
        assert len(prompt.ids) == 1900
        assert prompt == ruler_prompt(TOKENIZER, task, length=1900, sample=sample, documents=DOCUMENTS)
        facts, _ = text_of(prompt).rsplit("\n", 1)
        assert solve(task, text_of(prompt)) == answers_of(prompt)
        filler = re.sub(pattern, "", facts)
        starts.add(filler[:40])
        if task != IN_DOCUMENTS:
            assert filler in "".join(TEXTS) * 3
            continue
        headers = re.findall(r"\nDocument (\d+):\n", filler)
        count = len(headers)
        assert count in (9, 10)
        assert headers == [str(number) for number in range(1, count + 1)]
        passages = re.split(r"\nDocument \d+:\n", filler)[1:]
        sources = [[k for k, text in enumerate(TEXTS) if passage in text * 3] for passage in passages]
        assert all(len(found) == 1 for found in sources)
        assert len({found[0] for found in sources}) == count  # each of another document
        holding = [len(re.findall(pattern, part)) for part in re.split(r"\nDocument \d+:\n", facts)[1:]]
        assert sorted(holding) == [0] * (count - 8) + [1] * 8
    assert len(starts) > 5


def test_documents_with_the_answers_are_left_out_or_refused() -> None:
    """Texts with a third of all answers: prompts are drawn again until the text has none."""
    thirds = [list("; ".join(map(str, range(1000, 10_000, 3))).encode())]
    for task in ("niah_single", IN_DOCUMENTS):
        prompt = ruler_prompt(TOKENIZER, task, length=9000, documents=thirds)
        assert text_of(prompt).count(answers_of(prompt)[0]) == 1
    every = [list("".join(map(str, range(1000, 10_000))).encode())]
    with pytest.raises(DataError, match=r"documents contain the answers of 50 niah_single prompts of 40000 tokens, so"):
        ruler_prompt(TOKENIZER, "niah_single", length=40_000, documents=every)
    for task in OWN_FILLER:
        with pytest.raises(DataError, match=rf"the filler of {task} belongs to the task, and no document replaces it"):
            ruler_prompt(TOKENIZER, task, length=3000, documents=DOCUMENTS)
    with pytest.raises(DataError, match=r"2 documents for niah_single have no token of text: give token ids"):
        ruler_prompt(TOKENIZER, "niah_single", length=900, documents=[[], [TOKENIZER.bos_token_id]])
    with pytest.raises(DataError, match=r"a rag_documents prompt takes at least \d+ tokens here, got length 350"):
        ruler_prompt(TOKENIZER, IN_DOCUMENTS, length=350)


def test_many_documents_have_shorter_numbers_than_answers() -> None:
    text = bytes(ruler_prompt(TOKENIZER, IN_DOCUMENTS, length=200_000).ids[1:]).decode()
    assert [int(number) for number in re.findall(r"Document (\d+):", text)] == list(range(1, 1000))


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


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_spelt_as_in_a_text_where_a_tokenizer_begins_each_text_with_a_space(task: str) -> None:
    """As Llama's does: the answers had two spaces before them, and the commas one."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "▁1"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=[("▁", "1")], legacy=False)
    assert tokenizer.tokenize("a") == ["▁", "a"]
    for sample in range(9):
        prompt = ruler_prompt(tokenizer, task, length=1500, sample=sample)
        plain = ruler_prompt(TOKENIZER, task, length=1500, sample=sample)
        end = text_of(plain).rpartition("\n")[2] + " " + ", ".join(answers_of(plain))
        wanted = tokenizer(f"\n{end}", add_special_tokens=False)["input_ids"][1:]
        assert list(prompt.ids[-len(wanted) :]) == wanted
        answers = [tokenizer.convert_ids_to_tokens(prompt.ids[start:stop]) for start, stop in prompt.spans]
        assert ["".join(tokens).removeprefix("▁") for tokens in answers] == answers_of(plain)


def test_answers_that_a_tokenizer_cannot_write_are_refused() -> None:
    """A model that answers with the unknown token would be right."""
    letters = {letter: number for number, letter in enumerate(["?", *"abcdefghijklmnopqrstuvwxyz0123456789 .,\n"])}
    bpe = Tokenizer(BPE(vocab=letters, merges=[], unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="?")
    assert ruler_prompt(tokenizer, "niah_single", length=1500).spans
    for task in ("variable_tracking", "niah_latent"):
        with pytest.raises(DataError, match=rf"cannot write the answers of {task}, [A-Z].*: it maps a part to its unk"):
            ruler_prompt(tokenizer, task, length=1500)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"a niah_single prompt takes at least \d+ tokens here, got length 20"):
        ruler_prompt(TOKENIZER, "niah_single", length=20)
    with pytest.raises(UnknownNameError, match="unknown ruler_lite task 'niah'"):
        ruler_prompt(TOKENIZER, "niah", length=900)
