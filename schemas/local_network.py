"""The one wording of "no route to host" (EHOSTUNREACH), which is how macOS keeps a program from the local network.

From macOS 15 on, programs of Terminal and ssh, their children and launchd's daemons are exempt (Apple's TN3179). An exempt
program loses the exemption when its Terminal or ssh session ends: the socket fails with "No route to host" on the local
network, and loopback and the Internet go on (NVIDIA/Personal-AI-Router#3).
"""

import errno
import ipaddress
import os
import ssl
import sys
from socket import gaierror
from typing import Final

NAME: Final = "local network privacy"
REMEDY: Final = (
    "run the program as a LaunchDaemon, which macOS lets through (`sudo fleetctl service install nodeagent`; a fleet of "
    "`fleetctl up`: `fleetctl up --detach --join ADDRESS`); a program of a logged-in user needs the switch in System "
    "Settings > Privacy & Security > Local Network"
)
# For carriers and overlay networks, RFC 6598: Python calls it neither private nor global.
_SHARED: Final = ipaddress.IPv4Network("100.64.0.0/10")


def has_no_route(error: BaseException) -> bool:
    """Return whether a connection failed with EHOSTUNREACH: also aiohttp's errors, which wrap the system's."""
    inner = getattr(error, "os_error", error)
    return isinstance(inner, OSError) and inner.errno == errno.EHOSTUNREACH


def is_local(host: str) -> bool:
    """Return whether a host belongs to a network that local network privacy covers: never loopback or the Internet."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.endswith(".local") or "." not in host
    is_overlay = address.version == 4 and address in _SHARED
    return address.is_private and not address.is_loopback and not is_overlay


def failure_text(error: BaseException, host: str, *, platform: str = sys.platform) -> str:
    """Return why a connection to a host failed, with the remedy if local network privacy is the probable reason.

    `platform`: that of this process; tests give another.
    """
    inner = getattr(error, "os_error", error)
    text = str(error) or type(error).__name__
    # TLS and the resolver number their errors otherwise.
    if (
        isinstance(inner, OSError)
        and not isinstance(inner, ssl.SSLError | gaierror)
        and inner.errno
    ):
        # Not the message of asyncio and aiohttp, which repeats the address and leaves out the reason.
        text = os.strerror(inner.errno)
    if not (has_no_route(error) and platform == "darwin" and is_local(host)):
        return text
    return (
        f"{text}: the Mac at {host} is off, or macOS keeps this program from it ({NAME}); {REMEDY}"
    )
