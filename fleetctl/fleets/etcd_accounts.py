"""etcd users, roles and passwords, as `fleetctl init-auth` creates them, and the processes that need a password.

`PasswordFolder` keeps one password file per user. `AccountSetup` brings etcd to the state that `store.etcd.users`
describes, one step at a time, and reads the current state before each step; `store.etcd.accounts` has the steps.
"""

import fcntl
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fleetctl.cli.errors import FleetctlError
from machinery.files import write_atomically
from schemas.node import NodeLease
from schemas.records import GatewayLease, ReconcilerLease
from store import codec, keys
from store.etcd import accounts, users
from store.etcd.grpc.admin import AuthClient
from store.etcd.users import Account, Credentials, CredentialsError
from store.port import KeyValue, Transport


class PasswordFolder:
    """Password files (mode 0600). Each password is on disk before etcd receives it.

    A replacement is staged in a second file until etcd has it. After an interruption one of the two files is right.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder if needed and lock it; only one `init-auth` may use it at a time.

        Raises:
            FleetctlError: the folder is not usable, is writable by others, or is locked.

        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self.path.stat().st_mode
            if mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise FleetctlError(
                    f"other users may write to {self.path} and could plant their own passwords. Run "
                    f"`chmod 700 {self.path}`, or choose another folder with --out"
                )
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise FleetctlError(
                f"cannot use {self.path}: {error.strerror}. Choose a folder that you own with --out"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FleetctlError(
                    f"another `fleetctl init-auth` uses {self.path}; wait until it has finished"
                ) from error
            yield

    def file(self, name: str) -> Path:
        """Return the path of a password file."""
        return self.path / name

    def password(self, name: str) -> str | None:
        """Return the password in the file; None if the file does not exist."""
        return self._read(self.file(name))

    def staged(self, name: str) -> str | None:
        """Return the staged replacement of the password; None if there is none."""
        return self._read(self._next(name))

    def make(self, name: str, user: str) -> str:
        """Write a file with a new password, and return the password."""
        return self._write(self.file(name), user)

    def stage(self, name: str, user: str) -> str:
        """Write a new password beside the file, to replace it once etcd has it; return the password."""
        return self._write(self._next(name), user)

    def keep_staged(self, name: str) -> None:
        """Replace the file with the staged one, after etcd has accepted the password."""
        try:
            self._next(name).replace(self.file(name))
        except OSError as error:
            raise FleetctlError(
                f"cannot rename {self._next(name)}: {error.strerror}. This file has the valid password; "
                "fix the folder's permissions and run the command again"
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
        credentials = Credentials(user=user, password=accounts.new_password())
        text = users.render_credentials(
            credentials, "written by `fleetctl init-auth`; keep this file private"
        )
        try:
            write_atomically(path, text, mode=0o600)
        except OSError as error:
            raise FleetctlError(f"cannot write {path}: {error.strerror}") from error
        return credentials.password


ROOT_FILE = "root.env"


class AccountSetup:
    """One run of `init-auth`. `is_on` says whether etcd enforces passwords; if not, it cannot check them either."""

    def __init__(
        self,
        client: AuthClient,
        folder: PasswordFolder,
        say: Callable[[str], None],
        *,
        is_on: bool,
        rotated: frozenset[str] = frozenset(),
    ) -> None:
        self._accounts = client
        self._folder = folder
        self._say = say
        self._is_on = is_on
        self._rotated = rotated

    async def create_root(self) -> None:
        """Create root, with its password on disk, before etcd starts to enforce passwords."""
        if users.ROOT_USER not in await self._accounts.roles():
            await accounts.add_role(self._accounts, users.ROOT_USER)
        done = await self._set_up_password(users.ROOT_USER, ROOT_FILE)
        if users.ROOT_USER not in await self._accounts.roles_of(users.ROOT_USER):
            await self._accounts.grant_role(users.ROOT_USER, users.ROOT_USER)
        self._report(users.ROOT_USER, done)

    async def renew_root(self) -> None:
        """Replace root's password if --rotate asks for it, or finish an interrupted replacement."""
        if users.ROOT_USER in self._rotated or self._folder.staged(ROOT_FILE) is not None:
            await self._replace(users.ROOT_USER, ROOT_FILE)
            self._report(users.ROOT_USER, [f"new password in {self._folder.file(ROOT_FILE)}"])

    async def set_up_account(self, account: Account) -> None:
        """Create the user and its role, with exactly the permissions and roles that it should have."""
        done = await accounts.set_up_role(self._accounts, account)
        done += await self._set_up_password(account.user, account.file)
        done += await accounts.set_up_membership(self._accounts, account)
        self._report(account.user, done)

    async def _set_up_password(self, user: str, file: str) -> list[str]:
        """Create the user, or bring its password in line with the file."""
        folder, where = self._folder, self._folder.file(file)
        known = folder.password(file)
        if user not in await self._accounts.users():
            await accounts.add_user(self._accounts, user, known or folder.make(file, user))
            return [f"user added, password in {where}"]
        if user in self._rotated or folder.staged(file) is not None:
            await self._replace(user, file)
            return [f"new password in {where}"]
        if not self._is_on:
            # No process uses it yet, and etcd cannot check passwords while authentication is off.
            await self._accounts.set_password(user, known or folder.make(file, user))
            return [f"password set, in {where}"]
        if known is not None and not await self._accounts.is_password(user, known):
            # Do not reset it: the process that uses this account may already have the new password.
            self._say(
                f"warning: the password in {where} is no longer valid for {user}. Copy the right file, "
                f"or create a new password with --rotate {user}"
            )
        return []

    async def _replace(self, user: str, file: str) -> None:
        password = self._folder.staged(file) or self._folder.stage(file, user)
        await self._accounts.set_password(user, password)
        self._folder.keep_staged(file)

    def _report(self, user: str, done: list[str]) -> None:
        self._say(f"{user}: {', '.join(done) or 'unchanged'}")


_LeaseModel: TypeAlias = type[NodeLease] | type[GatewayLease] | type[ReconcilerLease]
_KINDS: tuple[tuple[str, str, _LeaseModel], ...] = (
    (keys.NODE_LEASE_PREFIX, "agent of node", NodeLease),
    (keys.GATEWAY_LEASE_PREFIX, "gateway", GatewayLease),
    (keys.RECONCILER_LEASE_PREFIX, "reconciler", ReconcilerLease),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreClient:
    """One live process."""

    name: str
    """Kind and name of the process, for users: `agent of node mac-1`."""
    has_password: bool
    """False if it has none, or if its lease cannot be read."""


async def list_clients(transport: Transport) -> Sequence[StoreClient]:
    """Return the processes that hold a lease now.

    A process that cannot be asked counts as one without a password: it would be locked out without a warning.

    Raises:
        StoreError: the store could not be read.

    """
    store_clients: list[StoreClient] = []
    for prefix, kind, model in _KINDS:
        for item in (await transport.list(prefix)).items:
            lease = _decode(model, item)
            name = item.key.removeprefix(prefix)
            if isinstance(lease, ReconcilerLease):
                name = lease.identity
            has_password = lease is not None and lease.has_store_password
            store_clients.append(StoreClient(name=f"{kind} {name}", has_password=has_password))
    return store_clients


def _decode(
    model: _LeaseModel, item: KeyValue
) -> NodeLease | GatewayLease | ReconcilerLease | None:
    try:
        return codec.decode(model, item)
    except codec.UndecodableError:
        return None
