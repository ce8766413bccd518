"""Keep-alive times of HTTP connections, in seconds.

The client of a connection must give it up before the server does: a server that closes an idle connection
races with the next request on it.
"""

from typing import Final

SERVER_KEEP_ALIVE_S: Final = 75
"""An idle connection is closed by an engine or a gateway after this time. nginx has the same default.

Also one that has not sent a request yet (engine/api/connections.py).
"""
POOL_IDLE_S: Final = 60.0
"""An idle connection to an external server is closed by the gateway after this time; less than `SERVER_KEEP_ALIVE_S`."""
