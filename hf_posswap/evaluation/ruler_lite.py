"""Eight tasks similar to RULER, generated from a seed: retrieval, tracing and counting over long contexts.

The task types are those of Hsieh et al. 2024, https://arxiv.org/abs/2404.06654: a single needle, a needle among others,
several values, several queries; variables that take each other's values; common and frequent words. The text is
generated and needs no download. Every prompt has an exact number of tokens. The answers are in the order that the
prompt requests and are scored teacher-forced: the score is the share of answers that the argmax tokens spell. This is
stricter than RULER's search for the answers in generated text, so do not compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_NAMES = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "larch",
    "maple", "north", "ocean", "prism", "quartz", "ridge", "stone", "tulip", "umbra", "valley", "willow", "zephyr",
)  # fmt: skip
_WORDS = (
    "anchor", "basket", "candle", "dragon", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "orange", "pencil", "rabbit", "saddle", "tunnel", "violin", "window", "yellow",
)  # fmt: skip


@dataclass(frozen=True)
class TaskText:
    """The text of one task sample, before it is laid out as tokens.

    Attributes:
        pieces: the sentences with the facts, in order; they are spread over the filler.
        question: the end of the prompt.
        answers: the answers in the requested order.
        filler: the text between the facts, repeated.
    """

    pieces: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    filler: str = _FILLER


TaskGenerator = Callable[[np.random.Generator], TaskText]


@dataclass(frozen=True, repr=False)
class RulerPrompt(ResultView):
    """A prompt as tokens.

    Attributes:
        ids: token ids, with the answers at the end.
        spans: [start, stop) of each answer's tokens in `ids`.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    def _repr_facts(self) -> dict[str, Any]:
        return {"tokens": len(self.ids), "spans": self.spans}


def _number(random: np.random.Generator) -> str:
    return str(random.integers(1000, 10_000))


def _names(random: np.random.Generator, count: int) -> list[str]:
    return [str(name) for name in random.choice(_NAMES, count, replace=False)]


def _fact(name: str, value: str) -> str:
    return f"The number of {name} is {value}.\n"


def _ask(names: list[str]) -> str:
    subjects = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"What is the number of {subjects}? The answer, in this order, is:"


def _needles(distractors: int, targets: int) -> TaskGenerator:
    """Return a generator of `targets` needles among `distractors` others."""

    def make(random: np.random.Generator) -> TaskText:
        names = _names(random, distractors + targets)
        values = [_number(random) for _ in names]
        wanted = sorted(int(i) for i in random.choice(len(names), targets, replace=False))
        facts = tuple(_fact(name, value) for name, value in zip(names, values, strict=True))
        return TaskText(facts, _ask([names[i] for i in wanted]), tuple(values[i] for i in wanted))

    return make


def _crowd(random: np.random.Generator) -> TaskText:
    """A needle in a text that consists only of needles of other names."""
    name, value = _names(random, 1)[0], _number(random)
    others = "".join(_fact(f"{other}{random.integers(10, 100)}", _number(random)) for other in _NAMES)
    return TaskText((_fact(name, value),), _ask([name]), (value,), others)


def _values(random: np.random.Generator) -> TaskText:
    name, values = _names(random, 1)[0], [_number(random) for _ in range(4)]
    question = f"What are all the numbers of {name}? The answer, in the order of the text, is:"
    return TaskText(tuple(_fact(name, value) for value in values), question, tuple(values))


def _variables(random: np.random.Generator) -> TaskText:
    """A chain of variables, each assigned the previous one, interleaved with a second chain."""
    names = [name.upper() for name in _names(random, 10)]
    value, other = _number(random), _number(random)
    chain, distraction = names[:5], names[5:]
    pieces = []
    for i in range(5):
        for names_of_chain, start in ((chain, value), (distraction, other)):
            pieces.append(f"VAR {names_of_chain[i]} = {start if i == 0 else names_of_chain[i - 1]}\n")
    return TaskText(
        tuple(pieces), f"Which variables have the value {value}? In the order of the text they are:", tuple(chain)
    )


