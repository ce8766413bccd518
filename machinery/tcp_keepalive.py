"""TCP keepalive: detects that the other end of an idle connection is gone, such as a Mac that was unplugged."""

import socket
from contextlib import suppress

# The kernel sends a probe after 15 s of silence and then every 5 s; after three unanswered probes it closes the connection.
_IDLE_S, _PROBE_INTERVAL_S, _PROBES = 15, 5, 3
_UNACKNOWLEDGED_S = 30


def enable_keepalive(connection: socket.socket) -> None:
    """Make the kernel probe whether the other end is alive, and close the connection if it is not."""
    with suppress(OSError):  # it is closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Linux has the first name, macOS the second.
        idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
        if idle is not None:
            connection.setsockopt(socket.IPPROTO_TCP, idle, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        # Linux sends no probes while data is unacknowledged (tcp(7)); macOS gives such a connection up by itself.
        user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
        if user_timeout is not None:
            connection.setsockopt(socket.IPPROTO_TCP, user_timeout, _UNACKNOWLEDGED_S * 1000)
