"""Unix sockets for one user's processes: private folders with short paths, and listeners that replace stale files.

The folder decides which processes may connect: it has mode 0700 and belongs to the user of both ends.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# sun_path holds 104 bytes on macOS, 108 on Linux.
_LONGEST_PATH = 100
# As for TCP (machinery/http_server.py). A connection beyond it is refused at once; macOS allows fewer by default.
_BACKLOG = 2048


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


@dataclass(frozen=True, slots=True)
class SocketFile:
    """A socket's file, which stays behind when its process is killed."""

    path: Path
    inode: int

    def remove(self) -> None:
        """Remove the file, unless it is another process's by now. Call it while the socket still listens."""
        with suppress(OSError), _locked(self.path.parent):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()


def listen(path: Path) -> tuple[socket.socket, SocketFile]:
    """Return a listening socket and its file, mode 0600; a file on which no process listens is replaced.

    Raises:
        SocketFolderError: others may enter its folder.
        OSError: a process listens there already, the file is no socket, or the folder is missing.

    """
    check_private(path.parent)
    # Two processes that find the same stale file must not both replace it.
    with _locked(path.parent):
        if os.path.lexists(path):
            if not stat.S_ISSOCK(path.lstat().st_mode) or is_in_use(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener, SocketFile(path, path.lstat().st_ino)


def is_in_use(path: Path) -> bool:
    """Return whether a process listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its queue of connections is full
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes that replace files in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
