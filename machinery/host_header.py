"""The `Host` header of HTTP requests: whether its name is this machine's.

A web page can send requests to a private address under a name of its own (DNS rebinding), and then read the answers.
Such a request has the page's name in `Host`, which no other process uses for this machine.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(r"(\[[0-9a-f:.%]{2,60}\]|[^:\[\]@/\s]{1,253})(?::[0-9]{1,5})?")


def machine_names(*others: str) -> frozenset[str]:
    """Return the names of this machine in lower case: its loopback name, its host name and `others`."""
    host = socket.gethostname().lower()
    short = host.partition(".")[0]
    found = {"localhost", host, short, f"{short}.local", *(name.lower() for name in others)}
    return frozenset(found - {""})


def is_known(value: str, names: Iterable[str]) -> bool:
    """Return whether the value of a `Host` header has one of `names`, or an IP address.

    An address needs no check: a page under an address is served by the process that has it.
    """
    found = _HOST.fullmatch(value.strip().lower())
    if found is None:
        return False
    name = found[1].strip("[]").rstrip(".")
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_PLAIN: Final = ("http", "ws")


class HostCheck:
    """ASGI middleware: refuses requests under a name that is not this machine's.

    Under TLS the browser has compared the name with the certificate already.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], *, flag: str = "") -> None:
        """`flag`: the one that allows further names, such as --allowed-host."""
        self._app = app
        self._names = names
        self._flag = flag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 421 (Misdirected Request)."""
        host = dict(scope.get("headers", ())).get(b"host")
        if scope.get("scheme") not in _PLAIN or host is None:  # no page can leave the header out
            await self._app(scope, receive, send)
            return
        value = host.decode("latin-1")
        if is_known(value, self._names):
            await self._app(scope, receive, send)
            return
        message = (
            f"This server does not answer to the name '{value[:200]}': a web page could use it by having its own name "
            "point here. Use http://localhost, the host name or an address of this machine"
            + (f", or start the process with {self._flag}." if self._flag else ".")
        )
        error = {"message": message, "type": "invalid_request_error", "param": None}
        body = {"error": {**error, "code": "host_not_allowed"}}
        await JSONResponse(body, 421)(scope, receive, send)
