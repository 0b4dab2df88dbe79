"""Encoders: retrieval of long documents by one sentence in them. Passkey and needle, as in LongEmbed.

Each document of one length contains a unique sentence in the same filler. A question asks for it; the answer is the
document with the nearest embedding by cosine. Zhu et al. 2024, https://arxiv.org/abs/2404.12096. The texts differ from
LongEmbed's, so the numbers compare models with each other, not with published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_posswap.errors import DataError, NumericError, OptionError
from hf_posswap.evaluation.frames import special_frame
from hf_posswap.evaluation.statistics import wilson_interval
from hf_posswap.patching.plan.plan_swap import unwrap
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
    plain = [tokenizer(f" {fact} ", add_special_tokens=False, verbose=False)["input_ids"] for fact in facts]
    once = tokenizer(filler, add_special_tokens=False, verbose=False)["input_ids"]
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
        around = list(once) * (room // len(once) + 1)
        documents.append([*first, *around[:before], *fact, *around[: room - before], *last])
    return documents


@torch.inference_mode()
def embed(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], *, pooling: Pooling = "mean", batch_tokens: int = 4096
) -> Tensor:
    """Return one unit vector for each document, float32 [N, E].

    Args:
        model: the model whose last hidden states are pooled.
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
        body: Any = unwrap(model).base_model  # PEFT's base_model is no encoder
        states = body(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.float()  # [B, L, E]
        vectors.append(states.mean(1) if pooling == "mean" else states[:, 0 if pooling == "cls" else -1])
        start = stop
    embeddings = functional.normalize(torch.cat(vectors).cpu(), dim=-1)
    if not bool(embeddings.isfinite().all()):
        raise NumericError(f"{type(model).__name__}: an embedding is not finite; use float32.")
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
