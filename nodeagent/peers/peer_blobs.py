"""Reading of files from other agents over TLS: each must prove that it is the node that it says."""

import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

import aiohttp

from identity.dialer import Dialer, UntrustedAddressError
from machinery.http_body import BodyTooLargeError, read_limited
from models.hub.digests import BlobDigest
from models.hub.threads import run_in_thread
from models.model_store.piece_list import MAX_LIST_BYTES, PieceList, decode_list
from schemas import local_network
from schemas.wire.blobs import PATH, RECEIVED

_TIMEOUT: Final = aiohttp.ClientTimeout(total=300.0, sock_connect=5.0, sock_read=15.0)
_READ_BYTES: Final = 1 << 18


class PeerError(Exception):
    """A peer did not answer, or broke off."""


def peer_error(node: str, url: str, error: Exception) -> PeerError:
    """Return the error for a failed connection to a node."""
    return PeerError(
        f"{node} at {url}: {local_network.failure_text(error, urlsplit(url).hostname or '')}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """The answer of a peer: bytes, or the reason why there are none."""

    status: int
    received: int = 0
    """Bytes that the peer has of the file, also those that it does not give yet."""
    chunks: AsyncIterator[bytes] | None = None


class PeerBlobs(Protocol):
    """The port to the files of other agents."""

    def read(
        self, node: str, url: str, digest: BlobDigest, start: int, count: int
    ) -> AbstractAsyncContextManager[PeerAnswer]:
        """Ask a node for at most `count` bytes from `start`. Raises PeerError, also while chunks are read."""
        ...

    async def read_list(self, node: str, url: str, sha256: str) -> PieceList:
        """Return a list of pieces, which must have this SHA-256. Raises PeerError."""
        ...


class HttpPeerBlobs:
    """`PeerBlobs` over the agents' API."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep connections between reads, until the end of the block: a file that still comes is read in many steps."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False) as http:
            self._session = http
            try:
                yield
            finally:
                self._session = None

    @asynccontextmanager
    async def read(
        self, node: str, url: str, digest: BlobDigest, start: int, count: int
    ) -> AsyncIterator[PeerAnswer]:
        """Ask a node for at most `count` bytes from `start`. Raises PeerError, also while chunks are read."""
        http = self._session
        if http is None:
            raise PeerError("this agent is starting or ending")
        try:
            dial = self._dialer.node(node, url)
            async with (
                http.get(
                    f"{url}{PATH}/{digest.hex}",
                    ssl=dial.ssl,
                    server_hostname=dial.server_hostname,
                    headers={
                        "range": f"bytes={start}-{start + count - 1}",
                        "accept-encoding": "identity",
                    },
                    allow_redirects=False,
                ) as response,
            ):
                known = response.headers.get(RECEIVED, "")[:18]
                received = int(known) if known.isascii() and known.isdigit() else 0
                if response.status != 206:
                    yield PeerAnswer(status=response.status, received=received)
                    return
                if not response.headers.get("content-range", "").startswith(f"bytes {start}-"):
                    raise PeerError(f"{node} sent another range than was asked for")
                chunks = _bounded(response.content.iter_chunked(_READ_BYTES), count)
                yield PeerAnswer(status=206, received=received, chunks=chunks)
        except (TimeoutError, aiohttp.ClientError, ssl.SSLError, OSError) as error:
            raise peer_error(node, url, error) from error
        except UntrustedAddressError as error:
            raise PeerError(str(error)) from error

    async def read_list(self, node: str, url: str, sha256: str) -> PieceList:
        """Return a list of pieces, which must have this SHA-256. Raises PeerError."""
        http = self._session
        if http is None:
            raise PeerError("this agent is starting or ending")
        try:
            dial = self._dialer.node(node, url)
            async with http.get(
                f"{url}{PATH}/{sha256}",
                ssl=dial.ssl,
                server_hostname=dial.server_hostname,
                headers={"accept-encoding": "identity"},
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise PeerError(f"{node} answers {response.status} for its list of pieces")
                content = await read_limited(response.content.iter_any(), MAX_LIST_BYTES)
            return await run_in_thread(_checked_list, content, sha256)
        except (TimeoutError, aiohttp.ClientError, ssl.SSLError, OSError) as error:
            raise peer_error(node, url, error) from error
        except (UntrustedAddressError, BodyTooLargeError, ValueError) as error:
            raise PeerError(f"{node}: {error}") from error


def _checked_list(content: bytes, sha256: str) -> PieceList:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError("its list of pieces is another one than it offers")
    return decode_list(content)


async def _bounded(chunks: AsyncIterator[bytes], count: int) -> AsyncIterator[bytes]:
    """Yield at most `count` bytes, whatever the peer sends."""
    async for chunk in chunks:
        yield chunk[:count]
        count -= len(chunk)
        if count <= 0:
            return
