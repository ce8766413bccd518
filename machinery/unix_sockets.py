"""Unix sockets for one user's processes: private folders with short paths, and listeners that replace stale files.

The folder decides which processes may connect: it has mode 0700 and belongs to the user of both ends.
"""

import os
import stat
from pathlib import Path

# sun_path holds 104 bytes on macOS, 108 on Linux.
_LONGEST_PATH = 100


class SocketFolderError(Exception):
    """The folder for the sockets cannot be used; the message says why and what to do."""


def short_folder(data_dir: Path, longest_name: str) -> Path:
    """Return the folder for a data folder's sockets: inside it, or in a temporary folder if paths would be too long.

    `longest_name`: the longest name of a socket, relative to the folder.
    """
    inside = data_dir.absolute() / "sock"
    if len(os.fsencode(inside / longest_name)) <= _LONGEST_PATH:
        return inside
    import hashlib  # noqa: PLC0415 - imports OpenSSL: 15 ms for `fleetctl get`, and few paths are so long
    import tempfile  # noqa: PLC0415 - the same

    digest = hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"mlx-fleet-{os.getuid()}-{digest}"


def node_folder(sockets: Path, node: str) -> Path:
    """Return the folder of one node's sockets, by which a gateway knows that the node runs on its own machine."""
    return sockets / node


def make_folder(path: Path) -> Path:
    """Create the folder, accessible by its owner only; return it.

    Raises:
        SocketFolderError: another user owns it.
        OSError: it cannot be created.

    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(path)
    path.chmod(0o700)
    return path


def check_owner(path: Path) -> None:
    """Check that the path is a folder of this user, not a link.

    Raises:
        SocketFolderError: it is another user's, so its sockets cannot be trusted.
        OSError: there is no such folder.

    """
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise SocketFolderError(
            f"{path} belongs to another user; choose another --data-dir or --engine-sockets"
        )


def check_private(path: Path) -> None:
    """Check that only this user can enter the folder: no other can have put a socket there.

    Raises:
        SocketFolderError: another user owns it or may enter it.
        OSError: there is no such folder.

    """
    check_owner(path)
    if path.lstat().st_mode & 0o077:
        raise SocketFolderError(f"{path} is open to other users; run `chmod 700 {path}`")
