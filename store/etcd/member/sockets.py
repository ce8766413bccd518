"""Paths of an embedded etcd's sockets, derived from its data folder by server and clients."""

from pathlib import Path

from machinery import unix_sockets

# etcd before 3.5.5 accepts only NAME:PORT for a socket, which is a file of that name in its working directory.
CLIENT_SOCKET, PEER_SOCKET = "client:1", "peer:1"


def socket_folder(data_dir: Path) -> Path:
    """Return the folder for a data folder's sockets: inside it, or in a temporary folder if the path is too long."""
    return unix_sockets.short_folder(data_dir, CLIENT_SOCKET)


def make_socket_folder(data_dir: Path) -> Path:
    """Create the folder, accessible by its owner only.

    Raises:
        SocketFolderError: another user owns it.
        OSError: it cannot be created.

    """
    return unix_sockets.make_folder(socket_folder(data_dir))


def client_socket(data_dir: Path) -> Path:
    """Return the socket that clients connect to; it need not exist.

    Raises:
        SocketFolderError: another user owns its folder, so it cannot be trusted.

    """
    path = socket_folder(data_dir)
    if path.exists():
        unix_sockets.check_owner(path)
    return path / CLIENT_SOCKET
