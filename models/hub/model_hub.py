"""The port to a model hub: which commit a revision is, which files it has, and their bytes."""

import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from models.hub.digests import BlobDigest

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
MODELSCOPE_ENDPOINT: Final = "https://www.modelscope.cn"
_REPO: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file of a commit, as the hub lists it."""

    path: str
    """Path inside the repository, with slashes. Not trusted: `select_files` checks it."""
    size: int
    """Size in bytes."""
    digest: BlobDigest


class ModelHub(Protocol):
    """A hub that serves repositories of files by commit.

    Every method raises the errors of `models.hub.errors`: ModelMissingError, ModelGatedError, HubUnauthorizedError,
    HubRateLimitedError, HubUnreachableError. None of them retries.
    """

    @property
    def name(self) -> str:
        """The hub's host, for messages and progress."""
        ...

    async def resolve(self, repo: str, revision: str) -> str:
        """Return the commit (40 hexadecimal digits) that a branch, a tag or a commit is now.

        A whole commit is returned as it is, without a request.
        """
        ...

    async def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]:
        """Return all files of a commit.

        Raises:
            ListingRefusedError: the list is too long or is no list of files.

        """
        ...

    def read(
        self, repo: str, commit: str, file: RemoteFile, *, start: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a file at byte `start`; the iterator yields its bytes to the end as they arrive.

        The stream ends with HubUnreachableError if it breaks off, stalls, or is longer than the file.
        """
        ...


def is_commit(revision: str) -> bool:
    """Return whether a revision is a whole commit, which never moves."""
    return _COMMIT.fullmatch(revision) is not None


def contents_version(files: Mapping[str, BlobDigest]) -> str:
    """Return 40 digits in the place of a commit that is not known: the same files always have the same."""
    lines = "".join(f"{path}\0{digest}\n" for path, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:40]


def check_repo(repo: str) -> None:
    """Refuse what is no `organisation/name` of a hub: repositories become paths and folder names.

    Raises:
        ValueError: it is not; the message says what is expected.

    """
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise ValueError(
            f"{repo[:200]!r} is no repository of a hub; expected ORGANISATION/NAME, such as mlx-community/Qwen3-8B-4bit"
        )


def folder_name(repo: str, commit: str) -> str:
    """Return the name of the folder that holds a commit: `<organisation>--<name>@<first 12 digits>`.

    Raises:
        ValueError: it is no repository, or no whole commit.

    """
    check_repo(repo)
    if not is_commit(commit):
        raise ValueError(f"{commit[:80]!r} is no commit; expected 40 hexadecimal digits")
    return f"{repo.replace('/', '--')}@{commit[:12]}"
