"""The adapter to ModelScope and its mirrors.

The hub is asked by branch or tag, never by commit, so a commit here is a digest of the chosen files' names and contents
(`contents_version`). Files are only listed while the branch still has exactly those: `docs/adr/0027`.
"""

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final
from urllib.parse import urlencode

import aiohttp
from pydantic import BaseModel, Field, ValidationError

from models.hub.connection import MAX_LIST_REQUESTS, HubConnection, bearer, check_revision
from models.hub.digests import BlobDigest
from models.hub.errors import (
    ListingRefusedError,
    ModelFetchError,
    ModelGatedError,
    ModelMissingError,
)
from models.hub.file_selection import DEFAULT_PATTERNS, MAX_FILES, is_selected, select_files
from models.hub.model_hub import (
    MODELSCOPE_ENDPOINT,
    RemoteFile,
    check_repo,
    contents_version,
    is_commit,
)

# The hub ends a list after so many entries, and does not say so.
_LIST_LIMIT: Final = 3000
_FORBIDDEN: Final = 403


class _Entry(BaseModel):
    path: str = Field(alias="Path")
    kind: str = Field(default="blob", alias="Type")
    size: int = Field(default=0, ge=0, alias="Size")
    sha256: str | None = Field(default=None, alias="Sha256")


class _Files(BaseModel):
    files: list[_Entry] = Field(alias="Files")


class _Listing(BaseModel):
    data: _Files = Field(alias="Data")


class ModelScopeHub:
    """ModelScope, or a mirror of it at another endpoint."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        endpoint: str = MODELSCOPE_ENDPOINT,
        token: str = "",
        branch: str = "master",
        patterns: tuple[str, ...] = DEFAULT_PATTERNS,
    ) -> None:
        """`branch` (or tag) is what files are read from; `patterns` choose the files that a commit stands for.

        Raises:
            HubUnauthorizedError: the token is no token, or would be sent in clear.
            ValueError: the endpoint is no http or https address, or the branch is none.

        """
        check_revision(branch)
        self._branch = branch
        self._patterns = patterns
        self._connection = HubConnection(
            session,
            endpoint=endpoint,
            token=token,
            credentials=_credentials,
            explain=self._explain,
        )

    @property
    def name(self) -> str:
        """The hub's host, for messages and progress."""
        return self._connection.name

    async def resolve(self, repo: str, revision: str) -> str:
        """Return the commit that stands for the chosen files of a branch or a tag; `ModelHub` has the errors."""
        check_repo(repo)
        if is_commit(revision):
            return revision
        check_revision(revision)
        return self._commit_of(await self._list(repo, revision))

    async def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]:
        """Return the files of the branch, which must have the commit; `ModelHub` has the errors."""
        remote_files = await self._list(repo, self._branch)
        if self._commit_of(remote_files) != commit:
            raise ModelMissingError(
                f"{self.name} has other files in {self._branch} of {repo} now than those of {commit[:12]}, and gives "
                "no earlier ones: deploy the new ones (`fleetctl rollout refresh`), or pull the branch again"
            )
        return remote_files

    def read(
        self, repo: str, commit: str, file: RemoteFile, *, start: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a file at byte `start`; `ModelHub` has the errors."""
        check_repo(repo)
        query = urlencode({"Revision": self._branch, "FilePath": file.path})
        url = self._connection.url(f"/api/v1/models/{repo}/repo?{query}")
        what = f"{file.path} of {repo}@{commit[:12]}"
        return self._connection.read(url, what, start=start)

    def _commit_of(self, files: tuple[RemoteFile, ...]) -> str:
        chosen = select_files(files, self._patterns)
        return contents_version({file.path: file.digest for file in chosen})

    async def _list(self, repo: str, revision: str) -> tuple[RemoteFile, ...]:
        """Return all files; a folder whose list the hub has cut is asked for again, with its folders one by one."""
        check_repo(repo)
        found: dict[str, _Entry] = {}
        folders, requests = [""], 0
        while folders:
            folder = folders.pop()
            requests += 2
            if requests > MAX_LIST_REQUESTS:
                raise ListingRefusedError(
                    f"the files of {repo} take more than {MAX_LIST_REQUESTS} requests to list"
                )
            entries = await self._list_folder(repo, revision, folder, is_recursive=True)
            if len(entries) >= _LIST_LIMIT:
                entries = await self._list_folder(repo, revision, folder, is_recursive=False)
                if len(entries) >= _LIST_LIMIT:
                    raise ListingRefusedError(
                        f"{self.name} lists at most {_LIST_LIMIT} entries of a folder, and {folder or 'the root'} of "
                        f"{repo} has as many: its list may lack some"
                    )
                folders += [entry.path for entry in entries if entry.kind == "tree"]
            found |= {entry.path: entry for entry in entries if entry.kind != "tree"}
            if len(found) > MAX_FILES:
                raise ListingRefusedError(f"{repo} has more than {MAX_FILES} files")
        return tuple(self._remote_files(repo, found))

    async def _list_folder(
        self, repo: str, revision: str, folder: str, *, is_recursive: bool
    ) -> list[_Entry]:
        query = {"Revision": revision, "Recursive": str(is_recursive)}
        if folder:
            query["Root"] = folder
        url = self._connection.url(f"/api/v1/models/{repo}/repo/files?{urlencode(query)}")
        body, _ = await self._connection.get_json(url, f"revision {revision} of {repo}")
        try:
            return _Listing.model_validate_json(body).data.files
        except ValidationError as error:
            raise self._connection.foreign_error(f"list of files for {repo}") from error

    def _remote_files(self, repo: str, entries: dict[str, _Entry]) -> list[RemoteFile]:
        remote_files: list[RemoteFile] = []
        for path, entry in entries.items():
            if not entry.sha256 and not is_selected(path, self._patterns):
                continue
            try:
                digest = BlobDigest("sha256", entry.sha256 or "")
            except ValueError as error:
                raise ListingRefusedError(
                    f"{self.name} lists {path[:200]!r} of {repo} badly: {error}"
                ) from error
            remote_files.append(RemoteFile(path=path, size=entry.size, digest=digest))
        return remote_files

    def _explain(self, response: aiohttp.ClientResponse, what: str) -> ModelFetchError | None:
        if response.status == _FORBIDDEN and self._connection.has_token:
            return ModelGatedError(
                f"{self.name} gives {what} only to accounts that were admitted: apply on its page, and use a token of "
                "that account"
            )
        return None


def _credentials(token: str) -> dict[str, str]:
    """Return both headers that the hub reads tokens from: its older servers know the cookie only."""
    cookie = {"Cookie": f"m_session_id={token}"} if re.fullmatch(r"[\w.~-]+", token) else {}
    return {**bearer(token), **cookie}
