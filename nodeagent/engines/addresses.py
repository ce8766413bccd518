"""Addresses that an agent gives to its engines: ports of one host, or sockets in its node's folder."""

import errno
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from machinery import unix_sockets
from schemas.wire.engine_address import EngineAddress

_MAX_ENGINES = 100
# This machine answers itself at once.
_CONNECT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddresses:
    """A hundred addresses, numbered from `first`."""

    host: str
    first: int
    sockets: Path | None = None
    """The folder of the node's sockets; None for ports of `host`."""

    @property
    def ports(self) -> range:
        """Return the ports; none for sockets."""
        return range(0) if self.sockets is not None else self._numbers

    @property
    def _numbers(self) -> range:
        return range(self.first, self.first + _MAX_ENGINES)

    def free(self, taken: Collection[EngineAddress], *, earlier: str = "") -> EngineAddress:
        """Return the first address at which no process listens and which is not in `taken`; `earlier` before all others.

        Another process may take it before the engine does; then the engine exits with ExitCode.ADDRESS_IN_USE, and the
        next start tries the next one.

        Raises:
            OSError: all are in use, or the host is not an address of this machine.

        """
        places = {engine_address._replace(node="") for engine_address in taken}
        numbered = map(self._numbered, self._numbers)
        for address in sorted(numbered, key=lambda one: one.url != earlier):
            if address not in places and not _is_in_use(address):
                return address
        last = self.first + _MAX_ENGINES - 1
        if self.sockets is not None:
            raise OSError(
                f"sockets {self.first}.sock to {last}.sock in {self.sockets} are all in use"
            )
        raise OSError(f"ports {self.first} to {last} on {self.host} are all in use")

    def _numbered(self, number: int) -> EngineAddress:
        if self.sockets is None:
            return EngineAddress(self.host, number)
        return EngineAddress.at_socket(self.sockets / f"{number}.sock")


def make_socket_folder(sockets: Path, node: str) -> Path:
    """Create the folder of a node's sockets in that of its machine; return it.

    Raises:
        SocketFolderError: another user owns one of the folders.
        OSError: one cannot be created.
        ValueError: its path is too long for sockets.

    """
    folder = unix_sockets.node_folder(sockets.absolute(), node)
    EngineAddress.at_socket(folder / "65535.sock")
    unix_sockets.make_folder(folder.parent)
    return unix_sockets.make_folder(folder)


def _is_in_use(address: EngineAddress) -> bool:
    """Return whether the engine could not listen there now. Raises OSError: not an address of this machine."""
    if address.socket:
        return unix_sockets.is_in_use(Path(address.socket))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return True
            raise OSError(
                f"engines cannot listen on {address.host}: {error.strerror}; is it an address of this Mac?"
            ) from error
    # With SO_REUSEADDR, BSDs bind an address beside a listener on all addresses, such as AirPlay's on port 5000. Only a
    # connection shows it.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_S)
        return client.connect_ex((address.host, address.port)) == 0
