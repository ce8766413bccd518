"""Ports for processes that tests start.

A port that the system gave out a moment ago is soon given to somebody else: to another test's server, or as the near end
of any connection. So these come from below the range that the system takes from (Linux: 32768 and up, macOS: 49152), and
each worker of the test run has a range of its own.
"""

import os
import re
import socket
from itertools import count

# Above are the ranges that `tests.support.fleet.engine_port` gives out.
_FIRST, _RANGE, _WORKERS = 5_600, 400, 16

_turns = count(os.getpid())


def free_port() -> int:
    """Return a port that nobody listens on, and that nobody else is given."""
    number = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
    first = _FIRST + number % _WORKERS * _RANGE
    while True:
        port = first + next(_turns) % _RANGE
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
