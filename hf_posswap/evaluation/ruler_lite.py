"""Eight tasks in the manner of RULER, made of nothing but a seed: is what stands far back found, followed and counted?

Hsieh et al. 2024, https://arxiv.org/abs/2404.06654, has the kinds: a needle alone, among other needles, with several
values, asked for together; variables that take each other's values; words that are common or frequent. The text here is
our own and needs no download. Every prompt has an exact number of tokens. The answers stand in the order in which the
prompt gives them and are judged teacher-forced: the score is the share of them that the model's first choices spell.
That is stricter than RULER's search for the answers in generated text; numbers of the two are not to be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.evaluation.scoring import Scorer

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
class Riddle:
    """One question before it is laid out.

    Attributes:
        pieces: of text that carry the facts, in order; they are spread over the filler.
        question: the end of the prompt.
        answers: in the order asked for.
        filler: what stands between the pieces, repeated.
    """

    pieces: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    filler: str = _FILLER


Maker = Callable[[np.random.Generator], Riddle]


@dataclass(frozen=True)
class RulerPrompt:
    """A prompt as tokens.

    Attributes:
        ids: exactly as many as asked for, the answers at the end.
        spans: [start, stop) of each answer's tokens in `ids`.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def _number(random: np.random.Generator) -> str:
    return str(random.integers(1000, 10_000))


def _names(random: np.random.Generator, count: int) -> list[str]:
    return [str(name) for name in random.choice(_NAMES, count, replace=False)]


def _fact(name: str, value: str) -> str:
    return f"The number of {name} is {value}.\n"


def _ask(names: list[str]) -> str:
    asked = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"What is the number of {asked}? The answer, in this order, is:"


def _needles(distractors: int, asked: int) -> Maker:
    """Return a maker of `asked` needles among `distractors` others."""

    def make(random: np.random.Generator) -> Riddle:
        names = _names(random, distractors + asked)
        values = [_number(random) for _ in names]
        wanted = sorted(int(i) for i in random.choice(len(names), asked, replace=False))
        pieces = tuple(_fact(name, value) for name, value in zip(names, values, strict=True))
        return Riddle(pieces, _ask([names[i] for i in wanted]), tuple(values[i] for i in wanted))

    return make


def _crowd(random: np.random.Generator) -> Riddle:
    """A needle in a text of nothing but needles of other names."""
    name, value = _names(random, 1)[0], _number(random)
    others = "".join(_fact(f"{other}{random.integers(10, 100)}", _number(random)) for other in _NAMES)
    return Riddle((_fact(name, value),), _ask([name]), (value,), others)


def _values(random: np.random.Generator) -> Riddle:
    name, values = _names(random, 1)[0], [_number(random) for _ in range(4)]
    question = f"What are all the numbers of {name}? The answer, in the order of the text, is:"
    return Riddle(tuple(_fact(name, value) for value in values), question, tuple(values))


def _variables(random: np.random.Generator) -> Riddle:
    """A chain of variables, each given the one before; a second chain stands in between."""
    names = [name.upper() for name in _names(random, 10)]
    value, other = _number(random), _number(random)
    chain, distraction = names[:5], names[5:]
    pieces = []
    for i in range(5):
        for held, start in ((chain, value), (distraction, other)):
            pieces.append(f"VAR {held[i]} = {start if i == 0 else held[i - 1]}\n")
    return Riddle(
        tuple(pieces), f"Which variables have the value {value}? In the order of the text they are:", tuple(chain)
    )


def _counted(common: int, rare: int) -> Maker:
    """Return a maker of a list of words in which 3 stand `common` times, and each other `rare` times."""

    def make(random: np.random.Generator) -> Riddle:
        words = [str(word) for word in random.permutation(_WORDS)]
        answers, others = words[:3], words[3:]
        listed = random.permutation([*answers * common, *others * rare])
        pieces = tuple(f"{word}\n" for word in listed)
        question = "Which three words are in the list most often? In the order of the alphabet they are:"
        return Riddle(pieces, question, tuple(sorted(answers)), "-\n")

    return make


TASKS: dict[str, Maker] = {
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
    """Return one prompt of exactly `length` tokens, answers included; it depends on nothing but these arguments.

    Args:
        tokenizer: of the model.
        task: a name of `TASKS`.
        length: tokens.
        seed: of all prompts.
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
    riddle = TASKS[task](random)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    pieces, question = [encode(piece) for piece in riddle.pieces], encode("\n" + riddle.question)
    answers = [encode(f" {answer}") for answer in riddle.answers]
    room = length - sum(map(len, [bos, *pieces, question, *answers]))
    if room < 0:
        raise DataError(f"a {task} prompt takes at least {length - room} tokens here, got length {length}.")
    filler = encode(riddle.filler)
    cuts = [0, *sorted(int(cut) for cut in random.integers(0, room + 1, len(pieces))), room]
    ids = list(bos)
    for i, piece in enumerate([*pieces, []]):
        gap = cuts[i + 1] - cuts[i]
        ids += (filler * (gap // len(filler) + 1))[:gap] + piece
    ids += question
    spans = []
    for answer in answers:
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return RulerPrompt(tuple(ids), tuple(spans))


def ruler_score(scorer: Scorer, prompt: RulerPrompt) -> float:
    """Return the share of the answers that the model's first choices spell, each after the right ones before it.

    Args:
        scorer: of a causal model.
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
