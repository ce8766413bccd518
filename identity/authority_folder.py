"""The folder of a control Mac with the keys of the fleet's authorities: `--authority-dir`. Mode 0700.

ca.pem, ca.key   the authority: certificate and key (0600)
root.env         the store's root password, where the store has users: a signer adds those of joining nodes
"""

from dataclasses import dataclass
from pathlib import Path

from identity.authority import Authority, AuthorityError, load_certificate, spki_hash
from machinery import process_secrets
from machinery.files import make_private_folder, write_atomically


@dataclass(frozen=True, slots=True)
class AuthorityFolder:
    """Paths and files of the authorities on one control Mac."""

    path: Path

    @property
    def certificate(self) -> Path:
        """The file with the authority's certificate."""
        return self.path / "ca.pem"

    @property
    def key(self) -> Path:
        """The file with the authority's key."""
        return self.path / "ca.key"

    @property
    def root_password(self) -> Path | None:
        """The file with the store's root password; None if there is none."""
        found = self.path / "root.env"
        return found if found.exists() else None

    def write(self, authority: Authority) -> None:
        """Write the authority of a new fleet. Raises AuthorityError: the folder has one already."""
        if self.key.exists():
            raise AuthorityError(f"{self.path} has an authority already; give another folder")
        try:
            make_private_folder(self.path)
            write_atomically(self.key, authority.key_pem().decode(), mode=0o600)
            write_atomically(self.certificate, authority.pem, mode=0o600)
        except OSError as error:
            raise AuthorityError(
                f"{self.path} cannot be written: {error.strerror or error}"
            ) from error

    def load(self) -> Authority:
        """Return the authority in `ca.pem` and `ca.key`. Raises AuthorityError."""
        try:
            secret = process_secrets.read_secret_file(self.key)
            return Authority.load(self.certificate.read_text(), secret)
        except process_secrets.OpenSecretError as error:
            raise AuthorityError(str(error)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise AuthorityError(
                f"{self.path} holds no usable authority ({error}); expected ca.pem and ca.key"
            ) from error

    def signing(self, trusted: str) -> Authority:
        """Return the authority that signs now: the first of the fleet's (`trust/fleet`).

        Raises:
            AuthorityError: its key is not in this folder, or cannot be used.

        """
        found, wanted = self.load(), spki_hash(load_certificate(trusted).public_key())
        if found.spki_hash != wanted:
            raise AuthorityError(
                f"{self.path} has not the key of the authority that signs now (SHA-256 {wanted.hex()}); copy ca.pem "
                "and ca.key from the Mac that has them"
            )
        return found
