"""Encoders: retrieval of long documents by one sentence in them. Passkey and needle, as in LongEmbed.

Each document of one length contains a unique sentence in the same filler. A question asks for it; the answer is the
document with the nearest embedding by cosine. Zhu et al. 2024, https://arxiv.org/abs/2404.12096. The texts differ from
LongEmbed's, so the numbers compare models with each other, not with published ones.

`vector_cosine` compares an encoder's vectors with those of the base, by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import DataError, NumericError, OptionError
from hf_posswap.evaluation.masked import special_frame
from hf_posswap.evaluation.scoring import advice_if_not_finite, reach_of
from hf_posswap.evaluation.statistics import ratio_interval, wilson_interval
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.text.tokens import tokens_after
from hf_posswap.utils.devices import evaluating
from hf_posswap.utils.result_views import ResultView

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Kind = Literal["passkey", "needle"]
Pooling = Literal["mean", "cls", "last"]
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_FIRST = "Ada Ben Cora Dan Ella Finn Gina Hugo Iris Jack Kate Liam Mona Nick Olga Paul Rosa Sam Tina Walter".split()
_LAST = "Abbott Becker Castle Dawson Ekman Fischer Garcia Hansen Ivanov Jensen Keller Larsen Moreau Novak".split()
_FACTS = (
    ("The old lighthouse at Cape Merrow was painted red in 1911.", "When was the lighthouse at Cape Merrow painted?"),
    ("Honey from the Tarn valley tastes of thyme and chestnut.", "What does honey from the Tarn valley taste of?"),
    ("The composer Lindqvist wrote his last opera on a train.", "Where did Lindqvist write his last opera?"),
    ("Snow leopards of the Dorje range hunt mostly at dawn.", "When do snow leopards of the Dorje range hunt?"),
    ("The first clock of Varna city hall ran backwards.", "What was odd about the first clock of Varna city hall?"),
    ("Bakers in Ostrava add caraway seeds to their rye bread.", "Which seeds do bakers in Ostrava add to rye bread?"),
    ("The bridge over the Selm was built from ship timber.", "What was the bridge over the Selm built from?"),
    ("Dr. Okafor discovered the comet with a borrowed telescope.", "How did Dr. Okafor discover the comet?"),
    ("The blue dye of Hirano comes from a river snail.", "Where does the blue dye of Hirano come from?"),
    ("Chess players in Reval use a board of slate and marble.", "What are the chess boards in Reval made of?"),
    ("The island of Skarn has no trees but forty kinds of moss.", "How many kinds of moss grow on Skarn?"),
    ("The violin in the museum of Cremia has a hidden drawer.", "What is hidden in the violin of Cremia's museum?"),
)


@dataclass(frozen=True, repr=False)
class RetrievalScore(ResultView):
    """How often the right document is the nearest.

    Attributes:
        length: tokens of a document, including special tokens.
        documents: number of documents, each with one question.
        accuracy: share of questions whose document is the nearest.
        low: lower end of Wilson's 95 % interval.
        high: upper end of the interval.
        chance: accuracy of a random guess.
    """

    length: int
    documents: int
    accuracy: float
    low: float
    high: float
    chance: float


def retrieval_texts(kind: Kind, documents: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return the sentence of each document, and the question about it.

    Raises:
        OptionError: no such kind.
        DataError: there are not that many different sentences.

    Example:
        >>> len(retrieval_texts("passkey", 50)), len(set(retrieval_texts("needle", 12)))
        (50, 12)
    """
    if kind not in ("passkey", "needle"):
        raise OptionError(f"kind is 'passkey' or 'needle', got {kind!r}.")
    random = np.random.default_rng(seed)
    most = len(_FACTS) if kind == "needle" else len(_FIRST) * len(_LAST)
    if not 2 <= documents <= most:
        raise DataError(f"{kind} retrieval has 2 to {most} different documents, got {documents}.")
    chosen = random.permutation(most)[:documents]
    if kind == "needle":
        return [_FACTS[i] for i in chosen]
    names = [f"{_FIRST[i % len(_FIRST)]} {_LAST[i // len(_FIRST)]}" for i in chosen]
    keys = random.integers(1, 50_001, documents)
    return [
        (
            f"{name}'s pass key is {key}. Remember it. {key} is the pass key for {name}.",
            f"What is the pass key for {name}?",
        )
        for name, key in zip(names, keys, strict=True)
    ]


