"""Turns write errors of any library in a training, such as a full disk, into a CheckpointError."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.format import said_by

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_WRITER_MESSAGES = ("os error", "inline_container", "PytorchStreamWriter", "No space left")
"""Messages of safetensors, torch (twice) and tokenizers for a failed write: they raise their own error types."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Convert write errors within the block, which writes below `folder`.

    Raises:
        CheckpointError: something could not be written; what was finished before is kept.
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
            f"cannot write to {folder}: {reason}. Finished files are kept: free some space, and the same call resumes "
            "from the newest checkpoint."
        ) from error


def _is_about_writing(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return True
    return not isinstance(error, OSError) and any(text in str(error) for text in _WRITER_MESSAGES)
