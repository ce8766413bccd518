"""Names of the files in the folder of an identity. etcd's clients, which know no identities, use two of them as they are."""

from pathlib import Path
from typing import NamedTuple

IDENTITY = "identity.pem"
AUTHORITIES = "ca.pem"
TRUST = "trust.json"


class IdentityFiles(NamedTuple):
    """The files with which a process connects to etcd."""

    authorities: Path
    identity: Path
    """Certificate and key in one file."""


def find_identity_files(folder: Path | None) -> IdentityFiles | None:
    """Return the files in a folder; None without a folder, or before a certificate is issued."""
    if folder is None:
        return None
    path = folder.expanduser().absolute()
    identity_files = IdentityFiles(path / AUTHORITIES, path / IDENTITY)
    return identity_files if identity_files.identity.exists() else None
