"""Sentence-embedding losses: match the unswapped encoder's vectors, or pull halves of one text together.

The sentence-transformers files of a model are read from the base, and written next to the swapped encoder.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from hf_posswap.compat.transformers_loading import file_of
from hf_posswap.errors import ConfigError, MissingDependencyError, RemoteCodeError
from hf_posswap.training.config import ModelSettings
from hf_posswap.utils.atomic_io import read_json, write_json
from hf_posswap.utils.auto_classes import refused_code
from hf_posswap.utils.devices import evaluating
from hf_posswap.utils.gguf_source import SUFFIX, is_gguf
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100
Around = tuple[int, int]
"""Special tokens before and after a text."""
_MODULES = "modules.json"
_ENCODER = "sentence_bert_config.json"


@dataclass(frozen=True)
class Pooling:
    """Pools the states of a text into one vector.

    Attributes:
        modules: sentence-transformers modules after the encoder; none: the mean over the tokens.

    Example:
        >>> states, mask = torch.tensor([[[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]]]), torch.tensor([[1, 1, 0]])
        >>> Pooling()(states, mask)
        tensor([[2., 4.]])
    """

    modules: tuple[nn.Module, ...] = ()

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return [B, E], float32, of `states` [B, L, E], where `mask` [B, L] is not 0."""
        states = states.float()
        if not self.modules:
            weights = mask[..., None].to(states.dtype)
            return (states * weights).sum(1) / weights.sum(1).clamp_min(1)
        features = {"token_embeddings": states, "attention_mask": mask}
        for module in self.modules:
            features = module.to(states.device)(features)
        return features["sentence_embedding"]


