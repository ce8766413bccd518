"""A server that answers with raw bytes, split and closed as a test demands."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from schemas.wire.engine_address import EngineAddress
from tests.support.tcp_server import tcp_server

Answering = Callable[[asyncio.StreamWriter], Awaitable[object]]
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
)


class Server:
    """Answers each request with the next of its answers, and repeats the last."""

    def __init__(self, *answers: Answering | bytes) -> None:
        self._answers = list(answers)
        self.connections = 0
        self.requests = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.ended += 1


@asynccontextmanager
async def serving(*answers: Answering | bytes) -> AsyncIterator[tuple[Server, EngineAddress]]:
    server = Server(*answers)
    async with tcp_server(server.serve) as port:
        yield server, EngineAddress("127.0.0.1", port)


def in_steps(data: bytes, size: int) -> Answering:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await writer.drain()
            await asyncio.sleep(0.0005)

    return answer


def then_closing(data: bytes, *, is_abrupt: bool = False) -> Answering:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.01)
        if is_abrupt:
            writer.transport.abort()
        else:
            writer.close()

    return answer
