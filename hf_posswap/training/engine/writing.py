"""A disk that is full or cannot be written, met by any writer in a training: said as what it is."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.format import said_by

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_OF_WRITERS = ("os error", "inline_container", "PytorchStreamWriter", "No space left")
"""What safetensors, torch (twice) and tokenizers say where a file cannot be written: they raise errors of their own."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Write below `folder` in the block, by whatever library.

    Raises:
        CheckpointError: something could not be written; what was finished before stays.
    """
    try:
        yield
    except PosswapError:
        raise
    except Exception as error:
        if not _is_about_writing(error):
            raise
        reason = (isinstance(error, OSError) and error.strerror) or said_by(error)
        raise CheckpointError(
            f"cannot write to {folder}: {reason}. What was finished before is kept: free some space, and the same call "
            "goes on from the newest checkpoint."
        ) from error


def _is_about_writing(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in _OF_DISKS:
        return True
    return not isinstance(error, OSError) and any(said in str(error) for said in _OF_WRITERS)
