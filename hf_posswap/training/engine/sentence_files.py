"""What makes a folder a model of sentence-transformers: read from the base, written beside the swapped encoder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hf_posswap.compat.transformers_files import file_of
from hf_posswap.errors import ConfigError, MissingDependencyError, RemoteCodeError
from hf_posswap.training.config import ModelSettings
from hf_posswap.training.engine.sentences import Pooling, behind_the_encoder
from hf_posswap.utils.atomic_io import read_json, write_json
from hf_posswap.utils.auto_classes import refused_code
from hf_posswap.utils.user_paths import expand_home

_MODULES = "modules.json"
_ENCODER = "sentence_bert_config.json"


def is_sentence_model(settings: ModelSettings) -> bool:
    """Return whether the base says what stands behind its encoder, as sentence-transformers writes it.

    Example:
        >>> is_sentence_model(ModelSettings("hf_posswap"))
        False
    """
    local = expand_home(settings.name)
    if local.is_dir():
        return (local / _MODULES).is_file()
    try:
        return file_of(settings.name, _MODULES, revision=settings.revision) is not None
    except OSError:
        return False


def pooling_of(settings: ModelSettings) -> Pooling:
    """Return what makes vectors of the base's states: its own modules, or where it has none the mean over tokens.

    Raises:
        MissingDependencyError: it has some, and sentence-transformers is not installed.
        ConfigError: they do not stand behind one encoder.
    """
    if not is_sentence_model(settings):
        return Pooling()
    modules = list(_load(settings))
    if not hasattr(modules[0], "auto_model"):
        raise ConfigError(
            f"{settings.name} begins with a {type(modules[0]).__name__}: expected a transformers encoder and pooling "
            "behind it. Train the encoder by itself."
        )
    return behind_the_encoder(modules)


def write_sentence_files(settings: ModelSettings, folder: Path, length: int) -> None:
    """Write to `folder`, which holds the encoder, what makes `SentenceTransformer(folder)` load it; weights stay.

    Args:
        settings: the base, whose pooling, normalisation and prompts are kept.
        folder: of the saved encoder.
        length: tokens of a text that are read.
    """
    sentences = _load(settings)
    sentences[0].auto_model.save_pretrained = lambda *_, **__: None  # the encoder's weights are there already
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        sentences.save_pretrained(scratch, create_model_card=False)
        encoder = Path(scratch) / _ENCODER
        # said here, it wins over the tokenizer's length and over max_position_embeddings
        write_json(encoder, read_json(encoder) | {"max_seq_length": length})
        for path in sorted(Path(scratch).rglob("*")):
            target = folder / path.relative_to(scratch)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def _load(settings: ModelSettings) -> Any:
    """Return the base as sentence-transformers reads it; an encoder alone gets the mean over the tokens behind it."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingDependencyError("sentence-transformers", "sentences") from error
    trusted = settings.trust_remote_code
    if not trusted:
        _refuse_modules(settings)
    with refused_code(settings.name, trusted):
        return SentenceTransformer(settings.name, revision=settings.revision, device="cpu", trust_remote_code=trusted)


def _refuse_modules(settings: ModelSettings) -> None:
    """Refuse modules that are no classes of sentence-transformers: before 6.0 it imports them from a folder unasked."""
    path = file_of(settings.name, _MODULES, revision=settings.revision)
    for module in [] if path is None else read_json(path):
        if not str(module.get("type")).startswith("sentence_transformers."):
            raise RemoteCodeError(settings.name)
