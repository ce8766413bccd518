"""HTTP requests of an agent to its engines, on ports with and without TLS, and on sockets."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from machinery.http_body import read_limited
from nodeagent.engines.tls import NodeTls
from schemas.wire.engine_address import EngineAddress


class EngineHttp:
    """Sends requests to engines. Call `close()` when done."""

    def __init__(self, tls: NodeTls | None = None) -> None:
        """`tls`: the node's identity. Without it engines with TLS are asked in plain HTTP, which they may refuse."""
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def get(
        self, address: EngineAddress, path: str, *, limit_s: float, max_bytes: int
    ) -> bytes:
        """Return the body of an answer, whatever its status.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: the engine does not answer within the limit.
            ValueError: the body is larger than `max_bytes`.

        """
        async with (
            self._client(address) as session,
            session.get(
                f"{self._url(address)}{path}",
                timeout=aiohttp.ClientTimeout(total=limit_s),
                allow_redirects=False,
                **self._options(address),
            ) as response,
        ):
            return await read_limited(response.content.iter_any(), max_bytes)

    async def post(
        self,
        address: EngineAddress,
        path: str,
        body: Mapping[str, object] | aiohttp.FormData,
        *,
        limit_s: float,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer to JSON or a form. Raises what `get` does."""
        async with (
            self._client(address) as session,
            session.post(
                f"{self._url(address)}{path}",
                json=None if isinstance(body, aiohttp.FormData) else body,
                data=body if isinstance(body, aiohttp.FormData) else None,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=limit_s),
                allow_redirects=False,
                **self._options(address),
            ) as response,
        ):
            return response.status, await read_limited(response.content.iter_any(), max_bytes)

    def _url(self, address: EngineAddress) -> str:
        return (address if self._tls is not None else address._replace(node="")).http_url

    def _options(self, address: EngineAddress) -> dict[str, Any]:
        """Return the options of a request for the engine's TLS."""
        if self._tls is None or not address.node:
            return {}
        return {"ssl": self._tls.context, "server_hostname": self._tls.server_name}

    @asynccontextmanager
    async def _client(self, address: EngineAddress) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield the session for the engine.

        aiohttp binds a session to one socket, and a connection to a socket costs next to nothing. So each request has
        its own there, and no session is left when an engine is gone.
        """
        if address.socket:
            connector = aiohttp.UnixConnector(address.socket)
            async with aiohttp.ClientSession(connector=connector) as session:
                yield session
            return
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        yield self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
