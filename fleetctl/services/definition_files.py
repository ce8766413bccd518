"""The file with the definition of a service: compared, replaced and deleted."""

import os
from pathlib import Path

from fleetctl.services.port import ServiceError
from machinery import files


def has_content(path: Path, content: bytes) -> bool:
    """Return whether the file exists with this content."""
    try:
        return path.read_bytes() == content
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ServiceError(f"cannot read {path}: {error.strerror}") from error


def write(path: Path, content: bytes) -> None:
    """Replace the file in one step; every user may read it, as launchd and systemd expect.

    Raises:
        ServiceError: it cannot be written.

    """
    remove_leftovers(path)
    try:
        with files.open_replacement(path, mode=0o644) as file:
            file.write(content)
            if os.geteuid() == 0:
                os.fchown(file.fileno(), 0, 0)  # launchd refuses a definition that is not root's
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from error


def delete(path: Path) -> None:
    """Delete the file, and what a killed `write` left beside it.

    Raises:
        ServiceError: it cannot be deleted.

    """
    remove_leftovers(path)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ServiceError(f"cannot delete {path}: {error.strerror}") from error


def remove_leftovers(path: Path) -> None:
    """Delete temporary files of an earlier replacement of the file that was killed."""
    for leftover in path.parent.glob(f".{path.name}.*"):
        leftover.unlink(missing_ok=True)
