"""A client that writes raw bytes to a gateway and parses the responses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

CHAT = "/v1/chat/completions"
_PATIENCE_S = 10


def post(
    body: bytes = b'{"model":"m"}', *more: str, path: str = CHAT, version: str = "1.1"
) -> bytes:
    """Return a complete request."""
    lines = [f"POST {path} HTTP/{version}", "host: gateway", f"content-length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path: str, *more: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: gateway", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """One response, its body without framing."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        """The code in OpenAI's error envelope."""
        error = orjson.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        code: str | None = error["code"]
        return code


@dataclass(frozen=True)
class RawClient:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes, pause_s: float = 0.01) -> None:
        """Write the pieces, with a pause after each so that it arrives by itself."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(pause_s)

    async def answer(self, *, is_head: bool = False) -> Answer:
        """Read one response."""
        async with asyncio.timeout(_PATIENCE_S):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = [line.split(": ", 1) for line in lines if line]
            headers = {name.lower(): value for name, value in pairs}
            body = b"" if is_head else await self._body(headers)
        return Answer(int(first.split(" ")[1]), headers, body)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        body = b""
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            body += (await self.reader.readexactly(size + 2))[:-2]
            if not size:
                return body

    async def line(self) -> bytes:
        async with asyncio.timeout(_PATIENCE_S):
            return await self.reader.readuntil(b"\r\n")

    async def is_closed(self) -> bool:
        """Wait for the gateway to close; return whether it sent nothing more."""
        async with asyncio.timeout(_PATIENCE_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RawClient]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
