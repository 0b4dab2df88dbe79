"""How the encoders study reads: long texts by one vector or several, each text once, kept on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import hf_posswap
from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.evaluation import RunStore, embed
from hf_posswap.evaluation.retrieval import Pooling
from recipes.studies.encoders_scores import Found
from recipes.studies.long_texts import Task, ranks, windows

Reads = Literal["whole", "cut", "mean of windows", "nearest window"]


@dataclass(frozen=True)
class Way:
    """One way to make vectors of a long text.

    Attributes:
        name: of its rows.
        reads: the text "whole" by one vector; "cut" at the base's window; by the "mean of windows"; or by as many
            vectors as it has windows, of which the "nearest window" counts.
        scheme: put into the base for the longest text; None: the base as it is.
        options: fields of the scheme.
        trained: the distilled scheme whose weights it takes, if any.
    """

    name: str
    reads: Reads = "whole"
    scheme: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    trained: str | None = None


@dataclass(frozen=True)
class Bench:
    """What all ways are measured on.

    Attributes:
        base: folder of the encoder.
        tasks: to read.
        window: of the base, in tokens.
        frame: special tokens before and after a text.
        pooling: of the last states.
        device: that reads.
        place: where vectors are kept, in a folder a model.
    """

    base: Path
    tasks: Sequence[Task]
    window: int
    frame: tuple[list[int], list[int]]
    pooling: Pooling
    device: str
    place: Path

    def read(self, way: Way, trained: Path | None) -> list[Found]:
        """Return what the way finds, task by task, read now or found in its store.

        Args:
            way: of reading.
            trained: folder of the distilled model that it takes, if any.
        """
        model = self._model(way, trained).eval().to(self.device)
        name = fingerprint(model)
        with RunStore(self.place / "measured" / "encoders" / name) as store:
            return [self._found(model, way.reads, task, store) for task in self.tasks]

    def _model(self, way: Way, trained: Path | None) -> Any:
        """Return the base with the way's scheme, and with the distilled weights that it takes."""
        model = hf_posswap.load(self.base)
        if way.scheme is None:
            return model
        longest = max(task.length for task in self.tasks)
        if trained is None:
            return hf_posswap.patch_model(model, way.scheme, max_length=longest, **way.options)
        held = hf_posswap.load(trained)
        if way.scheme == way.trained:
            return held
        hf_posswap.patch_model(model, way.scheme, max_length=longest, **way.options)
        model.load_state_dict(held.state_dict())
        return model

    def _found(self, model: Any, reads: Reads, task: Task, store: RunStore) -> Found:
        def vectors(texts: Sequence[Sequence[int]]) -> np.ndarray:
            return np.stack([self._vector(model, text, store) for text in texts])

        asked = vectors([question.tokens for question in task.questions])  # [Q, E]
        held = [_joined(vectors(list(self._parts(document, reads))), reads) for document in task.documents]
        stacked = np.stack(held)  # [N, V, E]
        right = [question.document for question in task.questions]
        return Found(task, ranks(asked, stacked, right), stacked[:, 0] if stacked.shape[1] == 1 else None)

    def _parts(self, document: Sequence[int], reads: Reads) -> Iterator[Sequence[int]]:
        """Give the texts that are read of a document."""
        if reads == "whole":
            yield document
        elif reads == "cut":
            yield next(windows(document, self.window, self.frame))
        else:
            yield from windows(document, self.window, self.frame)

    def _vector(self, model: Any, text: Sequence[int], store: RunStore) -> np.ndarray:
        """Return the vector of one text, float32 [E]."""
        digest = hashlib.sha256(np.asarray(text, dtype="<i8").tobytes()).hexdigest()
        named = {"what": "vector", "text": digest, "pooling": self.pooling}
        return np.asarray(store.value(named, lambda: embed(model, [text], pooling=self.pooling)[0].numpy()))


def _joined(vectors: np.ndarray, reads: Reads) -> np.ndarray:
    """Return the vectors of a document, [V, E]: of "mean of windows" the one in their middle, of length 1."""
    if reads != "mean of windows":
        return vectors
    mean = vectors.mean(axis=0, keepdims=True)
    return np.asarray(mean / np.linalg.norm(mean))
