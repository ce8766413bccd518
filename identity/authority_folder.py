"""The folder of a control Mac with the keys of the fleet's authorities: `--authority-dir`. Mode 0700.

ca.pem, ca.key       the authority: certificate and key (0600)
next.pem, next.key   the authority that follows it, during an exchange
root.env             the store's root password, where the store has users: a signer adds those of joining nodes
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from identity.authority import Authority, AuthorityError, load_authorities, spki_hash
from machinery import process_secrets
from machinery.files import make_private_folder, write_atomically

_CURRENT: Final = "ca"
_NEXT: Final = "next"


@dataclass(frozen=True, slots=True)
class AuthorityFolder:
    """Paths and files of the authorities on one control Mac."""

    path: Path

    @property
    def certificate(self) -> Path:
        """The file with the authority's certificate."""
        return self._certificate(_CURRENT)

    @property
    def key(self) -> Path:
        """The file with the authority's key."""
        return self._key(_CURRENT)

    @property
    def root_password(self) -> Path | None:
        """The file with the store's root password; None if there is none."""
        path = self.path / "root.env"
        return path if path.exists() else None

    def write(self, authority: Authority) -> None:
        """Write the authority of a new fleet. Raises AuthorityError: the folder has one already."""
        if self.key.exists():
            raise AuthorityError(f"{self.path} has an authority already; give another folder")
        self._write(_CURRENT, authority)

    def write_next(self, authority: Authority) -> None:
        """Write the authority that follows. Raises AuthorityError."""
        self._write(_NEXT, authority)

    def load(self) -> Authority:
        """Return the authority in `ca.pem` and `ca.key`; after a crash in `promote`, the one that takes its place.

        Raises:
            AuthorityError: the folder holds none that can be used.

        """
        try:
            return self._load(_CURRENT, _CURRENT)
        except AuthorityError:
            with contextlib.suppress(AuthorityError):
                return self._load(_NEXT, _NEXT)
            raise

    def following(self) -> Authority | None:
        """Return the authority that follows; None outside of an exchange. Raises AuthorityError."""
        return self._load(_NEXT, _NEXT) if self._key(_NEXT).exists() else None

    def signing(self, trusted: str) -> Authority:
        """Return the authority that signs now: the first of the fleet's (`trust/fleet`).

        Raises:
            AuthorityError: its key is not in this folder, or cannot be used.

        """
        wanted = spki_hash(load_authorities(trusted)[0].public_key())
        # A crash between two files of `promote` leaves key and certificate under different names.
        for certificate in (_CURRENT, _NEXT):
            for key in (_CURRENT, _NEXT):
                with contextlib.suppress(AuthorityError):
                    authority = self._load(certificate, key)
                    if authority.spki_hash == wanted:
                        return authority
        self.load()  # says what is wrong with the files
        raise AuthorityError(
            f"{self.path} has not the key of the authority that signs now (SHA-256 {wanted.hex()}); copy ca.pem and "
            "ca.key, during an exchange next.pem and next.key, from the Mac that has them"
        )

    def promote(self) -> None:
        """End an exchange: the authority that follows takes the place of the current one, whose key is deleted.

        Raises:
            AuthorityError: there is none that follows, or it cannot be written.

        """
        following = self.following()
        if following is None:
            raise AuthorityError(f"{self.path} has no authority that follows: no next.key")
        self._write(_CURRENT, following)
        for name in (self._key(_NEXT), self._certificate(_NEXT)):
            name.unlink(missing_ok=True)

    def _certificate(self, name: str) -> Path:
        return self.path / f"{name}.pem"

    def _key(self, name: str) -> Path:
        return self.path / f"{name}.key"

    def _load(self, certificate: str, key: str) -> Authority:
        path = self._certificate(certificate)
        try:
            secret = process_secrets.read_secret_file(self._key(key))
            return Authority.load(path.read_text(), secret)
        except process_secrets.OpenSecretError as error:
            raise AuthorityError(str(error)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise AuthorityError(
                f"{self.path} holds no usable authority ({error}); expected {path.name} and {key}.key"
            ) from error
        except AuthorityError as error:
            raise AuthorityError(f"{path}: {error}") from error

    def _write(self, name: str, authority: Authority) -> None:
        try:
            make_private_folder(self.path)
            write_atomically(self._key(name), authority.key_pem().decode(), mode=0o600)
            write_atomically(self._certificate(name), authority.pem, mode=0o600)
        except OSError as error:
            raise AuthorityError(
                f"{self.path} cannot be written: {error.strerror or error}"
            ) from error
