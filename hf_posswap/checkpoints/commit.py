"""One commit to the Hub, and what is known of it when no clear answer came."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.checkpoints.hub import describe_failure, status_of
from hf_posswap.errors import CheckpointError
from hf_posswap.utils.hub_session import HubSession

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TRIES = 3
_ASKING = 15.0  # seconds for asking what became of a commit, when the time for all is over
_PIECE = 1 << 20


class Commit:
    """Files to write and to delete in one commit to a branch.

    Args:
        api: of the Hub.
        repo_id: repository, which exists.
        revision: branch, which exists.
        files: by path in the repository.
        deleted: paths that go.
    """

    def __init__(self, api: HfApi, repo_id: str, revision: str, files: dict[str, Path], deleted: Sequence[str]) -> None:
        self.api, self.repo_id, self.revision, self.files, self.deleted = api, repo_id, revision, files, deleted

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

        operations: list[Any] = [
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
