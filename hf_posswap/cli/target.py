"""Checks of output paths, and loading of tokenizers and processors, for the commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_posswap.compat.transformers_loading import file_of
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.atomic_io import writable_folder
from hf_posswap.utils.auto_classes import auto_processor, auto_tokenizer
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.user_paths import expand_home, real_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "merges.txt", "*.model", "tekken.json")


def checked_target(out: Path, source: str, overwrite: bool) -> Path:
    """Return `out` as an absolute path, after checking that a model can be saved there.

    Raises:
        CheckpointError: it is a file or a mount point, is not empty (with `overwrite`: holds anything but a
            checkpoint), holds or is the source, or its parent cannot be written.
    """
    folder = real_path(out)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--out {out} is a file; give a folder that is new or empty.")
    if Path(source).exists() and Path(source).resolve().is_relative_to(folder):
        raise CheckpointError(f"--out {out} is or holds the model itself; give another folder.")
    if folder.is_dir() or folder.is_symlink():
        if folder.is_dir() and any(folder.iterdir()) and not overwrite:
            raise CheckpointError(f"--out {out} is not empty; give another folder, or --overwrite to replace it.")
        from hf_posswap.checkpoints.save import refuse_to_replace

        refuse_to_replace(folder, overwrite)
    writable_folder(folder.parent)
    return folder


def checked_file(out: Path, option: str = "--out") -> Path:
    """Return the file `out` of `option` as an absolute path, after checking that it can be written.

    Raises:
        CheckpointError: it is a folder, or its folder cannot be written.
    """
    path = expand_home(out).absolute()
    if path.is_dir():
        raise CheckpointError(f"{option} {out} is a folder; give a file.")
    writable_folder(path.parent, path)
    return path


_ALONE = "--no-tokenizer saves the model alone"


def load_tokenizer(
    source: str, *, instead: str = _ALONE, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a folder or Hub id; None for a folder without one.

    Args:
        source: the folder or Hub id.
        instead: what the command offers where a tokenizer cannot be read.
        trust_remote_code: run the tokenizer's own code, if it has any.

    Raises:
        CheckpointError: there is no such model, the tokenizer cannot be read, or (RemoteCodeError) needs code without
            `trust_remote_code`.
    """
    folder = Path(checkpoint_of(source))
    if folder.is_dir() and not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        return None
    try:
        return auto_tokenizer(source, trust_remote_code=trust_remote_code)
    except PosswapError:
        raise
    except Exception as error:  # a tokenizer's own code may raise anything
        if not folder.exists():
            from hf_posswap.patching.inspect.describe import read_config

            read_config(source, trust_remote_code=trust_remote_code)  # without one, that is the larger problem
        raise CheckpointError(f"the tokenizer of {source!r} cannot be read; {instead}: {error}") from error


def load_processor(source: str, *, trust_remote_code: bool = False) -> ProcessorMixin | PreTrainedTokenizerBase | None:
    """Return the processor (of images, sound, or both with text) of a folder or Hub id, otherwise its tokenizer.

    Returns None for a folder without either. Arguments and errors are those of `load_tokenizer`.
    """
    source = str(checkpoint_of(source))
    names = ("preprocessor_config.json", "processor_config.json")
    if all(file_of(source, name, certain=False) is None for name in names):
        return load_tokenizer(source, trust_remote_code=trust_remote_code)
    try:
        return auto_processor(source, trust_remote_code=trust_remote_code)
    except PosswapError:
        raise
    except Exception as error:  # a processor's own code may raise anything
        raise CheckpointError(f"the processor of {source!r} cannot be read; {_ALONE}: {error}") from error
