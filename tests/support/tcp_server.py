"""A server of raw TCP or TLS whose behaviour a test writes: malformed, silent and slow peers."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@asynccontextmanager
async def tcp_server(
    handler: Handler, *, port: int = 0, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Run a server on 127.0.0.1 that calls the handler for each connection; yield its port.

    A connection is closed when its handler returns, and every handler is cancelled with the server, so no test leaves
    an open socket to the next. A peer that goes away ends its handler; every other error of a handler is raised here.
    """
    handlers: set[asyncio.Task[None]] = set()
    writers: set[asyncio.StreamWriter] = set()
    errors: list[Exception] = []
    is_over = False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_over:  # accepted before the end, served after it
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        writers.add(writer)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except Exception as error:  # noqa: BLE001 - raised where the server ends
            errors.append(error)
        finally:
            handlers.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        is_over = True
        server.close()
        for task in tuple(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # an aborted connection is closed in the next turn of the loop
    if errors:
        raise errors[0]
