"""Where an embedded etcd's sockets are: found from its data folder alone, by server and clients."""

import os
import stat
from pathlib import Path

# etcd before 3.5.5 takes only NAME:PORT for a socket, a file of that name in its working folder.
CLIENT_SOCKET, PEER_SOCKET = "client:1", "peer:1"
# sun_path holds 104 bytes on macOS, 108 on Linux.
_LONGEST_PATH = 100


class SocketFolderError(Exception):
    """The folder for the sockets cannot be used; the message says why and what to do."""


def socket_folder(data_dir: Path) -> Path:
    """Return the folder for a data folder's sockets: in it, or in a temporary folder if too deep."""
    inside = data_dir.absolute() / "sock"
    if len(str(inside / CLIENT_SOCKET)) <= _LONGEST_PATH:
        return inside
    import hashlib  # noqa: PLC0415 - OpenSSL and all: 15 ms for `fleetctl get`, and hardly any folder lies so deep
    import tempfile  # noqa: PLC0415 - the same

    digest = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"mlx-fleet-{os.getuid()}-{digest}"


def make_socket_folder(data_dir: Path) -> Path:
    """Make the folder, for its owner alone.

    Raises:
        SocketFolderError: somebody else owns it.
        OSError: it cannot be made.

    """
    made = socket_folder(data_dir)
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(made)
    made.chmod(0o700)
    return made


def client_socket(data_dir: Path) -> Path:
    """Return the socket that clients connect to; it need not be there.

    Raises:
        SocketFolderError: somebody else owns its folder, so it may lead anywhere.

    """
    found = socket_folder(data_dir)
    if found.exists():
        _check_owner(found)
    return found / CLIENT_SOCKET


def _check_owner(path: Path) -> None:
    seen = path.lstat()
    if seen.st_uid != os.getuid() or not stat.S_ISDIR(seen.st_mode):
        raise SocketFolderError(f"{path} belongs to somebody else; choose another --data-dir")
