"""Speaking to the Hub: what of a folder goes there, what there is stale, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from hf_posswap.checkpoints.manifest import MANIFEST
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.hub_answers import retry_after
from hf_posswap.utils.hub_session import unreachable_error

LEFT_OUT = (
    ".*", "*/.*", "__pycache__/*", "*/__pycache__/*", "checkpoint-*/*", "optimizer.*", "scheduler.*", "scaler.*",
    "rng_state*", "trainer_state.json", "training_args.bin", MANIFEST,
)  # fmt: skip
"""Patterns of files that no reader of a model needs: hidden ones, a trainer's state, and what a save wrote where."""

_TRANSPORTS = ("httpx", "httpx2", "httpcore", "hf_xet")
_OURS = ("model*.safetensors", "model*.safetensors.index.json", "modeling_posswap.py", "posswap_*.py", MANIFEST)


def files_to_push(folder: Path) -> dict[str, Path]:
    """Return the files of `folder` that a push uploads, by their path in the repository."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in paths.items() if not _matches(name, LEFT_OUT)}


def stale_files(there: Iterable[str], coming: Iterable[str]) -> list[str]:
    """Return the files of an earlier push that would contradict the one that comes: its shards, its bundled code.

    Example:
        >>> stale_files(["model-00001-of-00002.safetensors", "mine.txt"], ["model.safetensors"])
        ['model-00001-of-00002.safetensors']
    """
    return sorted(name for name in set(there) - set(coming) if "/" not in name and _matches(name, _OURS))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def checked_repo_id(repo_id: str) -> str:
    """Return `repo_id` where it is one.

    Raises:
        CheckpointError: it is not `name` or `owner/name`.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise CheckpointError(f"{repo_id!r} is no repository on the Hub; give owner/name. {error}") from error
    return repo_id


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Turn whatever the Hub's client raises inside the block, before a commit was sent, into one CheckpointError."""
    try:
        yield
    except PosswapError:
        raise
    except Exception as error:
        advice = _advice(error)
        if advice is None:
            raise
        raise CheckpointError(f"cannot push to {repo_id}: {describe_failure(error)} {advice}") from error


def describe_failure(error: Exception) -> str:
    """Return one sentence on what went wrong, from the Hub client's error.

    Example:
        >>> describe_failure(RuntimeError("two lines\\n of it"))
        'two lines.'
    """
    error = _deepest(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    if isinstance(error, _UNREADABLE):
        message = f"the Hub's answer cannot be read ({type(error).__name__}: {message[:200]})"
    return f"{message.rstrip('.')}."


def status_of(error: Exception) -> int | None:
    """Return the HTTP status that the Hub answered with; None where it is about something else."""
    return getattr(getattr(_deepest(error), "response", None), "status_code", None)


_UNREADABLE = (JSONDecodeError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


def _deepest(error: BaseException) -> Any:
    """Return the error of the Hub's client that says most: an upload in a thread hides it behind another."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    inner = error
    while not isinstance(inner, HfHubHTTPError | OfflineModeIsEnabled) and inner.__cause__ is not None:
        inner = inner.__cause__
    return inner if isinstance(inner, HfHubHTTPError | OfflineModeIsEnabled) else error


def _advice(error: Exception) -> str | None:
    """Return what to do about `error`; None where it is not about the Hub."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    cause, status = _deepest(error), status_of(error)
    if isinstance(cause, OfflineModeIsEnabled) and not isinstance(cause, unreachable_error()):
        return "HF_HUB_OFFLINE is set. Unset it, or use dry_run to see what would go."
    if status in (401, 403):
        return "Nothing was committed: log in with `hf auth login`, or pass a token that may write there."
    if status == 404:
        return "Nothing was committed: check the name and the revision, and that the token may see the repository."
    if status == 412:
        return "Someone else committed meanwhile, and nothing of this push is there: look at it, and push again."
    if status == 429:
        return f"The Hub asks to wait{_asked_wait(cause)}. Nothing was committed: push again after that."
    if status is not None and status >= 500:
        return "The Hub failed before anything was committed: push again."
    if status is not None or type(cause) is ValueError:
        return "Nothing was committed: correct that and push again."
    if isinstance(cause, _UNREADABLE):
        return "Nothing was committed: push again, and check what stands between here and the Hub."
    if _is_about_the_wire(error):
        return "Nothing was committed: check the connection and push again."
    return None


def _asked_wait(error: Any) -> str:
    seconds = retry_after(error.response.headers)
    return "" if seconds is None else f" {seconds:.0f} s"


def _is_about_the_wire(error: BaseException | None) -> bool:
    """Return whether `error`, or what caused it, comes from the client's transport: httpx, its successor, or xet."""
    if error is None:
        return False
    home = type(error).__module__.partition(".")[0]
    xet = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ("xet", "cas", "reqwest"))
    return isinstance(error, OSError) or home in _TRANSPORTS or xet or _is_about_the_wire(error.__cause__)
