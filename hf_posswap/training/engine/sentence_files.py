"""The sentence-transformers files of a model: read from the base, written next to the swapped encoder."""

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
from hf_posswap.utils.gguf_source import SUFFIX, is_gguf
from hf_posswap.utils.user_paths import expand_home

_MODULES = "modules.json"
_ENCODER = "sentence_bert_config.json"


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
    return behind_the_encoder(modules)


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
        _refuse_modules(settings)
    with refused_code(settings.name, trust_remote_code):
        return SentenceTransformer(
            settings.name, revision=settings.revision, device="cpu", trust_remote_code=trust_remote_code
        )


def _refuse_modules(settings: ModelSettings) -> None:
    """Refuse modules that are not sentence-transformers classes: before 6.0 it imports them without asking."""
    path = file_of(settings.name, _MODULES, revision=settings.revision)
    for module in [] if path is None else read_json(path):
        if not str(module.get("type")).startswith("sentence_transformers."):
            raise RemoteCodeError(settings.name)
