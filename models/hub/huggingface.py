"""The adapter to Hugging Face's hub and its mirrors, over plain HTTP. Must not send the token to another host."""

import asyncio
import ipaddress
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NoReturn
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from yarl import URL

from machinery import version
from machinery.http_body import BodyTooLargeError, read_limited
from models.hub.digests import BlobDigest
from models.hub.errors import (
    HubRateLimitedError,
    HubUnauthorizedError,
    HubUnreachableError,
    ListingRefusedError,
    ModelGatedError,
    ModelMissingError,
)
from models.hub.file_selection import MAX_FILES
from models.hub.model_hub import DEFAULT_ENDPOINT, RemoteFile, check_repo, is_commit

_MAX_JSON_BYTES: Final = 32 << 20
_MAX_ERROR_BYTES: Final = 8192
_MAX_PAGES: Final = 100
_MAX_REDIRECTS: Final = 6
_JSON_TIMEOUT_S: Final = 60.0
# A link that brings nothing for a minute is dead: the fetcher goes on with a new one.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=15.0, sock_read=60.0)
_MAX_REVISION_LENGTH: Final = 200
# The most that a hub's wish to wait is believed: its own windows are five minutes.
_MAX_WAIT_S: Final = 3600.0
_DEFAULT_WAIT_S: Final = 60.0
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
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


