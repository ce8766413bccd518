"""Brings etcd's users and roles to what `store.auth.access` says, a step at a time; looks before each."""

from collections.abc import Callable

from fleetctl.passwords import PasswordFolder
from store.auth import access
from store.auth.access import Account, Permission
from store.etcd.grpc.accounts import EtcdAccounts

ROOT_FILE = "root.env"


class Setup:
    """One run. `is_on` says whether etcd asks for passwords, for else it checks none, either."""

    def __init__(
        self,
        accounts: EtcdAccounts,
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
        if access.ROOT_USER not in await self._accounts.roles():
            await self._accounts.add_role(access.ROOT_USER)
        done = await self._password(access.ROOT_USER, ROOT_FILE)
        if access.ROOT_USER not in await self._accounts.roles_of(access.ROOT_USER):
            await self._accounts.grant_role(access.ROOT_USER, access.ROOT_USER)
        self._tell(access.ROOT_USER, done)

    async def renew_root(self) -> None:
        """Give root a new password if that was asked for; or finish what was begun."""
        if access.ROOT_USER in self._rotated or self._folder.staged(ROOT_FILE) is not None:
            await self._replace(access.ROOT_USER, ROOT_FILE)
            self._tell(access.ROOT_USER, [f"new password in {self._folder.file(ROOT_FILE)}"])

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
