"""Protection of the secrets of a process: core dumps, and files that other users may read.

The environment of its children is in machinery/environment.py.
"""

import os
import resource
import stat
from pathlib import Path
from typing import Final

MAX_FILE_BYTES: Final = 64 << 10
"""The largest file with a secret; private keys take a few KiB."""


class OpenSecretError(PermissionError):
    """Other users of this machine may read or change a file with a secret; the message says what to do."""


def disable_core_dumps() -> None:
    """Let neither this process nor its children write their memory to disk when they crash; call it at the start."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read_secret_file(path: Path) -> bytes:
    """Return the content of a file with a password, a key or another secret.

    Raises:
        OpenSecretError: other users may read or change it.
        OSError: it cannot be read, or is larger than any secret.

    """
    with path.open("rb") as file:
        _check(os.fstat(file.fileno()), path)  # of the open file, which nobody can replace now
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(f"larger than {MAX_FILE_BYTES >> 10} KiB, so it is no file with a secret")
    return content


def check_secret_file(path: Path) -> None:
    """Check the mode of a file that a library reads, such as a TLS key.

    Raises:
        OpenSecretError: other users may read or change it.
        OSError: it cannot be found.

    """
    _check(path.stat(), path)


def _check(found: os.stat_result, path: Path) -> None:
    """Allow the owner alone. The group may read another user's file: the way of root to give a service its secret.

    Our own group is no such way: on macOS every user is in the group of every other user's files (staff).
    """
    if not stat.S_ISREG(found.st_mode):
        return  # a pipe, such as /dev/stdin
    refused = stat.S_IRWXO | stat.S_IWGRP
    if found.st_uid == os.getuid():
        refused |= stat.S_IRWXG
    if found.st_mode & refused:
        raise OpenSecretError(
            f"{path} holds a secret, and other users of this machine may use it (mode "
            f"{stat.S_IMODE(found.st_mode):04o}). Run `chmod 600 {path}`"
        )
