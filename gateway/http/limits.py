"""Limits of all client connections together: memory of request bodies, and open files. That of one body: `HeadCheck`."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from machinery.clock import Clock

log = logging.getLogger(__name__)

ShedReason: TypeAlias = Literal["address", "body_memory", "handshake", "idle", "refused"]
"""address: a new connection of an address that has as many as one may have. body_memory: a body for which there is no memory. handshake: an unfinished TLS handshake, ended to make room for
another. idle: an idle connection, closed to free its file descriptor. refused: a new connection, because no connection
was idle."""

# Room for the journal, the saved state, connections to etcd and engines that open at the same moment, and clients that
# are accepted before they are counted.
_LEAST_SPARE, _MOST_SPARE = 16, 256
_LOG_INTERVAL_S = 10.0
USUAL_CONNECTIONS: Final = 1024
"""Connections that one address of another machine may have, unless the operator says otherwise."""


class BodyMemory:
    """Memory of the request bodies of all connections, from their first bytes until their requests have ended.

    Half of it is the most that the bodies of one API key take. A complete body of up to `SMALL` bytes is not counted:
    however full the memory is, small requests pass.
    """

    SMALL: Final = 64 << 10

    def __init__(self, limit: int, largest: int, on_shed: Callable[[ShedReason], None]) -> None:
        """`limit`: in bytes. `largest`: a body that must have room. `on_shed`: called when there is no room."""
        self.limit = max(limit, largest)
        self.share = max(self.limit // 2, largest)
        """The limit of one key."""
        self.used = 0
        self._by_owner = Counter[str]()
        self._on_shed = on_shed

    def take(self, owner: str, size: int) -> bool:
        """Count `size` more bytes; return whether there is room for them. They are counted only then.

        `owner`: the identity of an API key; empty: a client without one.
        """
        own = self._by_owner[owner] + size
        if self.used + size > self.limit or (owner and own > self.share):
            self._on_shed("body_memory")
            return False
        self.used += size
        self._by_owner[owner] = own
        return True

    def free(self, owner: str, size: int) -> None:
        """Count `size` bytes no more."""
        self.used -= size
        self._by_owner[owner] -= size
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class FileLimit:
    """Keeps file descriptors free for engines and etcd: says when idle client connections must be closed.

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
        self._counts: Counter[str] = Counter()
        """Closed and refused connections since the last line of the log."""
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

    def count(self, reason: Literal["idle", "refused"]) -> None:
        """Count a connection that was closed, or refused."""
        self._on_shed(reason)
        self._counts[reason] += 1
        now_s = self._clock.monotonic()
        if now_s - self._logged_s < _LOG_INTERVAL_S:
            return
        log.warning(
            "the limit of open files is reached; closing idle client connections. Raise it with ulimit -n",
            extra={
                "limit": self._max_files,
                "closed": self._counts["idle"],
                "refused": self._counts["refused"],
            },
        )
        self._logged_s, self._counts = now_s, Counter()
