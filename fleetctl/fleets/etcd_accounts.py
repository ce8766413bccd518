"""The folder with the fleet's passwords: one file a user, for nobody but who runs `init-auth`.

Brings etcd's users and roles to what `store.etcd.users` says, a step at a time; looks before each.
"""

import fcntl
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetctl.cli.errors import FleetctlError
from machinery.files import write_atomically
from store.etcd import users
from store.etcd.grpc.admin import AuthClient
from store.etcd.users import Account, Credentials, CredentialsError, Permission

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
            return users.read_credentials(path).password
        except CredentialsError as error:
            raise FleetctlError(str(error)) from error

    def _write(self, path: Path, user: str) -> str:
        made = Credentials(user=user, password=secrets.token_urlsafe(_BYTES))
        text = users.render_credentials(made, "made by `fleetctl init-auth`; keep it to yourself")
        try:
            write_atomically(path, text, mode=0o600)
        except OSError as error:
            raise FleetctlError(f"cannot write {path}: {error.strerror}") from error
        return made.password


ROOT_FILE = "root.env"


class AccountSetup:
    """One run. `is_on` says whether etcd asks for passwords, for else it checks none, either."""

    def __init__(
        self,
        accounts: AuthClient,
        folder: PasswordFolder,
        say: Callable[[str], None],
        *,
        is_on: bool,
        rotated: frozenset[str] = frozenset(),
    ) -> None:
        self._accounts = accounts
        self._folder = folder
        self._say = say
        self._is_on = is_on
        self._rotated = rotated

    async def root(self) -> None:
        """Have root, whose password is in its file, before anybody is asked for one."""
        if users.ROOT_USER not in await self._accounts.roles():
            await self._accounts.add_role(users.ROOT_USER)
        done = await self._password(users.ROOT_USER, ROOT_FILE)
        if users.ROOT_USER not in await self._accounts.roles_of(users.ROOT_USER):
            await self._accounts.grant_role(users.ROOT_USER, users.ROOT_USER)
        self._tell(users.ROOT_USER, done)

    async def renew_root(self) -> None:
        """Give root a new password if that was asked for; or finish what was begun."""
        if users.ROOT_USER in self._rotated or self._folder.staged(ROOT_FILE) is not None:
            await self._replace(users.ROOT_USER, ROOT_FILE)
            self._tell(users.ROOT_USER, [f"new password in {self._folder.file(ROOT_FILE)}"])

    async def account(self, account: Account) -> None:
        """Have the user, its role and the role's permissions, and nothing beside them."""
        done = await self._role(account)
        done += await self._password(account.user, account.file)
        roles = await self._accounts.roles_of(account.user)
        if account.user not in roles:
            await self._accounts.grant_role(account.user, account.user)
            done.append("role granted")
        for other in sorted(roles - {account.user}):
            await self._accounts.revoke_role(account.user, other)
            done.append(f"role {other} taken away")
        self._tell(account.user, done)

    async def _role(self, account: Account) -> list[str]:
        role, has = account.user, frozenset[Permission]()
        if role in await self._accounts.roles():
            has = await self._accounts.permissions_of(role)
        else:
            await self._accounts.add_role(role)
        # First what is new: a process that runs must not lose what it keeps.
        missing = sorted(account.permissions - has)
        for permission in missing:
            await self._accounts.grant(role, permission)
        # Looked at again: etcd replaces a right to a range, but not always.
        surplus = sorted(await self._accounts.permissions_of(role) - account.permissions)
        for permission in surplus:
            await self._accounts.revoke(role, permission)
        for permission in sorted(account.permissions - await self._accounts.permissions_of(role)):
            await self._accounts.grant(role, permission)  # it went with a surplus one of its range
        added = [f"{len(missing)} permissions granted"] if missing else []
        return added + ([f"{len(surplus)} permissions taken away"] if surplus else [])

    async def _password(self, user: str, file: str) -> list[str]:
        """Have the user, with a password in its file where we may know it."""
        folder, where = self._folder, self._folder.file(file)
        known = folder.password(file)
        if user not in await self._accounts.users():
            await self._accounts.add_user(user, known or folder.make(file, user))
            return [f"user added, password in {where}"]
        if user in self._rotated or folder.staged(file) is not None:
            await self._replace(user, file)
            return [f"new password in {where}"]
        if not self._is_on:
            # Nobody uses it yet, and etcd would not say whether it is the right one.
            await self._accounts.set_password(user, known or folder.make(file, user))
            return [f"password set, in {where}"]
        if known is not None and not await self._accounts.is_password(user, known):
            # Not ours to set back: whoever changed it has given it to the process.
            self._say(
                f"warning: the password in {where} is not {user}'s any more. Get the right file, "
                f"or make a new one with --rotate {user}"
            )
        return []

    async def _replace(self, user: str, file: str) -> None:
        password = self._folder.staged(file) or self._folder.stage(file, user)
        await self._accounts.set_password(user, password)
        self._folder.keep_staged(file)

    def _tell(self, user: str, done: list[str]) -> None:
        self._say(f"{user}: {', '.join(done) or 'unchanged'}")
