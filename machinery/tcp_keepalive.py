"""Finding out that the other end of a silent connection is gone without a word, such as a Mac that was unplugged."""

import socket
from contextlib import suppress

# The kernel asks after so many seconds of silence, then every 5 s; the connection ends with the third question that
# has no answer.
_IDLE_S, _PROBE_INTERVAL_S, _PROBES = 15, 5, 3
_UNACKNOWLEDGED_S = 30


def enable_keepalive(line: socket.socket) -> None:
    """Have the kernel ask whether the other end still lives."""
    with suppress(OSError):  # it has ended already
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The first is Linux' name for it, the second macOS'.
        idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
        if idle is not None:
            line.setsockopt(socket.IPPROTO_TCP, idle, _IDLE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        # While something is unacknowledged nothing is asked (tcp(7)); macOS gives that up after a while itself.
        unheard = getattr(socket, "TCP_USER_TIMEOUT", None)
        if unheard is not None:
            line.setsockopt(socket.IPPROTO_TCP, unheard, _UNACKNOWLEDGED_S * 1000)
