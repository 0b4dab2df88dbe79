"""Speaking to the Hub: a commit, what is known of it when no clear answer came, and errors that say what to do."""

from __future__ import annotations

import errno
import hashlib
import socket
import ssl
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.utils.hub_session import HubSession, retry_after, unreachable_error

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TRANSPORTS = ("requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2", "hf_xet")
_BROKEN = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.ENOTCONN)
_TRIES = 3
_ASKING = 15.0  # seconds for asking what became of a commit, when the time for all is over
_PIECE = 1 << 20


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
        raise CheckpointError(f"{repo_id!r} is not a repository on the Hub; give owner/name. {error}") from error
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
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    cause, status = _deepest(error), status_of(error)
    if isinstance(cause, OfflineModeIsEnabled) and not isinstance(cause, unreachable_error()):
        return "HF_HUB_OFFLINE is set. Unset it, or use dry_run to see what would go."
    if status in (401, 403) or isinstance(cause, LocalTokenNotFoundError):
        return "Nothing was committed: log in with `hf auth login`, or pass a token that may write there."
    if status == 404:
        return "Nothing was committed: check the name and the revision, and that the token may see the repository."
    if status == 412:
        return "Someone else committed meanwhile, and nothing of this push is there: look at it, and push again."
    if status == 429:
        seconds = retry_after(cause.response.headers)
        wait = "" if seconds is None else f" {seconds:.0f} s"
        return f"The Hub asks to wait{wait}. Nothing was committed: push again after that."
    if status is not None and status >= 500:
        return "The Hub failed before anything was committed: push again."
    if status is not None or type(cause) is ValueError:
        return "Nothing was committed: correct that and push again."
    if isinstance(cause, _UNREADABLE):
        return "Nothing was committed: push again, and check what stands between here and the Hub."
    return _connection_advice(error)


def _connection_advice(error: BaseException) -> str | None:
    """Return what to do about the connection or this machine, or None: `error` is about neither.

    It goes by the types of `error` and its causes. The compiled hf_xet raises RuntimeError for what fails on the wire:
    that one has no Python frame below those of the Hub's client.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for each in chain:
        home, trace = type(each).__module__.partition(".")[0], each.__traceback__
        if type(each) is RuntimeError and each.__cause__ is None and trace is not None:
            home = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace)][-1].partition(".")[0]
        of_client = home == "huggingface_hub" and isinstance(each, OSError | RuntimeError)
        unreachable = isinstance(each, _BROKEN) or getattr(each, "errno", None) in _UNREACHABLE
        if of_client or unreachable or home in _TRANSPORTS:
            return "Nothing was committed: check the connection and push again."
    if any(isinstance(each, OSError) for each in chain):
        return "Nothing was committed: it is about a file or the disk of this machine. Correct that and push again."
    return None


@dataclass
class Commit:
    """Files to write and to delete in one commit to a branch.

    Attributes:
        api: of the Hub.
        repo_id: repository, which exists.
        revision: branch, which exists.
        files: by path in the repository.
        deleted: paths that go.
    """

    api: HfApi
    repo_id: str
    revision: str
    files: dict[str, Path]
    deleted: Sequence[str]

    def send(self, session: HubSession, message: str) -> tuple[str, str]:
        """Return the id and the address of the commit, made now, or found there after its answer was lost.

        Each try is bound to the head of the branch before it, so that none is done twice.

        Raises:
            CheckpointError: no clear answer came: what the branch holds now, as far as the Hub says it.
            Exception: of the Hub's client: it was not sent, or was refused.
        """
        before = self._head()
        for number in range(1, _TRIES + 1):
            try:
                session.commit_sent = session.silent = False
                return self._create(before, message)
            except Exception as error:
                status = status_of(error) or 0
                overtaken = number > 1 and status == 412  # perhaps by the try before
                if not session.commit_sent or (400 <= status < 500 and not overtaken):
                    raise
                silent = session.silent
                now, is_there = self._state(session, error, before)
                if is_there:
                    return now, f"{self.api.endpoint}/{self.repo_id}/commit/{now}"
                if now != before or silent or number == _TRIES:
                    raise self._failure(error, before, now, silent) from error
            time.sleep(number)
        raise AssertionError("the last try returns or raises")

    def _create(self, before: str, message: str) -> tuple[str, str]:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in self.files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in self.deleted),
        ]
        done = self.api.create_commit(
            self.repo_id, operations, commit_message=message, revision=self.revision, parent_commit=before
        )
        return done.oid, done.commit_url

    def _head(self) -> str:
        return str(self.api.model_info(self.repo_id, revision=self.revision).sha)

    def _state(self, session: HubSession, error: Exception, before: str) -> tuple[str, bool]:
        """Return the head of the branch, and whether it holds what was to be committed.

        Raises:
            CheckpointError: the Hub does not tell.
        """
        session.extend(_ASKING)
        try:
            now = self._head()
            return now, self._holds(now)
        except Exception as second:
            raise CheckpointError(
                f"cannot push to {self.repo_id}: {describe_failure(error)} Whether it was committed is not known, for "
                f"the Hub cannot be asked: {describe_failure(second)} Before it, {self.revision} was at {before[:12]}: "
                f"look at {self._address} before you push again."
            ) from error

    def _holds(self, commit: str) -> bool:
        tree = self.api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
        entries = {entry.path: entry for entry in tree if hasattr(entry, "blob_id")}
        if any(name in entries for name in self.deleted):
            return False
        return all(name in entries and _same(entries[name], path) for name, path in self.files.items())

    def _failure(self, error: Exception, before: str, now: str, silent: bool) -> CheckpointError:
        start = f"cannot push to {self.repo_id}: {describe_failure(error)} "
        if now != before:
            return CheckpointError(
                f"{start}Meanwhile {self.revision} went from {before[:12]} to {now[:12]}, which does not hold these "
                f"files: someone else committed. Look at {self._address} and push again."
            )
        if not silent:
            return CheckpointError(
                f"{start}The Hub says that {self.revision} is still at {before[:12]}: nothing was committed, push "
                "again."
            )
        return CheckpointError(
            f"{start}The Hub says that {self.revision} is still at {before[:12]}: nothing was committed so far, but it "
            f"may be at work on it. Look at {self._address} in a minute, and push again if nothing is there."
        )

    @property
    def _address(self) -> str:
        return f"{self.api.endpoint}/{self.repo_id}/commits/{self.revision}"


def _same(entry: Any, path: Path) -> bool:
    """Return whether a file on the Hub is the one at `path`: by the SHA-256 that LFS keeps, or by git's own hash."""
    if entry.lfs is not None:
        digest, wanted = hashlib.sha256(), entry.lfs.sha256
    else:
        digest, wanted = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False), entry.blob_id
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest() == wanted
