"""What `posswap patch` reads beside the model, and where it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posswap.compat.transformers_files import file_of
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.atomic_io import writable_folder
from hf_posswap.utils.auto_classes import auto_processor, auto_tokenizer
from hf_posswap.utils.user_paths import expand_home

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "merges.txt", "*.model", "tekken.json")


def checked_target(out: Path, source: str, overwrite: bool) -> Path:
    """Return `out` as an absolute path, after all that could stop the saving later has been checked.

    Raises:
        CheckpointError: it is a file or a mount point, holds something (with `overwrite`: something that is no
            checkpoint), holds or is the source, or its parent cannot be written.
    """
    folder = expand_home(out).resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--out {out} is a file; give a folder that is new or empty.")
    if Path(source).exists() and Path(source).resolve().is_relative_to(folder):
        raise CheckpointError(f"--out {out} is or holds the model itself; give another folder.")
    if folder.is_dir():
        if any(folder.iterdir()) and not overwrite:
            raise CheckpointError(f"--out {out} is not empty; give another folder, or --overwrite to replace it.")
        from hf_posswap.checkpoints.save import refuse_to_replace

        refuse_to_replace(folder, overwrite)
    writable_folder(folder.parent)
    return folder


def checked_file(out: Path, option: str = "--out") -> Path:
    """Return the file `out` of `option` as an absolute path, after all that could stop its writing has been checked.

    Raises:
        CheckpointError: it is a folder, or its folder cannot be written.
    """
    path = expand_home(out).absolute()
    if path.is_dir():
        raise CheckpointError(f"{option} {out} is a folder; give a file.")
    writable_folder(path.parent)
    return path


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a folder or Hub id; None for a folder without one.

    Args:
        source: the folder or Hub id.
        trust_remote_code: run code that it brings, where the tokenizer is code.

    Raises:
        CheckpointError: there is one, and it cannot be read, or (RemoteCodeError) is code, which was not asked for.
    """
    folder = Path(source)
    if folder.is_dir() and not any(found for name in _TOKENIZER_FILES for found in folder.glob(name)):
        return None
    try:
        return auto_tokenizer(source, trust_remote_code=trust_remote_code)
    except PosswapError:
        raise
    except Exception as error:  # a tokenizer's own code may raise anything
        raise CheckpointError(
            f"the tokenizer of {source!r} cannot be read; --no-tokenizer saves the model alone: {error}"
        ) from error


def load_processor(source: str, *, trust_remote_code: bool = False) -> Any:
    """Return what makes inputs for the model of a folder or Hub id; None for a folder without one.

    That is its processor (of images, of sound, of these and text) where it has one, otherwise its tokenizer. Arguments
    and errors are those of `load_tokenizer`.
    """
    names = ("preprocessor_config.json", "processor_config.json")
    if all(file_of(source, name, certain=False) is None for name in names):
        return load_tokenizer(source, trust_remote_code=trust_remote_code)
    try:
        return auto_processor(source, trust_remote_code=trust_remote_code)
    except PosswapError:
        raise
    except Exception as error:  # a processor's own code may raise anything
        raise CheckpointError(
            f"the processor of {source!r} cannot be read; --no-tokenizer saves the model alone: {error}"
        ) from error
