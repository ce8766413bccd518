"""The folder with a process's identity: what it is, on disk. Mode 0700, below the process's state folder.

identity.pem   its private key and certificate (one file, so that both change at once, as kubelet's are)
ca.pem         the authorities that it trusts
trust.json     the fleet's mode and revoked certificates, as last seen in the store
pending.pem    the key that waits for its certificate, and its request
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pydantic import ValidationError

from machinery import process_secrets
from machinery.files import make_private_folder, write_atomically
from schemas.trust import MAX_PEM, TrustSnapshot
from schemas.wire import identity_files

_MAX_TRUST_BYTES = 16 << 20
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"

FileState: TypeAlias = tuple[tuple[int, ...], ...]


class FolderError(Exception):
    """A file of an identity cannot be used; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class IdentityFolder:
    """Paths and files of one identity."""

    path: Path

    @property
    def identity(self) -> Path:
        """The file with the private key and the certificate."""
        return self.path / identity_files.IDENTITY

    @property
    def authorities(self) -> Path:
        """The file with the authorities' certificates."""
        return self.path / identity_files.AUTHORITIES

    @property
    def trust(self) -> Path:
        """The file with the snapshot of the fleet's trust."""
        return self.path / identity_files.TRUST

    @property
    def pending(self) -> Path:
        """The file with the key that waits for its certificate."""
        return self.path / "pending.pem"

    @property
    def is_issued(self) -> bool:
        """True if the process has a certificate."""
        return self.identity.exists()

    def state(self) -> FileState:
        """Return a value that changes with each of the files."""
        return tuple(map(_state, (self.identity, self.authorities, self.trust)))

    def write_identity(self, key: bytes, certificate: str) -> None:
        """Replace key and certificate in one step. Raises FolderError."""
        self._write(self.identity, key.decode() + certificate)

    def write_authorities(self, pem: str) -> None:
        """Replace the authorities. Raises FolderError."""
        if _CERTIFICATE not in pem or len(pem) > MAX_PEM:
            raise FolderError(f"{self.authorities}: expected certificates in PEM")
        self._write(self.authorities, pem)

    def write_trust(self, snapshot: TrustSnapshot) -> None:
        """Replace the snapshot. Raises FolderError."""
        self._write(self.trust, snapshot.model_dump_json(by_alias=True))

    def read_identity(self) -> str:
        """Return key and certificate. Raises FolderError."""
        try:
            return process_secrets.read_secret_file(self.identity).decode()
        except process_secrets.OpenSecretError as error:
            raise FolderError(str(error)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(f"{self.identity} cannot be read: {error}") from error

    def certificate(self) -> str:
        """Return the certificate alone, in PEM. Raises FolderError."""
        _, mark, rest = self.read_identity().partition(_CERTIFICATE)
        if not mark:
            raise FolderError(f"{self.identity} holds no certificate")
        return mark + rest

    def read_authorities(self) -> str:
        """Return the authorities' certificates. Raises FolderError."""
        try:
            return self.authorities.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(f"{self.authorities} cannot be read: {error}") from error

    def read_trust(self) -> TrustSnapshot | None:
        """Return the snapshot; None if there is none yet. Raises FolderError."""
        try:
            with self.trust.open("rb") as file:
                raw = file.read(_MAX_TRUST_BYTES)
            return TrustSnapshot.model_validate_json(raw)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise FolderError(
                f"{self.trust} cannot be read ({error}); delete it, and it is written again"
            ) from error

    def _write(self, path: Path, content: str) -> None:
        try:
            make_private_folder(self.path)
            write_atomically(path, content, mode=0o600)
        except OSError as error:
            raise FolderError(f"{path} cannot be written: {error.strerror or error}") from error


def _state(path: Path) -> tuple[int, ...]:
    try:
        result = path.stat()
    except OSError:
        return ()
    return (result.st_mtime_ns, result.st_size, result.st_ino)
