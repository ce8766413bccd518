"""The `Host` header of HTTP requests: whether its name is this machine's.

A web page can send requests to a private address under a name of its own (DNS rebinding), and then read the answers.
Such a request has the page's name in `Host`, which no other process uses for this machine.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

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
