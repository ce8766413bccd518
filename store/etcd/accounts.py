"""Steps that bring users and roles of an etcd to the state that `store.etcd.users` describes.

Each step reads the current state first, so that it can be interrupted and repeated. Only root may take them.
"""

import secrets
from dataclasses import replace

from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import AuthClient
from store.etcd.users import Account, Credentials, Permission, joined_account

# 32 bytes become 43 characters of the URL-safe base64 alphabet, which needs no quoting in a shell or a URL.
_BYTES = 32


class NoRootError(StoreError):
    """etcd requires passwords, and root's is not known: no user can be added."""


def new_password() -> str:
    """Return a random password that needs no quoting."""
    return secrets.token_urlsafe(_BYTES)


async def set_up_role(client: AuthClient, account: Account) -> list[str]:
    """Give the account's role exactly the permissions that it should have; return the changes. Raises StoreError."""
    role, granted = account.role, frozenset[Permission]()
    if role in await client.roles():
        granted = await client.permissions_of(role)
    else:
        await add_role(client, role)
    # Grant first, revoke later: a running process must not lose a permission that it keeps.
    missing = sorted(account.permissions - granted)
    for permission in missing:
        await client.grant(role, permission)
    # Read again: for some ranges etcd replaces an old permission when the new one is granted.
    surplus = sorted(await client.permissions_of(role) - account.permissions)
    for permission in surplus:
        await client.revoke(role, permission)
    for permission in sorted(account.permissions - await client.permissions_of(role)):
        # It was revoked together with a surplus one of the same range.
        await client.grant(role, permission)
    added = [f"{len(missing)} permissions granted"] if missing else []
    return added + ([f"{len(surplus)} permissions revoked"] if surplus else [])


async def set_up_membership(client: AuthClient, account: Account) -> list[str]:
    """Give the user its role and no other; return the changes. Raises StoreError."""
    done = []
    roles = await client.roles_of(account.user)
    if account.role not in roles:
        await client.grant_role(account.user, account.role)
        done.append("role granted")
    for other in sorted(roles - {account.role}):
        await client.revoke_role(account.user, other)
        done.append(f"role {other} revoked")
    return done


async def set_up_password(client: AuthClient, account: Account) -> Credentials:
    """Give the user a new password, and create it if needed. Raises StoreError."""
    credentials = Credentials(user=account.user, password=new_password())
    if account.user in await client.users():
        await client.set_password(account.user, credentials.password)
    else:
        await add_user(client, account.user, credentials.password)
    return credentials


async def add_role(client: AuthClient, role: str) -> None:
    """Create a role, unless it exists meanwhile, as with `add_user`. Raises StoreError."""
    try:
        await client.add_role(role)
    except StoreError:
        if role not in await client.roles():
            raise


async def add_user(client: AuthClient, user: str, password: str) -> None:
    """Create a user, or set its password if it exists meanwhile. Raises StoreError.

    The request of a set-up that was killed may arrive after its successor has listed the users.
    """
    try:
        await client.add_user(user, password)
    except StoreError:
        if user not in await client.users():
            raise
        await client.set_password(user, password)


async def delete_account(client: AuthClient, account: Account) -> bool:
    """Delete the user, and its role unless others share it; return whether there was a user. Raises StoreError."""
    is_there = account.user in await client.users()
    if is_there:
        await client.delete_user(account.user)
    if account.role == account.user and account.role in await client.roles():
        await client.delete_role(account.role)
    return is_there


class JoinedAccounts:
    """Accounts of machines and persons that join, in an etcd that requires passwords."""

    def __init__(self, address: EtcdAddress, root: Credentials | None) -> None:
        """`address`: how this process reaches etcd. `root`: the credentials of root, if this machine has them."""
        self._address = address
        self._root = root

    async def are_required(self) -> bool:
        """Return whether etcd requires passwords.

        Raises:
            NoRootError: it does, and root's password is not here.
            StoreError: etcd did not answer.

        """
        client = AuthClient(replace(self._address, username="", password=""))
        try:
            is_on = await client.is_on()
        finally:
            await client.close()
        if is_on and self._root is None:
            raise NoRootError(
                "etcd requires passwords, and this reconciler cannot add users: put root.env of `fleetctl init-auth` "
                "into the folder of --authority-dir"
            )
        return is_on

    async def issue(self, component: str, name: str) -> Credentials:
        """Return a new password of the account of a component (`node`, `gateway`, ...) and name. Raises StoreError."""
        account = joined_account(component, name, prefix=self._address.prefix)
        client = self._client()
        try:
            await set_up_role(client, account)
            credentials = await set_up_password(client, account)
            await set_up_membership(client, account)
        finally:
            await client.close()
        return credentials

    async def delete(self, component: str, name: str) -> bool:
        """Delete the account of a component and name; return whether there was one. Raises StoreError."""
        client = self._client()
        try:
            account = joined_account(component, name, prefix=self._address.prefix)
            return await delete_account(client, account)
        finally:
            await client.close()

    def _client(self) -> AuthClient:
        assert self._root is not None
        root = replace(
            self._address, username=self._root.user or "root", password=self._root.password
        )
        return AuthClient(root)
