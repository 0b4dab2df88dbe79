"""The passkey test: retrieval of a number from far back in the text.

The text is that of LongLoRA (Chen et al. 2023, https://arxiv.org/abs/2309.12307) and YaRN's evaluation: filler, the key
somewhere in it, more filler, the question. One teacher-forced forward scores the answer: if the argmax of every token
is right, the greedy answer is right.

The effective length (metric `eff_len`, NoLiMa's criterion relative to the model's own base accuracy) is the largest L
such that at every L' from the base length to L the Wilson lower bound of the accuracy is at least 0.85 of the accuracy
at the base length. Modarressi et al. 2025, section 4, https://arxiv.org/abs/2502.05167.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from hf_posswap.errors import DataError
from hf_posswap.evaluation.scoring import Scorer
from hf_posswap.evaluation.statistics import wilson_interval
from hf_posswap.text.tokens import tokens_after
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEADER = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
LARGEST_KEY = 50_000


@dataclass(frozen=True, repr=False)
class PasskeyCell(ResultView):
    """The result of one model at one length and depth.

    Attributes:
        length: tokens of prompt and answer together.
        depth: position of the key in the filler, from 0 at the start to 1 at the end.
        trials: number of keys.
        exact: number of keys answered correctly, token by token.
        answer_nll: mean loss of the answers' tokens, in nats.
    """

    length: int
    depth: float
    trials: int
    exact: int
    answer_nll: float


class PasskeyTask:
    """Builds passkey prompts of an exact number of tokens.

    Args:
        tokenizer: the model's tokenizer.
        header: whether the prompt starts with the instruction; without it, prompts fit into a shorter window.

    Raises:
        DataError: the tokenizer cannot write the answer's digits.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> ids, answer = PasskeyTask(byte_tokenizer(), header=False).prompt(length=160, depth=0.5, key=12345)
        >>> len(ids), bytes(ids[-answer:])
        (160, b' 12345')
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, header: bool = True) -> None:
        self.tokenizer, self.header = tokenizer, header
        self._encode = partial(tokens_after, tokenizer)
        digits = self._encode(QUESTION + " 0123456789")
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in digits:
            raise DataError(
                f"{type(tokenizer).__name__} cannot write the passkey prompt: it maps a part to its unknown token."
            )

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt with its answer, without filler."""
        question, answer = self._ask(LARGEST_KEY)
        return len(self._start()) + len(self._encode(NEEDLE.format(key=LARGEST_KEY))) + len(question) + len(answer)

    def prompt(self, *, length: int, depth: float, key: int) -> tuple[list[int], int]:
        """Return exactly `length` token ids of prompt and answer, and the number of answer tokens.

        Raises:
            DataError: `length` is too short for the text around the filler.
        """
        start, needle, (question, answer) = self._start(), self._encode(NEEDLE.format(key=key)), self._ask(key)
        room = length - len(start) - len(needle) - len(question) - len(answer)
        if room < 0:
            raise DataError(f"a passkey prompt takes at least {length - room} tokens here, got length {length}.")
        before = round(room * depth)
        first, rest = self._filler(before, begins=not self.header), self._filler(room - before)
        return [*start, *first, *needle, *rest, *question, *answer], len(answer)

    def _start(self) -> list[int]:
        bos = self.tokenizer.bos_token_id
        header = self.tokenizer(HEADER, add_special_tokens=False, verbose=False)["input_ids"] if self.header else []
        return [*([] if bos is None else [bos]), *header]

    def _filler(self, count: int, *, begins: bool = False) -> list[int]:
        once = self._encode(FILLER)
        first = self.tokenizer(FILLER, add_special_tokens=False, verbose=False)["input_ids"] if begins else once
        return [*first, *once * (count // len(once) + 1)][:count]

    def _ask(self, key: int) -> tuple[list[int], list[int]]:
        """Return the tokens of the question and of the answer, split where the tokens of the question alone end."""
        question, combined = self._encode(QUESTION), self._encode(f"{QUESTION} {key}")
        prefix = next((i for i, (a, b) in enumerate(zip(question, combined, strict=False)) if a != b), len(question))
        return combined[:prefix], combined[prefix:]


def passkey_grid(
    model: PreTrainedModel,
    task: PasskeyTask,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int = 0,
    on_prompt: Callable[[int], None] | None = None,
) -> list[PasskeyCell]:
    """Return how often `model` finds the key, by length and depth. Keys depend only on seed, length and depth.

    Args:
        model: a causal model.
        task: the passkey task for its tokenizer.
        lengths: tokens of prompt and answer together.
        depths: positions of the key in the filler, between 0 and 1.
        trials: keys per cell.
        seed: random seed of the keys.
        on_prompt: called after each prompt with its number of tokens.

    Raises:
        DataError: a length is too short.
        PositionRangeError: a length exceeds the model's position table.
        NumericError: logits are not finite.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> config = GPT2Config(vocab_size=257, n_positions=128, n_embd=16, n_layer=1, n_head=2)
        >>> task = PasskeyTask(byte_tokenizer(), header=False)
        >>> cell = passkey_grid(GPT2LMHeadModel(config).eval(), task, lengths=[128], depths=[0.5], trials=2)[0]
        >>> cell.trials, cell.exact
        (2, 0)
    """
    scorer = Scorer(model)
    cells = []
    for length in lengths:
        for depth in depths:
            exact, losses = 0, []
            for key in passkey_keys(seed, length, depth, trials):
                right, nll = answer_prompt(scorer, *task.prompt(length=length, depth=depth, key=key))
                exact += right
                losses.append(nll)
                if on_prompt is not None:
                    on_prompt(length)
            cells.append(PasskeyCell(length, depth, trials, exact, float(np.concatenate(losses).mean())))
    return cells


def passkey_keys(seed: int, length: int, depth: float, trials: int) -> list[int]:
    """Return the keys of one cell, between 1 and 50000, as a pure function of the arguments.

    Example:
        >>> passkey_keys(0, 256, 0.5, 3) == passkey_keys(0, 256, 0.5, 5)[:3]
        True
    """
    random = np.random.default_rng((seed, length, round(1000 * depth)))
    return [int(key) for key in random.integers(1, LARGEST_KEY + 1, trials)]


def answer_prompt(scorer: Scorer, ids: list[int], answer: int) -> tuple[bool, np.ndarray]:
    """Return whether the last `answer` tokens are the model's greedy choice, and their losses, float32 [answer].

    Args:
        scorer: the scorer of a causal model.
        ids: token ids of prompt and answer.
        answer: number of answer tokens at the end.

    Raises:
        NumericError: logits are not finite.
        PositionRangeError: the prompt exceeds the model's position table.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> right, losses = answer_prompt(Scorer(model), [1, 2, 3, 4, 5], answer=2)
        >>> losses.shape
        (2,)
    """
    logits = scorer.last_logits(torch.tensor([ids]), answer)[0]  # [answer, V]
    targets = torch.tensor(ids[-answer:], device=logits.device)
    losses = functional.cross_entropy(logits, targets, reduction="none").cpu().numpy()
    return bool((logits.argmax(-1) == targets).all()), losses


RULER_BAR = 0.856
"""RULER's threshold: the score of Llama-2-7B at 4096 tokens. Hsieh et al. 2024, https://arxiv.org/abs/2404.06654."""


