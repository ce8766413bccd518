"""TCP keepalive: detects that the other end of an idle connection is gone, such as a Mac that was unplugged."""

import socket
from contextlib import suppress

# Unanswered probes after which the kernel closes the connection.
_PROBES = 3


def enable_keepalive(connection: socket.socket, *, idle_s: int = 15, interval_s: int = 5) -> None:
    """Make the kernel probe whether the other end is alive, and close the connection if it is not.

    The first probe is sent after `idle_s` of silence, the others every `interval_s`.
    """
    with suppress(OSError):  # it is closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Linux has the first name, macOS the second.
        idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
        if idle is not None:
            connection.setsockopt(socket.IPPROTO_TCP, idle, idle_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        # Linux sends no probes while data is unacknowledged (tcp(7)); macOS gives such a connection up by itself.
        user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
        if user_timeout is not None:
            limit_s = idle_s + _PROBES * interval_s
            connection.setsockopt(socket.IPPROTO_TCP, user_timeout, limit_s * 1000)