def _counted(common: int, rare: int) -> TaskGenerator:
    """Return a generator of a word list with 3 words `common` times, and every other word `rare` times."""

    def make(random: np.random.Generator) -> TaskText:
        shuffled = [str(word) for word in random.permutation(_WORDS)]
        answers, others = shuffled[:3], shuffled[3:]
        listed = random.permutation([*answers * common, *others * rare])
        pieces = tuple(f"{word}\n" for word in listed)
        question = "Which three words are in the list most often? In the order of the alphabet they are:"
        return TaskText(pieces, question, tuple(sorted(answers)), "-\n")

    return make


TASKS: dict[str, TaskGenerator] = {
    "niah_single": _needles(0, 1),
    "niah_multikey": _needles(7, 1),
    "niah_crowd": _crowd,
    "niah_multivalue": _values,
    "niah_multiquery": _needles(4, 4),
    "variable_tracking": _variables,
    "common_words": _counted(6, 1),
    "frequent_words": _counted(4, 2),
}


def ruler_prompt(
    tokenizer: PreTrainedTokenizerBase, task: str, *, length: int, seed: int = 0, sample: int = 0
) -> RulerPrompt:
    """Return one prompt of exactly `length` tokens, including the answers, as a pure function of the arguments.

    Args:
        tokenizer: the model's tokenizer.
        task: a name of `TASKS`.
        length: number of tokens.
        seed: random seed of all prompts.
        sample: number of the prompt.

    Raises:
        UnknownNameError: no such task.
        DataError: `length` is too short for the task's text.

    Example:
        >>> from hf_posswap.training.tokenizer import byte_tokenizer
        >>> prompt = ruler_prompt(byte_tokenizer(), "niah_single", length=300)
        >>> len(prompt.ids), len(prompt.spans)
        (300, 1)
    """
    if task not in TASKS:
        raise UnknownNameError("ruler_lite task", task, TASKS)
    random = np.random.default_rng((seed, length, sample, list(TASKS).index(task)))
    task_text = TASKS[task](random)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    fact_ids, question = [encode(fact) for fact in task_text.pieces], encode("\n" + task_text.question)
    answers = [encode(f" {answer}") for answer in task_text.answers]
    room = length - sum(map(len, [bos, *fact_ids, question, *answers]))
    if room < 0:
        raise DataError(f"a {task} prompt takes at least {length - room} tokens here, got length {length}.")
    filler = encode(task_text.filler)
    cuts = [0, *sorted(int(cut) for cut in random.integers(0, room + 1, len(fact_ids))), room]
    ids = list(bos)
    for i, fact in enumerate([*fact_ids, []]):
        gap = cuts[i + 1] - cuts[i]
        ids += (filler * (gap // len(filler) + 1))[:gap] + fact
    ids += question
    spans = []
    for answer in answers:
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return RulerPrompt(tuple(ids), tuple(spans))


def ruler_score(scorer: Scorer, prompt: RulerPrompt) -> float:
    """Return the share of answers that the model's argmax tokens spell, each given the right answers before it.

    Args:
        scorer: the scorer of a causal model.
        prompt: from `ruler_prompt`.

    Raises:
        NumericError, PositionRangeError: as `Scorer.nll`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.training.tokenizer import byte_tokenizer
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=256, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> ruler_score(Scorer(model), ruler_prompt(byte_tokenizer(), "niah_single", length=256))
        0.0
    """
    first = prompt.spans[0][0]
    count = len(prompt.ids) - first
    ids = torch.tensor([prompt.ids])
    chosen = scorer.last_logits(ids, count)[0].argmax(-1).cpu()  # [count]
    right = chosen == ids[0, first:]
    return sum(bool(right[start - first : stop - first].all()) for start, stop in prompt.spans) / len(prompt.spans)