def embed(model: nn.Module, pooling: Pooling, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the vectors of texts, [B, E], float32.

    Args:
        model: an encoder, with or without a head, possibly wrapped.
        pooling: of its last states.
        ids: [B, L].
        mask: [B, L], 0 at padding.
    """
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    states = getattr(output, "last_hidden_state", None)  # [B, L, E]
    return pooling(output.hidden_states[-1] if states is None else states, mask)


def texts_of(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the unmasked tokens of a batch and their attention mask, [B, L] each."""
    labels, ids = inputs["labels"], inputs["input_ids"]
    texts = torch.where(labels == IGNORED, ids, labels)
    mask = inputs.get("attention_mask")
    return texts, torch.ones_like(texts) if mask is None else mask


def embedding_loss(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    pooling: Pooling,
    inputs: dict[str, Tensor],
    items: Tensor | int | None,
    *,
    window: int,
) -> Tensor:
    """Return 1 minus the mean cosine of the texts' vectors from `model` and from the unswapped `teacher`.

    The teacher reads each text up to its window; the model reads all of it. A text is weighted by its number of labels,
    so that the losses of micro-batches add up to that of the whole batch.

    Args:
        model: an encoder, with any head.
        teacher: the unswapped one.
        pooling: of both.
        inputs: `input_ids` [B, L] in which some tokens are masked, their originals in `labels` [B, L].
        items: labels of all micro-batches; None: of these.
        window: tokens that the teacher can read.
    """
    texts, mask = texts_of(inputs)
    with torch.no_grad():
        teacher_vectors = embed(teacher, pooling, texts[:, :window], mask[:, :window])  # [B, E]
    distances = 1 - functional.cosine_similarity(embed(model, pooling, texts, mask), teacher_vectors, dim=-1)  # [B]
    label_counts = _labels(inputs)  # [B]
    return (distances * label_counts).sum() / (label_counts.sum().clamp_min(1) if items is None else items)


def contrastive_loss(
    model: PreTrainedModel,
    pooling: Pooling,
    inputs: dict[str, Tensor],
    items: Tensor | int | None,
    *,
    scale: float,
    around: Around,
) -> Tensor:
    """Return sentence-transformers' MultipleNegativesRankingLoss over the two halves of each text.

    It trains a half to be nearer to its other half than to the halves of other texts in the batch
    (https://arxiv.org/abs/1705.00652).

    Args:
        model: an encoder, with any head.
        pooling: of its last states.
        inputs: as in `embedding_loss`; at least two texts.
        items: labels of all micro-batches, by which each is weighted; None: of these.
        scale: of the cosines.
        around: special tokens of a text.
    """
    texts, real = texts_of(inputs)
    ids, mask = halves(texts, real, around)
    first, second = embed(model, pooling, ids, mask).chunk(2)  # in one forward, as DDP requires
    ranking = _ranking_loss()(nn.Identity(), scale=scale)
    loss: Tensor = ranking([{"sentence_embedding": first}, {"sentence_embedding": second}], None)
    label_count = _labels(inputs).sum()
    return loss if items is None else loss * label_count / items


def _ranking_loss() -> type[nn.Module]:
    new_module = "sentence_transformers.sentence_transformer"  # from its version 6 on
    module = new_module if importlib.util.find_spec(new_module) else "sentence_transformers"
    return importlib.import_module(f"{module}.losses").MultipleNegativesRankingLoss


def _labels(inputs: dict[str, Tensor]) -> Tensor:
    return (inputs["labels"] != IGNORED).sum(-1)


def halves(texts: Tensor, real: Tensor, around: Around) -> tuple[Tensor, Tensor]:
    """Return ids and mask of the first halves of all texts, then of the second ones, each with its special tokens.

    Args:
        texts: [B, L].
        real: [B, L], 0 at padding.
        around: special tokens before and after it.

    Example:
        >>> texts = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 9, 2, 0]])
        >>> ids, mask = halves(texts, (texts != 0).long(), (1, 1))
        >>> ids.tolist()
        [[1, 5, 2, 0], [1, 8, 2, 0], [1, 6, 7, 2], [1, 9, 2, 0]]
    """
    before, after = around
    half_lists: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, length in zip(texts, real.sum(-1).tolist(), strict=True):
        start, body, end = row[:before], row[before : length - after], row[length - after : length]
        middle = len(body) // 2
        for half_list, half in zip(half_lists, (body[:middle], body[middle:]), strict=True):
            half_list.append(torch.cat((start, half, end)))
    rows = [*half_lists[0], *half_lists[1]]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return pad_sequence(rows, batch_first=True), mask


def all_vectors(model: Any, pooling: Pooling, batch: dict[str, Tensor], *, plain: int) -> Tensor:
    """Return the vectors of the first `plain` tokens of a batch's texts, in eval mode, without a gradient, [B, E]."""
    texts, mask = (tensor[:, :plain].to(model.device) for tensor in texts_of(batch))
    with evaluating(model), torch.no_grad():
        return embed(model, pooling, texts, mask)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return 1 minus the mean cosine of two sets of vectors [B, E].

    Example:
        >>> distance(torch.eye(2), torch.tensor([[3.0, 0.0], [2.0, 0.0]]))
        0.5
    """
    return float(1 - functional.cosine_similarity(actual, expected, dim=-1).mean())


def is_sentence_model(settings: ModelSettings) -> bool:
    """Return whether the base has the module list of a sentence-transformers model.

    Example:
        >>> is_sentence_model(ModelSettings("hf_posswap"))
        False
    """
    local = expand_home(settings.name)
    if local.suffix == SUFFIX or is_gguf(local) or settings.gguf_file is not None:
        return False
    if local.is_dir():
        return (local / _MODULES).is_file()
    try:
        return file_of(settings.name, _MODULES, revision=settings.revision) is not None
    except OSError:
        return False


def pooling_of(settings: ModelSettings) -> Pooling:
    """Return the pooling of the base: its sentence-transformers modules, or else the mean over tokens.

    Raises:
        MissingDependencyError: it has such modules, and sentence-transformers is not installed.
        ConfigError: the first module is not a transformers encoder.
    """
    if not is_sentence_model(settings):
        return Pooling()
    modules = list(_load(settings))
    if not hasattr(modules[0], "auto_model"):
        raise ConfigError(
            f"{settings.name} starts with a {type(modules[0]).__name__}: expected a transformers encoder followed by "
            "pooling. Train the encoder by itself."
        )
    return Pooling(tuple(module.requires_grad_(False).eval() for module in modules[1:]))


def write_sentence_files(settings: ModelSettings, folder: Path, length: int) -> None:
    """Write the files to `folder`, the saved encoder, with which `SentenceTransformer(folder)` loads it.

    Args:
        settings: the base, whose pooling, normalisation and prompts are kept.
        folder: of the saved encoder.
        length: most tokens read per text.
    """
    sentences = _load(settings)
    sentences[0].auto_model.save_pretrained = lambda *_, **__: None  # the encoder's weights are already saved
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        sentences.save_pretrained(scratch, create_model_card=False)
        encoder = Path(scratch) / _ENCODER
        # it takes precedence over the tokenizer's length and max_position_embeddings
        write_json(encoder, read_json(encoder) | {"max_seq_length": length})
        for path in sorted(Path(scratch).rglob("*")):
            target = folder / path.relative_to(scratch)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def _load(settings: ModelSettings) -> Any:
    """Return the base loaded by sentence-transformers, which adds mean pooling to a plain encoder."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingDependencyError("sentence-transformers", "sentences") from error
    trust_remote_code = settings.trust_remote_code
    if not trust_remote_code:
        # Before 6.0 sentence-transformers imports modules that are not its own without asking.
        path = file_of(settings.name, _MODULES, revision=settings.revision)
        for module in [] if path is None else read_json(path):
            if not str(module.get("type")).startswith("sentence_transformers."):
                raise RemoteCodeError(settings.name)
    with refused_code(settings.name, trust_remote_code):
        return SentenceTransformer(
            settings.name, revision=settings.revision, device="cpu", trust_remote_code=trust_remote_code
        )
