"""Listeners accept the connections of a listening socket.

    listener = PlainListener(sock, make_protocol)
    listener.close()
    await listener.wait_closed()

uvloop's own server accepts one connection in each turn of the event loop: the last of a thousand new clients of a busy
process waits for a thousand turns.
"""

import asyncio
import errno
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from typing_extensions import override

# Few enough that processes with one listening socket share a burst of new clients.
_ACCEPTS_AT_ONCE: Final = 8
_OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OUT_OF_FILES_PAUSE_S: Final = 1.0

log = logging.getLogger(__name__)


class ConnectionListener(ABC):
    """Accepts connections until it is closed, many in a turn of the event loop. Pauses while no file is free."""

    def __init__(self, listener: socket.socket) -> None:
        """Begin to accept; the socket stays the caller's."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listener.settimeout(0)
        self._resume()

    @abstractmethod
    def take(self, connection: socket.socket, peer: object) -> None:
        """Take a connection that was accepted, and the address of its peer."""

    def free_file(self) -> bool:
        """Close a connection whose file another one needs; return False if there is none."""
        return False

    def close(self) -> None:
        """Accept no more connections; those that were accepted go on."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait for the connections that were accepted and not served yet."""

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                if self.free_file():  # the loop calls again at once
                    return
                log.warning("no connection accepted", extra={"why": error.strerror})
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_OUT_OF_FILES_PAUSE_S, self._resume)
                return
            connection.settimeout(0)
            self.take(connection, peer)


class PlainListener(ConnectionListener):
    """Hands each connection over at once."""

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._make_protocol = make_protocol
        self._tasks: set[asyncio.Task[Any]] = set()
        super().__init__(listener)

    @override
    def take(self, connection: socket.socket, peer: object) -> None:
        served = self._loop.connect_accepted_socket(self._make_protocol, connection)
        task = self._loop.create_task(served)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @override
    async def wait_closed(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)
