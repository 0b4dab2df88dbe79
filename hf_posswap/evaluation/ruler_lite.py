"""Eleven tasks, generated from a seed: retrieval, tracing, counting and learning from examples in long contexts.

Eight have the types of RULER (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654): a single needle, a needle among
others, several values, several queries; variables that take each other's values; common and frequent words. One asks
for what a needle implies, in other words, as NoLiMa does (https://arxiv.org/abs/2502.05167). Two are of kinds that
HELMET has (https://arxiv.org/abs/2410.02694): many examples with many labels, and facts in documents. The text is
generated and needs no download; documents may replace the filler.

Every prompt has an exact number of tokens. It ends within the sentence that the answer completes, as RULER's prompts
do: after a question alone, models that know the answer begin a new line. The answers are in the order that the prompt
requests, with commas between them, and are scored teacher-forced: the score is the share of answers that the argmax
tokens spell. This is stricter than RULER's search for the answers in generated text, so do not compare the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_posswap.errors import DataError, UnknownNameError
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.text.tokens import tokens_after
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PEOPLE = (
    "Alma", "Bruno", "Cora", "Dexter", "Edith", "Felix", "Gilda", "Hugo", "Ines", "Jonas", "Karin", "Leo",
    "Mabel", "Nestor", "Otto", "Piers", "Quinn", "Rosa", "Silas", "Tessa", "Ulric", "Vera", "Wanda", "Yara",
)  # fmt: skip

ASSOCIATIONS = (
    ("rents a room beside the Eiffel Tower", "lives in France"),
    ("parks a scooter at the Colosseum every morning", "lives in Italy"),
    ("paints the Acropolis from a balcony", "lives in Greece"),
    ("sells tickets for the Taj Mahal", "lives in India"),
    ("leads camels around the Sphinx", "lives in Egypt"),
    ("cooks soup for hikers at Machu Picchu", "lives in Peru"),
    ("has a kiosk at the Brandenburg Gate", "lives in Germany"),
    ("sees Mount Fuji from the kitchen", "lives in Japan"),
    ("sweeps the stairs of the Sydney Opera House", "lives in Australia"),
    ("wakes up when Big Ben strikes", "lives in England"),
    ("crosses Red Square after lunch", "lives in Russia"),
    ("has a hotel behind the beach of Copacabana", "lives in Brazil"),
    ("sneezes as soon as a kitten comes close", "is allergic to cats"),
    ("gets spots after eating bread", "has to avoid wheat"),
    ("drinks neither milk nor cream", "should not touch cheese"),
    ("mends dripping pipes", "is a plumber"),
    ("drills holes into teeth and fills them", "is a dentist"),
    ("slides down a pole when the alarm sounds", "fights fires"),
    ("lands a jet in thick fog", "is a pilot"),
    ("shears forty sheep a day", "has wool for sale"),
    ("looks at the rings of Saturn on clear nights", "owns a telescope"),
    ("trades a bishop for a rook", "plays chess"),
    ("tucks four strings under the chin", "is a violinist"),
    ("serves aces and hates double faults", "needs a tennis racket"),
    ("breathes from a tank among corals", "is a scuba diver"),
    ("pulls rabbits out of an empty hat", "is a magician"),
    ("adds yeast to dough before sunrise", "is a baker"),
    ("wears a white veil and says yes at the altar", "is a bride"),
    ("blew out the candles on a cake", "has had a birthday"),
    ("rocks a newborn to sleep", "has become a parent"),
)
"""What is said of a person, and what follows from that alone and is asked, in other words."""

CATEGORIES = (
    ("sparrow", "falcon", "pigeon", "heron", "parrot", "owl"),
    ("trout", "salmon", "herring", "carp", "tuna", "cod"),
    ("beetle", "wasp", "moth", "ant", "grasshopper", "mosquito"),
    ("oak", "birch", "maple", "pine", "willow", "beech"),
    ("rose", "tulip", "daisy", "lily", "dandelion", "orchid"),
    ("apple", "banana", "cherry", "grape", "mango", "peach"),
    ("carrot", "onion", "cabbage", "spinach", "turnip", "lettuce"),
    ("coffee", "tea", "lemonade", "cider", "cocoa", "beer"),
    ("hammer", "saw", "chisel", "wrench", "screwdriver", "pliers"),
    ("chair", "sofa", "wardrobe", "stool", "bench", "bookcase"),
    ("jacket", "sweater", "trousers", "scarf", "skirt", "glove"),
    ("violin", "trumpet", "flute", "piano", "cello", "drum"),
    ("truck", "tram", "bicycle", "van", "scooter", "tractor"),
    ("canoe", "ferry", "yacht", "kayak", "barge", "raft"),
    ("iron", "copper", "silver", "zinc", "nickel", "tin"),
    ("ruby", "emerald", "sapphire", "topaz", "opal", "diamond"),
    ("purple", "turquoise", "crimson", "beige", "scarlet", "magenta"),
    ("rain", "snow", "hail", "fog", "drizzle", "thunder"),
    ("elbow", "knee", "ankle", "shoulder", "wrist", "chin"),
    ("uncle", "niece", "cousin", "grandmother", "nephew", "sister"),
    ("baker", "plumber", "lawyer", "nurse", "tailor", "carpenter"),
    ("tennis", "hockey", "rowing", "boxing", "fencing", "golf"),
    ("castle", "barn", "chapel", "tower", "cottage", "factory"),
    ("anger", "joy", "fear", "envy", "sorrow", "pride"),
)
"""Words that belong together; no word belongs to two of them."""


_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_NAMES = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "larch",
    "maple", "north", "ocean", "prism", "quartz", "ridge", "stone", "tulip", "umbra", "valley", "willow", "zephyr",
)  # fmt: skip
_WORDS = (
    "anchor", "basket", "candle", "dragon", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "orange", "pencil", "rabbit", "saddle", "tunnel", "violin", "window", "yellow",
)  # fmt: skip
IN_DOCUMENTS = "rag_documents"
"""The task whose facts are inside documents; `posswap eval` takes those that it measures on."""
_PASSAGE = 160  # tokens of a document in `rag_documents`, with its header; longer ones from 160,000 tokens on
_MOST_PASSAGES = 999  # numbers of documents have other lengths than the answers
_ATTEMPTS = 50


@dataclass(frozen=True)
class TaskText:
    """The text of one task sample, before it is laid out as tokens.

    Attributes:
        pieces: the sentences with the facts, in order; they are spread over the filler.
        question: the end of the prompt: a question, and the beginning of the sentence that the answers complete.
        answers: the answers in the requested order.
        filler: the text between the facts, repeated, or a function that yields its lines without end, of which the
            text is filled from its end.
        own_filler: whether the filler belongs to the task, so that no document can replace it.
        in_documents: whether each piece is inside a document of its own, among further documents without a piece.
        least_lines: lines that a prompt must have room for, if the filler is a function.
    """

    pieces: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    filler: str | Callable[[], Iterator[str]] = _FILLER
    own_filler: bool = False
    in_documents: bool = False
    least_lines: int = 0


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

    def _repr_facts(self) -> dict[str, object]:
        return {"tokens": len(self.ids), "spans": self.spans}


def _number(random: np.random.Generator) -> str:
    return str(random.integers(1000, 10_000))


def _names(random: np.random.Generator, count: int) -> list[str]:
    return [str(name) for name in random.choice(_NAMES, count, replace=False)]


def _fact(name: str, value: str) -> str:
    return f"The number of {name} is {value}.\n"


def _ask(names: list[str]) -> str:
    if len(names) == 1:
        return f"What is the number of {names[0]}? The number of {names[0]} is"
    subjects = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"What are the numbers of {subjects}? The numbers of {subjects} are"


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
    return TaskText((_fact(name, value),), _ask([name]), (value,), others, own_filler=True)


def _values(random: np.random.Generator) -> TaskText:
    name, values = _names(random, 1)[0], [_number(random) for _ in range(4)]
    question = f"What are all the numbers of {name}, in the order of the text? The numbers of {name} are"
    return TaskText(tuple(_fact(name, value) for value in values), question, tuple(values))


def _variables(random: np.random.Generator) -> TaskText:
    """A chain of variables, each assigned the previous one, interleaved with a second chain."""
    names = [name.upper() for name in _names(random, 10)]
    value, other = _number(random), _number(random)
    while other == value:  # the second chain would have the value too
        other = _number(random)
    chain, distraction = names[:5], names[5:]
    pieces = []
    for i in range(5):
        for names_of_chain, start in ((chain, value), (distraction, other)):
            pieces.append(f"VAR {names_of_chain[i]} = {start if i == 0 else names_of_chain[i - 1]}\n")
    question = f"Which variables have the value {value}, in the order of the text? The variables with this value are"
    return TaskText(tuple(pieces), question, tuple(chain))


def _counted(common: int, rare: int) -> TaskGenerator:
    """Return a generator of a word list with 3 words `common` times, and every other word `rare` times."""

    def make(random: np.random.Generator) -> TaskText:
        shuffled = [str(word) for word in random.permutation(_WORDS)]
        answers, others = shuffled[:3], shuffled[3:]
        listed = random.permutation([*answers * common, *others * rare])
        pieces = tuple(f"{word}\n" for word in listed)
        question = "Which three words are in the list most often, in the order of the alphabet? The three words are"
        return TaskText(pieces, question, tuple(sorted(answers)), "-\n", own_filler=True)

    return make


def _latent(random: np.random.Generator) -> TaskText:
    """Facts on five people; the question shares no word with the fact that answers it, or with another one."""
    people = [str(name) for name in random.choice(PEOPLE, 5, replace=False)]
    chosen = [ASSOCIATIONS[int(i)] for i in random.choice(len(ASSOCIATIONS), 5, replace=False)]
    target = int(random.integers(5))
    facts = tuple(f"{name} {fact}.\n" for name, (fact, _) in zip(people, chosen, strict=True))
    implied = chosen[target][1]
    return TaskText(facts, f"Who {implied}? The one who {implied} is named", (people[target],))


def _labels(random: np.random.Generator) -> TaskText:
    """Words with the numbers of their categories; the word of the question is in none of the examples."""
    labels = [str(label) for label in random.choice(np.arange(10, 100), len(CATEGORIES), replace=False)]
    target = int(random.integers(len(CATEGORIES)))
    asked = str(random.choice(CATEGORIES[target]))
    words = [[word for word in category if word != asked] for category in CATEGORIES]

    def examples() -> Iterator[str]:
        while True:
            for i in random.permutation(len(CATEGORIES)):
                yield f"The word {random.choice(words[i])} has the label {labels[i]}.\n"

    question = f"The word {asked} has the label"
    return TaskText((), question, (labels[target],), examples, own_filler=True, least_lines=len(CATEGORIES))


def _documents(random: np.random.Generator) -> TaskText:
    """A needle among others, each inside a document of its own, among further documents."""
    needles = _needles(7, 1)(random)
    return TaskText(needles.pieces, needles.question, needles.answers, in_documents=True)


TASKS: dict[str, TaskGenerator] = {
    "niah_single": _needles(0, 1),
    "niah_multikey": _needles(7, 1),
    "niah_crowd": _crowd,
    "niah_multivalue": _values,
    "niah_multiquery": _needles(4, 4),
    "variable_tracking": _variables,
    "common_words": _counted(6, 1),
    "frequent_words": _counted(4, 2),
    "niah_latent": _latent,
    "icl_labels": _labels,
    IN_DOCUMENTS: _documents,
}


def ruler_prompt(
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    *,
    length: int,
    seed: int = 0,
    sample: int = 0,
    documents: Sequence[Sequence[int] | np.ndarray] | None = None,
) -> RulerPrompt:
    """Return one prompt of exactly `length` tokens, including the answers, as a pure function of the arguments.

    Args:
        tokenizer: the model's tokenizer.
        task: a name of `TASKS`.
        length: number of tokens.
        seed: random seed of all prompts.
        sample: number of the prompt.
        documents: token ids of texts that replace the filler between the facts, from a random token on and again from
            the first if they are short; special tokens are left out. None: the generated filler.

    Raises:
        UnknownNameError: no such task.
        DataError: `length` is too short for the task's text, the tokenizer cannot write the answers, the filler belongs
            to the task, or the documents have no text or contain the answers.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> prompt = ruler_prompt(byte_tokenizer(), "niah_single", length=300)
        >>> len(prompt.ids), len(prompt.spans)
        (300, 1)
    """
    if task not in TASKS:
        raise UnknownNameError("ruler_lite task", task, TASKS)
    random = np.random.default_rng((seed, length, sample, list(TASKS).index(task)))
    texts = None if documents is None else _plain(documents, tokenizer, task)
    for _ in range(_ATTEMPTS):
        layout = _Layout(tokenizer, task, TASKS[task](random), length)
        parts, filler = layout.parts(random, texts)
        if texts is None or not layout.leaks(filler):
            return layout.prompt(parts)
    raise DataError(
        f"the documents contain the answers of {_ATTEMPTS} {task} prompts of {length} tokens, so that finding one "
        "says nothing: give other documents, or none for the generated filler."
    )


def _plain(
    documents: Sequence[Sequence[int] | np.ndarray], tokenizer: PreTrainedTokenizerBase, task: str
) -> list[np.ndarray]:
    """Return the documents that have text, without special tokens.

    Raises:
        DataError: none has text.
    """
    texts = [np.asarray(document) for document in documents]
    texts = [text[~np.isin(text, tokenizer.all_special_ids)] for text in texts]
    texts = [text for text in texts if len(text)]
    if not texts:
        raise DataError(f"{len(documents)} documents for {task} have no token of text: give token ids of real texts.")
    return texts


class _Layout:
    """Lays the text of a task out as tokens.

    Args:
        tokenizer: of the model.
        task: its name, for messages.
        text: of the task.
        length: number of tokens of the prompt.

    Raises:
        DataError: the tokenizer cannot write the answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: str, text: TaskText, length: int) -> None:
        self.tokenizer, self.task, self.text, self.length = tokenizer, task, text, length
        self.start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._encode = partial(tokens_after, tokenizer)
        self.pieces = [self._encode(piece) for piece in text.pieces]
        self.question = self._encode("\n" + text.question)
        self.answers = [self._encode(f" {answer}") for answer in text.answers]
        if any(tokenizer.unk_token_id in answer for answer in self.answers):
            raise DataError(
                f"{type(tokenizer).__name__} cannot write the answers of {task}, {', '.join(text.answers)}: it maps a "
                "part to its unknown token."
            )
        self.comma = self._encode(",")

    def parts(
        self, random: np.random.Generator, texts: list[np.ndarray] | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens between the start and the question, in parts, and those of them that are filler.

        Raises:
            DataError: they do not fit, or documents are given and the filler belongs to the task.
        """
        if texts is not None and self.text.own_filler:
            raise DataError(f"the filler of {self.task} belongs to the task, and no document replaces it: give none.")
        if callable(self.text.filler):
            lines = self._lines(self.text.filler())
            return [lines], [lines]
        pieces, room = self.pieces, self._room(self.pieces)
        if self.text.in_documents:
            # As many documents as there is room for, at least one for each piece.
            count = min(_MOST_PASSAGES, max(len(self.pieces), room // _PASSAGE))
            headers = [self._encode(f"\nDocument {number}:\n") for number in range(1, count + 1)]
            room = self._room([*pieces, *headers])
            bounds = [i * room // len(headers) for i in range(len(headers) + 1)]
            pieces, cuts = self._in_documents(headers, bounds, random)
        else:
            bounds, cuts = [0, room], [0, *sorted(int(cut) for cut in random.integers(0, room + 1, len(pieces))), room]
        gaps = self._generated(cuts) if texts is None else self._from(texts, bounds, cuts, random)
        parts = [part for gap, piece in zip(gaps, pieces, strict=False) for part in (gap, piece)]
        return [*parts, gaps[-1]], gaps

    def _room(self, parts: list[list[int]]) -> int:
        """Return the tokens that are left for filler next to `parts`."""
        commas = [self.comma] * (len(self.answers) - 1)
        room = self.length - sum(map(len, [self.start, *parts, self.question, *self.answers, *commas]))
        if room < 0:
            least = self.length - room
            raise DataError(f"a {self.task} prompt takes at least {least} tokens here, got length {self.length}.")
        return room

    def _lines(self, lines: Iterator[str]) -> list[int]:
        """Return lines that fill the room; the first line is cut off, and the last `least_lines` are the first yielded.

        Raises:
            DataError: there is no room for the least lines.
        """
        kept = [self._encode(line) for line in itertools.islice(lines, self.text.least_lines)]
        missing = self._room(kept)
        while missing > 0:
            kept.append(self._encode(next(lines)))
            missing -= len(kept[-1])
        return list(itertools.chain.from_iterable(reversed(kept)))[-missing:]

    def _in_documents(
        self, headers: list[list[int]], bounds: list[int], random: np.random.Generator
    ) -> tuple[list[list[int]], list[int]]:
        """Return headers and pieces in order, and where they cut the filler, which has a document between `bounds`."""
        holders = sorted(int(i) for i in random.choice(len(headers), len(self.pieces), replace=False))
        piece_by_document = dict(zip(holders, self.pieces, strict=True))
        pieces, cuts = [], [0]
        for i, header in enumerate(headers):
            pieces.append(header)
            cuts.append(bounds[i])
            if i in piece_by_document:
                pieces.append(piece_by_document[i])
                cuts.append(int(random.integers(bounds[i], bounds[i + 1] + 1)))
        return pieces, [*cuts, bounds[-1]]

    def _generated(self, cuts: list[int]) -> list[list[int]]:
        """Return the filler of the task between `cuts`, each time from its beginning."""
        assert isinstance(self.text.filler, str)
        once = self._encode(self.text.filler)
        sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        return [(once * (size // len(once) + 1))[:size] for size in sizes]

    def _from(
        self, texts: list[np.ndarray], bounds: list[int], cuts: list[int], random: np.random.Generator
    ) -> list[list[int]]:
        """Return tokens of `texts` between `cuts`: of all in a row, or of another one from each of `bounds` on."""
        choices = [texts[int(i)] for i in random.permutation(len(texts))] if self.text.in_documents else None
        sources = itertools.cycle(choices or [np.concatenate(texts)])
        filler: list[int] = []
        for start, stop in itertools.pairwise(bounds):
            source, size = next(sources), stop - start
            latest = len(source) - size if self.text.in_documents else len(source) - 1
            first = int(random.integers(max(0, latest) + 1))
            filler += source.take(np.arange(first, first + size), mode="wrap").tolist()
        return [filler[start:stop] for start, stop in itertools.pairwise(cuts)]

    def leaks(self, filler: list[list[int]]) -> bool:
        """Return whether an answer is in the text of a part of the filler."""
        texts = [str(self.tokenizer.decode(part)) for part in filler]
        return any(answer in text for text in texts for answer in self.text.answers)

    def prompt(self, parts: list[list[int]]) -> RulerPrompt:
        """Return start, `parts`, question and answers."""
        ids = [*self.start, *itertools.chain.from_iterable(parts), *self.question]
        spans = []
        for number, answer in enumerate(self.answers):
            ids += self.comma if number else []
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
        >>> from hf_posswap.training.fresh import byte_tokenizer
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
