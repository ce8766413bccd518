"""Paths of an embedded etcd's sockets, derived from its data folder by server and clients."""

import os
import stat
from pathlib import Path

# etcd before 3.5.5 accepts only NAME:PORT for a socket, which is a file of that name in its working directory.
CLIENT_SOCKET, PEER_SOCKET = "client:1", "peer:1"
# sun_path holds 104 bytes on macOS, 108 on Linux.
_LONGEST_PATH = 100


class SocketFolderError(Exception):
    """The folder for the sockets cannot be used; the message says why and what to do."""


def socket_folder(data_dir: Path) -> Path:
    """Return the folder for a data folder's sockets: inside it, or in a temporary folder if the path is too long."""
    inside = data_dir.absolute() / "sock"
    if len(str(inside / CLIENT_SOCKET)) <= _LONGEST_PATH:
        return inside
    import hashlib  # noqa: PLC0415 - imports OpenSSL: 15 ms for `fleetctl get`, and few paths are so long
    import tempfile  # noqa: PLC0415 - the same

    digest = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"mlx-fleet-{os.getuid()}-{digest}"


def make_socket_folder(data_dir: Path) -> Path:
    """Create the folder, accessible by its owner only.

    Raises:
        SocketFolderError: another user owns it.
        OSError: it cannot be created.

    """
    path = socket_folder(data_dir)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(path)
    path.chmod(0o700)
    return path


def client_socket(data_dir: Path) -> Path:
    """Return the socket that clients connect to; it need not exist.

    Raises:
        SocketFolderError: another user owns its folder, so it cannot be trusted.

    """
    found = socket_folder(data_dir)
    if found.exists():
        _check_owner(found)
    return found / CLIENT_SOCKET


def _check_owner(path: Path) -> None:
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise SocketFolderError(f"{path} belongs to another user; choose another --data-dir")
