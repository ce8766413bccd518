"""Address of a Mac in `fleetctl node` commands: user@host, with a port if it is not 22."""

import re
from dataclasses import dataclass
from typing import Final

import click
from typing_extensions import override

_PORT: Final = 22
# A leading hyphen would be a flag of some program; the rest is what DNS, Bonjour and IPv6 zones need.
_HOST: Final = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,253}")
_USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTarget:
    """A Mac, and the user to log in as."""

    user: str
    """The user; empty only for a host of ProxyJump until ssh's configuration has named one."""
    host: str
    port: int = _PORT

    @override
    def __str__(self) -> str:
        """Return the form that `parse_target` takes."""
        if self.port == _PORT:
            return f"{self.user}@{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}:{self.port}"

    @property
    def has_default_port(self) -> bool:
        return self.port == _PORT

    @property
    def known_hosts_name(self) -> str:
        """The name of the host in a known_hosts file."""
        return self.host if self.port == _PORT else f"[{self.host}]:{self.port}"


def is_user(text: str) -> bool:
    """Return whether this can be the name of a user."""
    return _USER.fullmatch(text) is not None


def is_host(text: str) -> bool:
    """Return whether this can be a host: a name or an address."""
    return _HOST.fullmatch(text) is not None


def parse_target(text: str) -> RemoteTarget:
    """Return the target in `user@host`, `user@host:port` or `user@[address]:port`.

    Raises:
        click.UsageError: it is something else.

    """
    user, _, place = text.rpartition("@")
    host, port = place, str(_PORT)
    if place.startswith("["):
        host, _, rest = place[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif place.count(":") == 1:  # more are an IPv6 address
        host, _, port = place.partition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    if not (is_user(user) and is_host(host) and is_port):
        raise click.UsageError(f"{text!r}: expected user@host, such as admin@mac-2.local")
    return RemoteTarget(user=user, host=host, port=int(port))