@dataclass(frozen=True, repr=False)
class EffectiveLength(ResultView):
    """The length up to which a model keeps its base accuracy.

    Attributes:
        length: effective length in tokens, at least the base length; None without a verdict.
        base: accuracy at the base length.
        bar: threshold for the lower bound.
        no_verdict: why there is no verdict, or None.
    """

    length: int | None
    base: float
    bar: float
    no_verdict: str | None


def effective_length(
    answers: Mapping[int, tuple[int, int]], *, share: float = 0.85, base_length: int | None = None
) -> EffectiveLength:
    """Return the effective length.

    Args:
        answers: {length: (right answers, trials)}, pooled over depths.
        share: required share of the base accuracy.
        base_length: the length of the base accuracy; None: the shortest.

    Raises:
        DataError: there are no lengths, or the base length is not one of them.

    Example:
        >>> effective_length({256: (50, 50), 512: (49, 50), 1024: (20, 50)}).length
        512
        >>> effective_length({256: (10, 10)}).no_verdict
        '10 questions per length cannot show 85 % of 100 %: ask at least 22.'
    """
    base_length = min(answers, default=0) if base_length is None else base_length
    if base_length not in answers:
        raise DataError(f"the effective length needs answers at the base length {base_length}, got {sorted(answers)}.")
    right, trials = answers[base_length]
    wilson_interval(right, trials)  # raises for invalid counts
    base = right / trials
    bar = share * base
    if right == 0:
        return EffectiveLength(None, base, bar, f"no answer was right at the base length of {base_length} tokens.")
    bounds = {length: wilson_interval(*counts)[0] for length, counts in answers.items() if length > base_length}
    longest = longest_passing(bounds, bar) or base_length
    fewest = min(trials for length, (_, trials) in answers.items() if length >= base_length)
    further = [wilson_interval(*answers[length])[1] for length in sorted(bounds) if length > longest]
    is_open = bool(further) and further[0] >= bar  # the first that does not pass may be as good
    expected = base if is_open else 1.0  # accuracy that has to be enough: that of the base, or a perfect one
    if wilson_interval(round(expected * fewest), fewest)[0] < bar:
        needed = next(n for n in range(fewest, 10**6) if wilson_interval(round(expected * n), n)[0] >= bar)
        reason = f"{fewest} questions per length cannot show {share:.0%} of {base:.0%}: ask at least {needed}."
        return EffectiveLength(None, base, bar, reason.replace("%", " %"))
    return EffectiveLength(longest, base, bar, None)


def longest_passing(scores: Mapping[int, float], bar: float) -> int | None:
    """Return the longest length at which, as at all shorter ones, the score is at least `bar`; None if there is none.

    Example:
        >>> longest_passing({4096: 0.96, 8192: 0.87, 16384: 0.6, 32768: 0.9}, RULER_BAR)
        8192
    """
    longest = None
    for length in sorted(scores):
        if scores[length] < bar:
            break
        longest = length
    return longest