def retrieval_documents(
    tokenizer: PreTrainedTokenizerBase, facts: Sequence[str], length: int, *, filler: str = FILLER, seed: int = 0
) -> list[list[int]]:
    """Return a document of exactly `length` tokens for each fact, at a random position in the filler.

    Args:
        tokenizer: the model's tokenizer; its special tokens are put around the text.
        facts: one fact for each document.
        length: number of tokens, including special ones.
        filler: repeated as often as needed.
        seed: random seed of the positions.

    Raises:
        DataError: `length` is too short for a fact.

    Example:
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> [len(ids) for ids in retrieval_documents(byte_tokenizer(), ["A fact."], 64)]
        [64]
    """
    plain = [tokens_after(tokenizer, f" {fact} ") for fact in facts]
    beginning = tokenizer(filler, add_special_tokens=False, verbose=False)["input_ids"]
    once = tokens_after(tokenizer, filler)
    first, last = special_frame(tokenizer)
    random = np.random.default_rng((seed, length))
    documents = []
    for fact in plain:
        room = length - len(first) - len(fact) - len(last)
        if room < 0:
            raise DataError(
                f"a document with its fact takes at least {length - room} tokens here, got length {length}."
            )
        before = int(random.integers(0, room + 1))
        around = once * (room // len(once) + 1)
        documents.append([*first, *[*beginning, *around][:before], *fact, *around[: room - before], *last])
    return documents


@torch.inference_mode()
def embed(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], *, pooling: Pooling = "mean", batch_tokens: int = 4096
) -> Tensor:
    """Return one unit vector for each document, float32 [N, E].

    Args:
        model: the model whose last hidden states are pooled; of an encoder-decoder, those of its encoder.
        documents: token ids of any lengths, without padding.
        pooling: the mean over tokens, the first token ("cls"), or the last.
        batch_tokens: maximum tokens of one forward; consecutive documents of equal length form a batch.

    Raises:
        OptionError: no such pooling.
        NumericError: a vector is not finite.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
        >>> embed(BertModel(BertConfig(vocab_size=9, **shape)).eval(), [[1, 2, 3], [4, 5]]).shape
        torch.Size([2, 16])
    """
    if pooling not in ("mean", "cls", "last"):
        raise OptionError(f"pooling is 'mean', 'cls' or 'last', got {pooling!r}.")
    vectors: list[Tensor] = []
    start = 0
    while start < len(documents):
        size, stop = len(documents[start]), start + 1
        while stop < len(documents) and len(documents[stop]) == size and (stop + 1 - start) * size <= batch_tokens:
            stop += 1
        ids = torch.tensor([list(document) for document in documents[start:stop]], device=model.device)
        inner = unwrap(model)  # PEFT's base_model is not an encoder
        body = inner.get_encoder() if inner.config.is_encoder_decoder else inner.base_model
        with evaluating(body):
            states = body(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.float()  # [B, L, E]
        vectors.append(states.mean(1) if pooling == "mean" else states[:, 0 if pooling == "cls" else -1])
        start = stop
    embeddings = functional.normalize(torch.cat(vectors).cpu(), dim=-1)
    if not bool(embeddings.isfinite().all()):
        raise NumericError(
            f"{type(model).__name__}: an embedding is not finite; {advice_if_not_finite(unwrap(model))}."
        )
    return embeddings


def retrieval_at_length(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    kind: Kind = "passkey",
    documents: int = 50,
    pooling: Pooling = "mean",
    filler: str = FILLER,
    seed: int = 0,
) -> RetrievalScore:
    """Return how often a question finds its document among `documents` of `length` tokens.

    Args:
        model: an encoder, or any model whose last hidden states can be pooled to an embedding.
        tokenizer: the model's tokenizer.
        length: tokens of each document.
        kind: "passkey", a number that belongs to a name, or "needle", one of 12 facts.
        documents: number of documents.
        pooling: as in `embed`.
        filler: the text around the facts.
        seed: random seed of names, numbers and positions.

    Raises:
        DataError, OptionError, NumericError: as `retrieval_texts`, `retrieval_documents` and `embed`.
        PositionRangeError: the documents exceed the model's position table.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> model = GPT2Model(GPT2Config(vocab_size=257, n_positions=256, n_embd=16, n_layer=1, n_head=2)).eval()
        >>> retrieval_at_length(model, byte_tokenizer(), 200, documents=4).chance
        0.25
    """
    pairs = retrieval_texts(kind, documents, seed)
    texts = retrieval_documents(tokenizer, [fact for fact, _ in pairs], length, filler=filler, seed=seed)
    question_vectors = embed(model, [tokenizer(question)["input_ids"] for _, question in pairs], pooling=pooling)
    document_vectors = embed(model, texts, pooling=pooling)
    nearest = (question_vectors @ document_vectors.T).argmax(dim=1)  # [N]
    right = int((nearest == torch.arange(documents)).sum())
    return RetrievalScore(length, documents, right / documents, *wilson_interval(right, documents), 1 / documents)


@dataclass(frozen=True, repr=False)
class VectorScore(ResultView):
    """The similarity of vectors at one length.

    Attributes:
        length: tokens that the model reads of each document, including special ones.
        base_reads: tokens that the base reads of it, limited by its window.
        documents: number of documents.
        cosine: mean cosine of the two vectors of a document.
        low: lower end of its 95 % interval over documents, or None.
        high: upper end of the interval, or None.
    """

    length: int
    base_reads: int
    documents: int
    cosine: float
    low: float | None
    high: float | None


def vector_score(length: int, base_reads: int, cosines: Sequence[float], *, seed: int = 0) -> VectorScore:
    """Return the score of the cosines of all documents at one length.

    Args:
        length: tokens that the model reads of each document.
        base_reads: tokens that the base reads.
        cosines: one cosine per document.
        seed: random seed of the bootstrap.

    Example:
        >>> vector_score(128, 64, [0.5, 0.7]).cosine
        0.6
    """
    values = np.array(cosines, dtype=np.float64)
    interval = ratio_interval(values, np.ones(len(values)), seed=seed)
    low, high = (None, None) if interval is None else (max(-1.0, interval[0]), min(1.0, interval[1]))
    return VectorScore(length, base_reads, len(values), float(values.mean()), low, high)


def leading_tokens(document: Sequence[int] | np.ndarray, length: int, frame: tuple[list[int], list[int]]) -> list[int]:
    """Return the first tokens of `document` with the special tokens around them, `length` in total.

    Raises:
        DataError: `length` tokens have room only for special tokens.

    Example:
        >>> leading_tokens([5, 6, 7, 8], 4, ([1], [2]))
        [1, 5, 6, 2]
    """
    before, after = frame
    room = length - len(before) - len(after)
    if room < 1:
        raise DataError(f"a text of {length} tokens has room only for special tokens.")
    return [*before, *map(int, document[:room]), *after]


def vector_cosine(model: PreTrainedModel, base: PreTrainedModel, whole: Sequence[int], leading: Sequence[int]) -> float:
    """Return the cosine of the model's vector of `whole` and the base's vector of `leading`.

    A vector is the mean of the last hidden states over all tokens.

    Raises:
        DataError: the vectors have different sizes.
        NumericError: a vector is not finite.
    """
    new, old = embed(model, [whole])[0], embed(base, [leading])[0]  # [E]
    if new.shape != old.shape:
        raise DataError(f"vectors of {len(new)} and of {len(old)} numbers cannot be compared.")
    return float(new @ old)


def near_the_base(
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[np.ndarray],
    lengths: Sequence[int],
) -> list[VectorScore]:
    """Return the similarity of the vectors of `model` to those of `base`, one score per length.

    As in `compare`, the base reads as much of each document as fits its window, and the model reads all of it.

    Args:
        model: an encoder, swapped or not.
        base: the model before the swap.
        tokenizer: the tokenizer of both.
        documents: token ids of each document, without special ones; documents shorter than the longest length are
            dropped, so that all lengths use the same documents.
        lengths: tokens to read, including special ones.

    Raises:
        DataError: no document is as long as the longest length, or a length has no room for text.
        NumericError: a vector is not finite.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_posswap.training.fresh import byte_tokenizer
        >>> shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
        >>> model = BertModel(BertConfig(vocab_size=300, max_position_embeddings=8, **shape)).eval()
        >>> texts = [np.arange(start, start + 20) for start in (5, 50)]
        >>> for score in near_the_base(model, model, byte_tokenizer(), texts, [4, 8]):
        ...     print(score.length, score.base_reads, round(score.cosine, 4))
        4 4 1.0
        8 8 1.0
    """
    frame = special_frame(tokenizer)
    longest, around = max(lengths), sum(map(len, frame))
    long = [document for document in documents if len(document) + around >= longest]
    if not long:
        raise DataError(f"no document has {longest} tokens, including {around} special ones.")
    reach, scores = reach_of(base), []
    for length in lengths:
        reads = min(length, reach.window or length, reach.limit or length)
        pairs = [(leading_tokens(text, length, frame), leading_tokens(text, reads, frame)) for text in long]
        scores.append(vector_score(length, reads, [vector_cosine(model, base, *pair) for pair in pairs]))
    return scores