@asynccontextmanager
async def open_hub_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open the HTTP session that hubs of one process share; it keeps no cookies."""
    async with aiohttp.ClientSession(
        timeout=_TIMEOUT,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": f"mlx-fleet/{version.version()}"},
    ) as session:
        yield session


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
        if not re.fullmatch(r"[!-~]{0,4096}", token):
            raise HubUnauthorizedError(
                "the token has characters that no token has; expected one line of ASCII"
            )
        self._session = session
        self._endpoint = _parse_endpoint(endpoint)
        if token and self._endpoint.scheme == "http" and not _is_loopback(self._endpoint):
            raise HubUnauthorizedError(
                f"a token would cross the network unencrypted to {self.name}; use an https endpoint, or no token"
            )
        self._token = token

    @property
    def name(self) -> str:
        """The hub's host, for messages and progress."""
        return self._endpoint.authority

    async def resolve(self, repo: str, revision: str) -> str:
        """Return the commit that a branch, a tag or a commit is now; `ModelHub` has the errors."""
        check_repo(repo)
        if is_commit(revision):
            return revision
        if not revision or len(revision) > _MAX_REVISION_LENGTH or not revision.isprintable():
            raise ValueError(
                f"{revision[:80]!r} is no revision; expected a branch, a tag or a commit, such as main"
            )
        url = self._url(f"/api/models/{repo}/revision/{quote(revision, safe='')}")
        body, _ = await self._get_json(url, f"revision {revision} of {repo}")
        try:
            return _RevisionInfo.model_validate_json(body).sha
        except ValidationError as error:
            raise HubUnreachableError(
                f"{self.name} answers {url.path} with no commit: it is no model hub, or a page of a proxy"
            ) from error

    async def files(self, repo: str, commit: str) -> tuple[RemoteFile, ...]:
        """Return all files of a commit; `ModelHub` has the errors."""
        check_repo(repo)
        url: URL | None = self._url(
            f"/api/models/{repo}/tree/{quote(commit, safe='')}?recursive=true&expand=false"
        )
        found: list[RemoteFile] = []
        pages = 0
        while url is not None:
            pages += 1
            if pages > _MAX_PAGES:
                raise ListingRefusedError(f"{repo} has more than {_MAX_PAGES} pages of files")
            body, url = await self._get_json(url, f"the files of {repo}@{commit[:12]}")
            found += self._parse_tree(body, repo)
            if len(found) > MAX_FILES:
                raise ListingRefusedError(f"{repo} has more than {MAX_FILES} files")
        return tuple(found)

    def _parse_tree(self, body: bytes, repo: str) -> list[RemoteFile]:
        try:
            entries = _TREE_ADAPTER.validate_json(body)
        except ValidationError as error:
            raise HubUnreachableError(
                f"{self.name} answers with no list of files for {repo}: it is no model hub, or a page of a proxy"
            ) from error
        try:
            return [_remote_file(entry) for entry in entries if entry.type == "file"]
        except ValueError as error:
            raise ListingRefusedError(
                f"{self.name} lists a file of {repo} badly: {error}"
            ) from error

    @asynccontextmanager
    async def read(
        self, repo: str, commit: str, file: RemoteFile, *, start: int = 0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a file at byte `start`; `ModelHub` has the errors."""
        check_repo(repo)
        what = f"{file.path} of {repo}@{commit[:12]}"
        url = self._url(f"/{repo}/resolve/{quote(commit, safe='')}/{quote(file.path)}")
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        async with self._open(url, headers, what) as response:
            skip = self._bytes_to_skip(response, start, what)
            yield self._chunks(response, skip, what)

    def _bytes_to_skip(self, response: aiohttp.ClientResponse, start: int, what: str) -> int:
        """Return how many bytes of the body come before `start`: all of them if the server ignores ranges."""
        if not start or response.status == 200:
            return start
        stated = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if stated is None or int(stated[1]) != start:
            raise HubUnreachableError(
                f"{self.name} answers another range of {what} than bytes {start} to the end"
            )
        return 0

    async def _chunks(
        self, response: aiohttp.ClientResponse, skip: int, what: str
    ) -> AsyncIterator[bytes]:
        try:
            async for chunk in response.content.iter_any():
                if skip >= len(chunk):
                    skip -= len(chunk)
                    continue
                yield chunk[skip:]
                skip = 0
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(what, error) from error

    async def _get_json(self, url: URL, what: str) -> tuple[bytes, URL | None]:
        """Return a JSON body, and the address of the next page."""
        try:
            async with asyncio.timeout(_JSON_TIMEOUT_S), self._open(url, {}, what) as response:
                body = await read_limited(response.content.iter_any(), _MAX_JSON_BYTES)
                link = response.links.get("next")
                return body, self._next_page(link.get("url") if link else None, what)
        except BodyTooLargeError as error:
            raise ListingRefusedError(f"{self.name}: {what}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(what, error) from error

    def _next_page(self, link: object, what: str) -> URL | None:
        if link is None:
            return None
        url = URL(str(link), encoded=True)
        if url.origin() != self._endpoint.origin():
            raise ListingRefusedError(f"{self.name}: {what}: the next page is on another host")
        return url

    @asynccontextmanager
    async def _open(
        self, url: URL, headers: dict[str, str], what: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the successful response at the end of the redirects."""
        visited: set[URL] = set()
        while True:
            if url in visited or len(visited) >= _MAX_REDIRECTS:
                raise HubUnreachableError(
                    f"{self.name} redirects {what} in a loop, or more than {_MAX_REDIRECTS} times"
                )
            visited.add(url)
            # The token stays with the endpoint: a redirect may lead to any host.
            is_own = url.origin() == self._endpoint.origin()
            own = {"Authorization": f"Bearer {self._token}"} if self._token and is_own else {}
            try:
                response = await self._session.get(
                    url, headers={**headers, **own}, allow_redirects=False
                )
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                raise self._broken(what, error) from error
            async with response:
                if response.status in (200, 206):
                    yield response
                    return
                if response.status not in _REDIRECTS:
                    await self._raise_for(response, what)
                url = self._redirect_target(url, response, what)

    def _redirect_target(self, url: URL, response: aiohttp.ClientResponse, what: str) -> URL:
        try:
            target = url.join(URL(response.headers.get("Location", ""), encoded=True))
            is_web = target.scheme in ("http", "https") and bool(target.host)
        except ValueError:
            target, is_web = url, False
        is_downgrade = url.scheme == "https" and target.scheme != "https"
        if not is_web or is_downgrade:
            raise HubUnreachableError(
                f"{self.name} redirects {what} to {str(target.with_query(None))[:200]!r}; expected https"
            )
        return target

    async def _raise_for(self, response: aiohttp.ClientResponse, what: str) -> NoReturn:
        """Raise the error that a status and the hub's error code mean."""
        code = response.headers.get("X-Error-Code", "")
        status = response.status
        if code == "GatedRepo":
            raise ModelGatedError(
                f"{self.name} gives {what} only to accounts that accepted its terms: accept them on its page, "
                "and use a token of that account"
            )
        if status == 404 or code in _MISSING_CODES:
            private = "" if self._token else "; a private repository needs a token"
            raise ModelMissingError(
                f"{self.name} has no {what}: compare the name with the hub's page{private}"
            )
        if status in (401, 403):
            raise HubUnauthorizedError(
                f"{self.name} refused the token for {what} ({status}): it is wrong, ended, or may not read it"
                if self._token
                else f"{self.name} wants a token for {what} ({status}): it is private, gated or does not exist"
            )
        if status == 429:
            wait_s = _stated_wait_s(response)
            raise HubRateLimitedError(
                f"{self.name} limits the rate of requests and asks to wait {wait_s:.0f} s",
                retry_after_s=wait_s,
            )
        text = await self._error_text(response)
        raise HubUnreachableError(f"{self.name} answers {status} for {what}{text}")

    async def _error_text(self, response: aiohttp.ClientResponse) -> str:
        """Return the beginning of an error's body as a clause; "" if it is no text."""
        try:
            async with asyncio.timeout(5.0):
                body = await read_limited(response.content.iter_any(), _MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""
        text = body.decode(errors="replace").strip()
        return f": {text[:200]}" if text and text.isprintable() and "<" not in text else ""

    def _broken(self, what: str, error: Exception) -> HubUnreachableError:
        reason = str(error).partition("?")[0] or type(error).__name__
        return HubUnreachableError(
            f"{self.name} cannot be reached or broke off at {what}: {reason}; "
            "check this machine's network and the endpoint"
        )

    def _url(self, path: str) -> URL:
        return URL(str(self._endpoint).rstrip("/") + path, encoded=True)


def _parse_endpoint(endpoint: str) -> URL:
    try:
        url = URL(endpoint)
    except ValueError as error:
        raise ValueError(f"{endpoint[:200]!r} is no address of a hub: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query_string or url.user:
        raise ValueError(
            f"{endpoint[:200]!r} is no address of a hub; expected {DEFAULT_ENDPOINT}, or that of a mirror"
        )
    return url


def _is_loopback(url: URL) -> bool:
    try:
        return ipaddress.ip_address(url.host or "").is_loopback
    except ValueError:
        return url.host == "localhost"


def _remote_file(entry: _TreeEntry) -> RemoteFile:
    if entry.lfs is not None:
        digest = BlobDigest("sha256", entry.lfs.oid.removeprefix("sha256:"))
        return RemoteFile(path=entry.path, size=entry.lfs.size, digest=digest)
    return RemoteFile(path=entry.path, size=entry.size, digest=BlobDigest("git-sha1", entry.oid))


def _stated_wait_s(response: aiohttp.ClientResponse) -> float:
    """Return the seconds of `Retry-After`, or of the hub's `ratelimit: "api";r=0;t=55`."""
    for name, pattern in (("Retry-After", r"\s*(\d{1,9})\s*$"), ("ratelimit", r".*\bt=(\d{1,9})")):
        if found := re.match(pattern, response.headers.get(name, "")):
            return min(_MAX_WAIT_S, float(found[1]))
    return _DEFAULT_WAIT_S
