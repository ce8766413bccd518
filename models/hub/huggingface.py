"""The adapter to Hugging Face's hub and its mirrors, over plain HTTP."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from yarl import URL

from models.hub.connection import MAX_LIST_REQUESTS, HubConnection, check_revision
from models.hub.digests import BlobDigest
from models.hub.errors import ListingRefusedError, ModelFetchError, ModelGatedError
from models.hub.file_selection import MAX_FILES
from models.hub.model_hub import DEFAULT_ENDPOINT, RemoteFile, check_repo, is_commit

_MISSING_CODES: Final = frozenset({"RepoNotFound", "RevisionNotFound", "EntryNotFound"})


class _RevisionInfo(BaseModel):
    sha: str = Field(pattern=r"^[0-9a-f]{40}$")


class _LfsPointer(BaseModel):
    oid: str
    size: int = Field(ge=0)


class _TreeEntry(BaseModel):
    type: str
    path: str
    size: int = Field(default=0, ge=0)
    oid: str = ""
    lfs: _LfsPointer | None = None


_TREE_ADAPTER: Final = TypeAdapter(list[_TreeEntry])


class HuggingFaceHub:
    """Hugging Face's hub, or a mirror of it at another endpoint."""

    def __init__(
        self, session: aiohttp.ClientSession, *, endpoint: str = DEFAULT_ENDPOINT, token: str = ""
    ) -> None:
        """`token` goes to the endpoint's own host only.

        Raises:
            HubUnauthorizedError: the token is no token, or would be sent in clear.
            ValueError: the endpoint is no http or https address.

        """
        self._connection = HubConnection(
            session, endpoint=endpoint, token=token, explain=self._explain
        )

    @property
    def name(self) -> str:
        """The hub's host, for messages and progress."""
        return self._connection.name

    async def resolve(self, repo: str, revision: str) -> str:
        """Return the commit that a branch, a tag or a commit is now; `ModelHub` has the errors."""
        check_repo(repo)
        if is_commit(revision):
            return revision
        check_revision(revision)
        url = self._connection.url(f"/api/models/{repo}/revision/{quote(revision, safe='')}")
        body, _ = await self._connection.get_json(url, f"revision {revision} of {repo}")
        try:
            return _RevisionInfo.model_validate_json(body).sha
        except ValidationError as error:
            raise self._connection.foreign_error(f"commit for {repo}@{revision}") from error

    async def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]:
        """Return all files of a commit; `ModelHub` has the errors."""
        check_repo(repo)
        url: URL | None = self._connection.url(
            f"/api/models/{repo}/tree/{quote(commit, safe='')}?recursive=true&expand=false"
        )
        remote_files: list[RemoteFile] = []
        pages = 0
        while url is not None:
            pages += 1
            if pages > MAX_LIST_REQUESTS:
                raise ListingRefusedError(
                    f"{repo} has more than {MAX_LIST_REQUESTS} pages of files"
                )
            body, url = await self._connection.get_json(url, f"the files of {repo}@{commit[:12]}")
            remote_files += self._parse_tree(body, repo)
            if len(remote_files) > MAX_FILES:
                raise ListingRefusedError(f"{repo} has more than {MAX_FILES} files")
        return tuple(remote_files)

    def _parse_tree(self, body: bytes, repo: str) -> list[RemoteFile]:
        try:
            entries = _TREE_ADAPTER.validate_json(body)
        except ValidationError as error:
            raise self._connection.foreign_error(f"list of files for {repo}") from error
        try:
            return [_remote_file(entry) for entry in entries if entry.type == "file"]
        except ValueError as error:
            raise ListingRefusedError(
                f"{self.name} lists a file of {repo} badly: {error}"
            ) from error

    def read(
        self, repo: str, commit: str, file: RemoteFile, *, start: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a file at byte `start`; `ModelHub` has the errors."""
        check_repo(repo)
        path = f"/{repo}/resolve/{quote(commit, safe='')}/{quote(file.path)}"
        what = f"{file.path} of {repo}@{commit[:12]}"
        return self._connection.read(self._connection.url(path), what, start=start)

    def _explain(self, response: aiohttp.ClientResponse, what: str) -> ModelFetchError | None:
        code = response.headers.get("X-Error-Code", "")
        if code == "GatedRepo":
            return ModelGatedError(
                f"{self.name} gives {what} only to accounts that accepted its terms: accept them on its page, "
                "and use a token of that account"
            )
        return self._connection.missing_error(what) if code in _MISSING_CODES else None


def _remote_file(entry: _TreeEntry) -> RemoteFile:
    if entry.lfs is not None:
        digest = BlobDigest("sha256", entry.lfs.oid.removeprefix("sha256:"))
        return RemoteFile(path=entry.path, size=entry.lfs.size, digest=digest)
    return RemoteFile(path=entry.path, size=entry.size, digest=BlobDigest("git-sha1", entry.oid))
