"""The folder with the fleet's passwords: one file a user, for nobody but who runs `init-auth`."""

import fcntl
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetctl.errors import FleetctlError
from machinery.files import write_atomically
from store.auth import credentials
from store.auth.credentials import Credentials, CredentialsError

# Of 62 letters and digits and two signs, none of which a shell or a URL minds.
_BYTES = 32


class PasswordFolder:
    """Files of mode 0600, each on the disk before etcd hears of its password.

    A password that is to replace another lies beside it until etcd has it: whatever is interrupted,
    one of the two is right.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder if need be, and hold it: one `init-auth` at a time.

        Raises:
            FleetctlError: it cannot be used, others may write to it, or it is held.

        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self.path.stat().st_mode
            if mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise FleetctlError(
                    f"others may write to {self.path}, and could put their own passwords there. Do "
                    f"`chmod 700 {self.path}`, or give another folder with --out"
                )
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise FleetctlError(
                f"cannot use {self.path}: {error.strerror}. Give a folder of your own with --out"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FleetctlError(
                    f"another `fleetctl init-auth` works with {self.path}; wait until it is done"
                ) from error
            yield

    def file(self, name: str) -> Path:
        return self.path / name

    def password(self, name: str) -> str | None:
        """Return the password in the file; None if there is no such file."""
        return self._read(self.file(name))

    def staged(self, name: str) -> str | None:
        """Return the password that was to replace the one in the file; None if there is none."""
        return self._read(self._next(name))

    def make(self, name: str, user: str) -> str:
        """Write a file with a new password, and return that."""
        return self._write(self.file(name), user)

    def stage(self, name: str, user: str) -> str:
        """Return a new password that is to replace the one in the file, when etcd has it."""
        return self._write(self._next(name), user)

    def keep_staged(self, name: str) -> None:
        """Etcd has the new password: the old one goes."""
        try:
            self._next(name).replace(self.file(name))
        except OSError as error:
            raise FleetctlError(
                f"cannot rename {self._next(name)}: {error.strerror}. It has the password that "
                "counts; mend the folder and run the command again"
            ) from error

    def _next(self, name: str) -> Path:
        return self.path / f"{name}.next"

    def _read(self, path: Path) -> str | None:
        if not path.exists():
            return None
        try:
            return credentials.read(path).password
        except CredentialsError as error:
            raise FleetctlError(str(error)) from error

    def _write(self, path: Path, user: str) -> str:
        made = Credentials(user=user, password=secrets.token_urlsafe(_BYTES))
        text = credentials.render(made, "made by `fleetctl init-auth`; keep it to yourself")
        try:
            write_atomically(path, text, mode=0o600)
        except OSError as error:
            raise FleetctlError(f"cannot write {path}: {error.strerror}") from error
        return made.password
