"""The HTTP connection to one hub: redirects, ranges, limits of size and time, and errors by name.

Must not send the token to another host than the endpoint's. Must not know the paths of a hub: its adapter does.
"""

import asyncio
import ipaddress
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, NoReturn, TypeAlias

import aiohttp
from yarl import URL

from machinery import version
from machinery.http_body import BodyTooLargeError, read_limited
from models.hub.errors import (
    HubRateLimitedError,
    HubUnauthorizedError,
    HubUnreachableError,
    ListingRefusedError,
    ModelFetchError,
    ModelMissingError,
)
from models.hub.model_hub import DEFAULT_ENDPOINT

MAX_LIST_REQUESTS: Final = 100
"""Requests that the list of one repository may take."""
_MAX_JSON_BYTES: Final = 32 << 20
_MAX_ERROR_BYTES: Final = 8192
_MAX_REDIRECTS: Final = 6
_JSON_TIMEOUT_S: Final = 60.0
# A link that brings nothing for a minute is dead: the fetcher goes on with a new one.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=15.0, sock_read=60.0)
# The most that a hub's wish to wait is believed: its own windows are five minutes.
_MAX_WAIT_S: Final = 3600.0
_DEFAULT_WAIT_S: Final = 60.0
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REVISION_LENGTH: Final = 200

Credentials: TypeAlias = Callable[[str], Mapping[str, str]]
"""The headers that carry a token."""
Explanation: TypeAlias = Callable[[aiohttp.ClientResponse, str], ModelFetchError | None]
"""The error that a hub's own codes in a response mean; None to go by the status. The text names what was asked."""


@asynccontextmanager
async def open_hub_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open the HTTP session that hubs of one process share; it keeps no cookies."""
    async with aiohttp.ClientSession(
        timeout=_TIMEOUT,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": f"mlx-fleet/{version.version()}"},
    ) as session:
        yield session


def bearer(token: str) -> dict[str, str]:
    """Return the header that most hubs read a token from."""
    return {"Authorization": f"Bearer {token}"}


def check_revision(revision: str) -> None:
    """Refuse what is no branch, tag or commit.

    Raises:
        ValueError: it is not; the message says what is expected.

    """
    if not revision or len(revision) > _MAX_REVISION_LENGTH or not revision.isprintable():
        raise ValueError(
            f"{revision[:80]!r} is no revision; expected a branch, a tag or a commit, such as main"
        )


class HubConnection:
    """The requests to one endpoint, with its token if there is one."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        endpoint: str,
        token: str = "",
        credentials: Credentials | None = None,
        explain: Explanation | None = None,
    ) -> None:
        """`credentials` returns the headers that carry a token; None for `Authorization: Bearer`.

        They go to the endpoint's own host only.

        Raises:
            HubUnauthorizedError: the token is no token, or would be sent in clear.
            ValueError: the endpoint is no http or https address.

        """
        if not re.fullmatch(r"[!-~]{0,4096}", token):
            raise HubUnauthorizedError(
                "the token has characters that no token has; expected one line of ASCII"
            )
        self._session = session
        try:
            url = URL(endpoint)
        except ValueError as error:
            raise ValueError(f"{endpoint[:200]!r} is no address of a hub: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or url.query_string or url.user:
            raise ValueError(
                f"{endpoint[:200]!r} is no address of a hub; expected {DEFAULT_ENDPOINT}, or that of a mirror"
            )
        self._endpoint = url
        if token and self._endpoint.scheme == "http" and not _is_loopback(self._endpoint):
            raise HubUnauthorizedError(
                f"a token would cross the network unencrypted to {self.name}; use an https endpoint, or no token"
            )
        self._credentials = dict((credentials or bearer)(token)) if token else {}
        self._explain = explain

    @property
    def name(self) -> str:
        """The hub's host, for messages and progress."""
        return self._endpoint.authority

    @property
    def has_token(self) -> bool:
        """Return whether requests carry a token."""
        return bool(self._credentials)

    def url(self, path: str) -> URL:
        """Return the address of an encoded path and query below the endpoint."""
        return URL(str(self._endpoint).rstrip("/") + path, encoded=True)

    @asynccontextmanager
    async def read(
        self, url: URL, what: str, *, start: int = 0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a body at byte `start`, as `ModelHub.read`."""
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

    async def get_json(self, url: URL, what: str) -> tuple[bytes, URL | None]:
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
            own = self._credentials if is_own else {}
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
        """Raise the error that a response means."""
        if self._explain is not None and (known := self._explain(response, what)):
            raise known
        status = response.status
        if status == 404:
            raise self.missing_error(what)
        if status in (401, 403):
            raise HubUnauthorizedError(
                f"{self.name} refused the token for {what} ({status}): it is wrong, ended, or may not read it"
                if self.has_token
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

    def missing_error(self, what: str) -> ModelMissingError:
        """Return the error for what the hub does not have, or does not show."""
        private = "" if self.has_token else "; a private repository needs a token"
        return ModelMissingError(
            f"{self.name} has no {what}: compare the name with the hub's page{private}"
        )

    async def _error_text(self, response: aiohttp.ClientResponse) -> str:
        """Return the beginning of an error's body as a clause; "" if it is no text."""
        try:
            async with asyncio.timeout(5.0):
                body = await read_limited(response.content.iter_any(), _MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""
        text = body.decode(errors="replace").strip()
        return f": {text[:200]}" if text and text.isprintable() and "<" not in text else ""

    def foreign_error(self, what: str) -> HubUnreachableError:
        """Return the error for an answer of another form than a hub's."""
        return HubUnreachableError(
            f"{self.name} answers with no {what}: it is no model hub of this kind, or a page of a proxy"
        )

    def _broken(self, what: str, error: Exception) -> HubUnreachableError:
        reason = str(error).partition("?")[0] or type(error).__name__
        return HubUnreachableError(
            f"{self.name} cannot be reached or broke off at {what}: {reason}; "
            "check this machine's network and the endpoint"
        )


def _is_loopback(url: URL) -> bool:
    try:
        return ipaddress.ip_address(url.host or "").is_loopback
    except ValueError:
        return url.host == "localhost"


def _stated_wait_s(response: aiohttp.ClientResponse) -> float:
    """Return the seconds of `Retry-After`, or of the hub's `ratelimit: "api";r=0;t=55`."""
    for name, pattern in (("Retry-After", r"\s*(\d{1,9})\s*$"), ("ratelimit", r".*\bt=(\d{1,9})")):
        if found := re.match(pattern, response.headers.get(name, "")):
            return min(_MAX_WAIT_S, float(found[1]))
    return _DEFAULT_WAIT_S
