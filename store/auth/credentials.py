"""A user's name and password in a file: how `init-auth` writes them and processes read them."""

import stat
from dataclasses import dataclass, field
from pathlib import Path

_USER, _PASSWORD = "FLEET_ETCD_USER", "FLEET_ETCD_PASSWORD"


class CredentialsError(ValueError):
    """The file is not what it should be; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who we are to etcd. `user` is empty if the file says only the password."""

    user: str
    password: str = field(repr=False)


def render(found: Credentials, comment: str) -> str:
    """Return the file's text: for a shell, systemd's EnvironmentFile, and `read`."""
    return f"# {comment}\n{_USER}={found.user}\n{_PASSWORD}={found.password}\n"


def read(path: Path) -> Credentials:
    """Return what the file says: one line with the password, or what `render` made.

    Raises:
        CredentialsError: it cannot be read, others may read it, or it is of neither form.

    """
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CredentialsError(f"{path} is not text: {_WANTED}") from error
    if mode & stat.S_IROTH:
        raise CredentialsError(
            f"{path} holds a password, and everybody on this machine may read it (mode "
            f"{stat.S_IMODE(mode):04o}). Do `chmod 600 {path}`"
        )
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    named = dict(
        line.split("=", 1) for line in lines if line.startswith((f"{_USER}=", f"{_PASSWORD}="))
    )
    if named.get(_PASSWORD):
        return Credentials(user=named.get(_USER, ""), password=named[_PASSWORD])
    if len(lines) != 1 or named:
        raise CredentialsError(f"{path} holds no password: {_WANTED}")
    return Credentials(user="", password=lines[0])


_WANTED = (
    "expected one line with the password, or a file of `fleetctl init-auth` with "
    f"{_USER}=... and {_PASSWORD}=..."
)
