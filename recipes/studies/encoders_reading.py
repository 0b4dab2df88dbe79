"""Reading methods of the encoders study: one or several vectors per long text, each cached."""

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
from recipes.studies.encoders_scores import TaskResult
from recipes.studies.long_texts import Task, ranks, windows

Reads = Literal["whole", "cut", "mean of windows", "nearest window"]


@dataclass(frozen=True)
class ReadingMethod:
    """One method to compute vectors of a long text.

    Attributes:
        name: of its rows.
        reads: the text "whole" by one vector; "cut" at the base's window; by the "mean of windows"; or by as many
            vectors as it has windows, of which the "nearest window" counts.
        scheme: of a swap of the base for the longest text; None: the unswapped base.
        options: fields of the scheme.
        trained: the distilled scheme whose weights it uses, if any.
    """

    name: str
    reads: Reads = "whole"
    scheme: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    trained: str | None = None


@dataclass(frozen=True)
class Bench:
    """What all methods are measured on.

    Attributes:
        base: folder of the encoder.
        tasks: to read.
        window: of the base, in tokens.
        frame: special tokens before and after a text.
        pooling: of the last states.
        device: that reads.
        place: folder of cached vectors, with a folder per model.
    """

    base: Path
    tasks: Sequence[Task]
    window: int
    frame: tuple[list[int], list[int]]
    pooling: Pooling
    device: str
    place: Path

    def read(self, way: ReadingMethod, trained: Path | None) -> list[TaskResult]:
        """Return the method's results, task by task, computed now or read from its store.

        Args:
            way: the method.
            trained: folder of the distilled model that it uses, if any.
        """
        model = self._model(way, trained).eval().to(self.device)
        name = fingerprint(model)
        with RunStore(self.place / "measured" / "encoders" / name) as store:
            return [self._task_result(model, way.reads, task, store) for task in self.tasks]

    def _model(self, way: ReadingMethod, trained: Path | None) -> Any:
        """Return the base with the method's scheme, and with the distilled weights that it uses."""
        model = hf_posswap.load(self.base)
        if way.scheme is None:
            return model
        longest = max(task.length for task in self.tasks)
        if trained is None:
            return hf_posswap.patch_model(model, way.scheme, max_length=longest, **way.options)
        distilled = hf_posswap.load(trained)
        if way.scheme == way.trained:
            return distilled
        hf_posswap.patch_model(model, way.scheme, max_length=longest, **way.options)
        model.load_state_dict(distilled.state_dict())
        return model

    def _task_result(self, model: Any, reads: Reads, task: Task, store: RunStore) -> TaskResult:
        def vectors(texts: Sequence[Sequence[int]]) -> np.ndarray:
            return np.stack([self._vector(model, text, store) for text in texts])

        question_vectors = vectors([question.tokens for question in task.questions])  # [Q, E]
        document_vectors = [
            _pooled_windows(vectors(list(self._parts(document, reads))), reads) for document in task.documents
        ]
        stacked = np.stack(document_vectors)  # [N, V, E]
        right_documents = [question.document for question in task.questions]
        return TaskResult(
            task, ranks(question_vectors, stacked, right_documents), stacked[:, 0] if stacked.shape[1] == 1 else None
        )

    def _parts(self, document: Sequence[int], reads: Reads) -> Iterator[Sequence[int]]:
        """Yield the parts of a document that are read."""
        if reads == "whole":
            yield document
        elif reads == "cut":
            yield next(windows(document, self.window, self.frame))
        else:
            yield from windows(document, self.window, self.frame)

    def _vector(self, model: Any, text: Sequence[int], store: RunStore) -> np.ndarray:
        """Return the vector of one text, float32 [E]."""
        digest = hashlib.sha256(np.asarray(text, dtype="<i8").tobytes()).hexdigest()
        key = {"what": "vector", "text": digest, "pooling": self.pooling}
        return np.asarray(store.value(key, lambda: embed(model, [text], pooling=self.pooling)[0].numpy()))


def _pooled_windows(vectors: np.ndarray, reads: Reads) -> np.ndarray:
    """Return the vectors of a document, [V, E]; for "mean of windows", their mean, normalized."""
    if reads != "mean of windows":
        return vectors
    mean = vectors.mean(axis=0, keepdims=True)
    return np.asarray(mean / np.linalg.norm(mean))
