"""Limits of all client connections together: memory of unfinished request bodies, and open files."""

import heapq
import logging
from collections.abc import Callable, Collection
from typing import Final, Literal, Protocol, TypeAlias

from machinery.clock import Clock

log = logging.getLogger(__name__)

ShedReason: TypeAlias = Literal["address", "body_memory", "handshake", "idle", "refused"]
"""address: a new connection of an address that has as many as one may have. body_memory: a body for which there is no memory. handshake: an unfinished TLS handshake, ended to make room for
another. idle: an idle connection, closed to free its file descriptor. refused: a new connection, because no connection
was idle."""

# Room for the journal, the saved state and connections to etcd and engines that open at the same moment.
_LEAST_SPARE, _MOST_SPARE = 8, 256
# The part of the idle connections that is closed at once, so that the next new connections need no search.
_CLOSED_AT_ONCE = 16
_LOG_INTERVAL_S = 10.0
USUAL_CONNECTIONS: Final = 1024
"""Connections that one address of another machine may have, unless the operator says otherwise."""


class BodyMemory:
    """Memory of the unfinished request bodies of all connections.

    A body that arrives in one read is never unfinished: however full the memory is, small requests pass.
    """

    def __init__(self, limit: int, on_shed: Callable[[ShedReason], None]) -> None:
        """`limit`: in bytes. `on_shed`: called when there is no room."""
        self.limit = limit
        self.used = 0
        self._on_shed = on_shed

    def take(self, size: int) -> bool:
        """Count `size` more bytes; return whether there is room for them. They are counted only then."""
        if self.used + size > self.limit:
            self._on_shed("body_memory")
            return False
        self.used += size
        return True

    def free(self, size: int) -> None:
        """Count `size` bytes no more."""
        self.used -= size


class SheddableConnection(Protocol):
    """A client connection that can be closed to free its file descriptor."""

    deadline_s: float
    """Time at which the connection is closed if nothing arrives."""
    has_begun: bool
    """True while a request arrives."""

    @property
    def is_serving(self) -> bool:
        """True while a request is answered."""
        ...

    def shed(self) -> None:
        """Close the connection at once."""
        ...


class ConnectionLimit:
    """Keeps file descriptors free for engines and etcd: closes the longest idle client connections first.

    Without it the kernel resets new connections of all clients when the process has no descriptor left, and requests
    fail because no connection to an engine can be opened.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_files: int,
        count_files: Callable[[], int],
        count_engines: Callable[[], int],
        on_shed: Callable[[ShedReason], None],
    ) -> None:
        """`max_files`: the limit of open files; 0: none. `count_engines`: connections to engines."""
        self._clock = clock
        self._max_files = max_files
        self._count_files = count_files
        self._count_engines = count_engines
        self._on_shed = on_shed
        self._spare = min(max(max_files // 32, _LEAST_SPARE), _MOST_SPARE)
        self._other_files = 0
        """Open files besides the connections of clients and engines."""
        self._closed_count = self._refused_count = 0
        """Connections since the last line of the log."""
        self._logged_s = -_LOG_INTERVAL_S

    def measure(self, clients: int) -> None:
        """Count the process's other files. Cheap while few files are open: listing thousands takes milliseconds."""
        connections = clients + self._count_engines()
        if self._max_files and connections + self._other_files + _MOST_SPARE > self._max_files // 2:
            self._other_files = max(0, self._count_files() - connections)

    def has_room(self, clients: int) -> bool:
        """Return whether enough files are left with so many client connections."""
        if not self._max_files:
            return True
        used = clients + self._count_engines() + self._other_files
        return used + self._spare <= self._max_files

    def make_room(self, connections: Collection[SheddableConnection]) -> bool:
        """Close the longest idle connections, unfinished requests last; return False if all are being served."""
        idle = [connection for connection in connections if not connection.is_serving]
        count = max(1, len(connections) // _CLOSED_AT_ONCE)
        for connection in heapq.nsmallest(
            count, idle, key=lambda one: (one.has_begun, one.deadline_s)
        ):
            connection.shed()
            self._on_shed("idle")
            self._closed_count += 1
        self._log()
        return bool(idle)

    def refuse(self) -> None:
        """Count a new connection that is refused."""
        self._on_shed("refused")
        self._refused_count += 1
        self._log()

    def _log(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._logged_s < _LOG_INTERVAL_S:
            return
        log.warning(
            "the limit of open files is reached; closing idle client connections. Raise it with ulimit -n",
            extra={
                "limit": self._max_files,
                "closed": self._closed_count,
                "refused": self._refused_count,
            },
        )
        self._logged_s, self._closed_count, self._refused_count = now_s, 0, 0
