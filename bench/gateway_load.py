"""The load generator of `bench.gateway`: raw protocols on kept-alive connections, times in seconds."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast

from typing_extensions import override

_PATH = b"/v1/chat/completions"
_LAST_CHUNK = b"0\r\n\r\n"


def request(*, is_streamed: bool) -> bytes:
    """Return a whole HTTP request with a prompt of 1 kB."""
    stream = b',"stream":true' if is_streamed else b""
    prompt = b"word " * 200
    body = b'{"model":"bench"%b,"messages":[{"role":"user","content":"%b"}]}' % (stream, prompt)
    head = b"POST %b HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n" % _PATH
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass
class Times:
    """What was measured."""

    first_byte: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0

    def add(self, other: "Times") -> None:
        self.first_byte += other.first_byte
        self.whole += other.whole
        self.elapsed_s += other.elapsed_s


class Client(asyncio.Protocol):
    """One connection that asks, reads to the end and asks again until the time is over."""

    def __init__(
        self, raw: bytes, until_s: float, times: Times, ended: asyncio.Future[None]
    ) -> None:
        self._raw, self._until_s, self._times, self._ended = raw, until_s, times, ended
        self._is_streamed = b'"stream":true' in raw
        self._transport: asyncio.Transport | None = None
        self._began_s = 0.0
        self._expected = 0
        self._seen = 0
        self._tail = b""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server closed the connection")

    def _fail(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(RuntimeError(why))

    def _ask(self) -> None:
        assert self._transport is not None
        self._seen = self._expected = 0
        self._tail = b""
        self._began_s = time.perf_counter()
        self._transport.write(self._raw)

    @override
    def data_received(self, data: bytes) -> None:
        if not self._seen:
            self._times.first_byte.append(time.perf_counter() - self._began_s)
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(f"not answered: {data[:300]!r}")
                return
        self._seen += len(data)
        if self._is_complete(data):
            self._times.whole.append(time.perf_counter() - self._began_s)
            if time.perf_counter() < self._until_s:
                self._ask()
            elif not self._ended.done():
                self._ended.set_result(None)

    def _is_complete(self, data: bytes) -> bool:
        if self._is_streamed:
            self._tail = (self._tail + data)[-5:]
            return self._tail == _LAST_CHUNK
        if not self._expected:
            head, _, _ = data.partition(b"\r\n\r\n")
            length = head.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0]
            self._expected = len(head) + 4 + int(length)
        return self._seen >= self._expected


async def burst(port: int, *, connections: int, is_streamed: bool, seconds: float) -> Times:
    """Load a server for a while; return every request's times.

    Raises:
        RuntimeError: something but a 200 came back.

    """
    loop, times = asyncio.get_running_loop(), Times()
    raw = request(is_streamed=is_streamed)
    began_s = time.perf_counter()
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(connections)]
    opened = [
        await loop.create_connection(
            lambda end=end: Client(raw, began_s + seconds, times, end),  # type: ignore[misc]  # bound early
            "127.0.0.1",
            port,
        )
        for end in ends
    ]
    try:
        async with asyncio.timeout(seconds + 10):
            await asyncio.gather(*ends)
    finally:
        for transport, _ in opened:
            transport.abort()
    times.elapsed_s = time.perf_counter() - began_s
    return times
