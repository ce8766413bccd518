"""Authority, users and identities of a local fleet that other machines may join (`fleetctl up --join`).

    authority/            the authority's certificate and key, and root's password in etcd
    passwords/            the passwords of this machine's processes in etcd
    identities/ROLE/      identities of etcd, the reconciler, the gateway and the administrator
    nodes/NAME/identity/  identities of agents

A data folder that has an authority keeps it: without --join, its processes are reachable from this machine only, with the
same users and identities. Every step reads what exists, so that an interrupted start is continued by the next.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir
from fleetctl.fleets.etcd_accounts import ROOT_FILE, AccountSetup, PasswordFolder
from fleetctl.fleets.fleet_trust import (
    Machine,
    ManagedIdentity,
    administrator,
    ensure_identity,
    ensure_trust,
    open_authority,
)
from fleetctl.fleets.local_api_key import ensure_api_key
from identity.authority import AuthorityError
from identity.authority_folder import AuthorityFolder
from identity.folder import FolderError, IdentityFolder
from identity.names import Identity, Role
from identity.signer import IssueError, Signer
from machinery.clock import Clock
from machinery.unix_sockets import SocketFolderError
from schemas.trust import FleetTrust, TlsMode
from store.errors import StoreError
from store.etcd import users
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.grpc.admin import AuthClient
from store.etcd.member import sockets
from store.port import Transport

Say = Callable[[str], None]


class LocalTrust:
    """Authority, users and identities of one data folder."""

    def __init__(
        self,
        data_dir: DataDir,
        clock: Clock,
        machine: Machine,
        *,
        can_dashboard_write: bool = False,
    ) -> None:
        self._can_dashboard_write = can_dashboard_write
        self._data_dir = data_dir
        self._clock = clock
        self._machine = machine
        self.passwords: Final = PasswordFolder(data_dir.passwords)
        self._root: Final = PasswordFolder(data_dir.authority)
        self._authority = open_authority(data_dir.authority, clock)

    @property
    def address(self) -> str:
        """The address at which other machines reach this one; empty if they do not."""
        return self._machine.address

    def password_file(self, component: str) -> Path:
        """Return the file with the password of `reconciler`, `gateway`, `admin` or `node-NAME`."""
        return self.passwords.file(f"{component}.env")

    def as_root(self, address: EtcdAddress) -> EtcdAddress:
        """Return the address with root's password, if root has one yet."""
        password = self._root.password(ROOT_FILE)
        if password is None:
            return address
        return replace(address, username=users.ROOT_USER, password=password)

    async def prepare(self, address: EtcdAddress, nodes: Sequence[str], say: Say) -> None:
        """Bring users, the fleet's trust, all identities and fleetctl's API key to the state that they should have.

        Raises:
            FleetctlError: the store belongs to another fleet, or a file cannot be used.

        """
        try:
            # Let etcd ask for passwords, and give each process of this machine its own.
            anonymous = AuthClient(address)
            try:
                is_on = await anonymous.is_on()
                if not is_on:
                    await self._create_users(anonymous, nodes, say, is_on=False)
                    await anonymous.enable()
            finally:
                await anonymous.close()
            if is_on:
                if self._root.password(ROOT_FILE) is None:
                    raise FleetctlError(
                        f"etcd asks for passwords, and {self._root.file(ROOT_FILE)} does not exist. Restore the file from a "
                        "backup of the data folder"
                    )
                client = AuthClient(self.as_root(address))
                try:
                    known = (users.node_of_user(user) for user in await client.users())
                    # The rights of nodes that have joined, too: a new release may need others.
                    every = sorted({*nodes, *filter(None, known)})
                    await self._create_users(client, every, say, is_on=True)
                finally:
                    await client.close()
            transport = connect(self.as_root(address))
            try:
                trust = await self._trust(transport, say)
                await self._issue(
                    transport, trust, [*self._control_plane(), *map(self._node, nodes)]
                )
                await ensure_api_key(transport, self._data_dir, self._clock)
            finally:
                await transport.close()
        except (StoreError, IssueError, FolderError, AuthorityError) as error:
            raise FleetctlError(str(error)) from error

    async def renew(self, address: EtcdAddress) -> None:
        """Renew the identities that no process renews itself.

        Raises:
            FleetctlError: as `prepare`.

        """
        try:
            transport = connect(self.as_root(address))
            try:
                trust = await self._trust(transport, lambda _: None)
                await self._issue(
                    transport, trust, [self._wanted(Role.ETCD), self._wanted(Role.ADMIN)]
                )
            finally:
                await transport.close()
        except (StoreError, IssueError, FolderError, AuthorityError) as error:
            raise FleetctlError(str(error)) from error

    async def _create_users(
        self, client: AuthClient, nodes: Sequence[str], say: Say, *, is_on: bool
    ) -> None:
        def warn(text: str) -> None:
            if text.startswith("warning"):  # otherwise the accounts of a local fleet are no news
                say(text)

        with self.passwords.lock(), self._root.lock():
            if not is_on:
                root = AccountSetup(client, self._root, warn, is_on=False)
                await root.create_root()
            setup = AccountSetup(client, self.passwords, warn, is_on=is_on)
            for account in users.fleet_accounts(nodes, dashboard_writes=self._can_dashboard_write):
                await setup.set_up_account(account)

    async def _trust(self, transport: Transport, say: Say) -> FleetTrust:
        """Return the fleet's trust. Make it if the fleet has none: strict, since all processes start with an identity."""
        where = self._data_dir.authority
        fleet_trust, is_new = await ensure_trust(transport, self._authority, where, TlsMode.STRICT)
        if is_new:
            say(f"made the fleet's certificate authority ({where})")
        return fleet_trust

    async def _issue(
        self, transport: Transport, trust: FleetTrust, wanted: Sequence[ManagedIdentity]
    ) -> None:
        authority = AuthorityFolder(self._data_dir.authority).signing(trust.authorities)
        signer = Signer(transport=transport, clock=self._clock, authority=authority)
        for identity in wanted:
            await ensure_identity(signer, trust, identity, self._machine)

    def _control_plane(self) -> list[ManagedIdentity]:
        return list(
            map(
                self._wanted, (Role.ETCD, Role.RECONCILER, Role.GATEWAY, Role.DASHBOARD, Role.ADMIN)
            )
        )

    def _wanted(self, role: Role) -> ManagedIdentity:
        fleet = self._authority.fleet
        if role is Role.ADMIN:
            identity = administrator(fleet, self._machine)
        else:
            identity = Identity(fleet, role, self._machine.label)
        return ManagedIdentity(
            identity=identity, folder=IdentityFolder(self._data_dir.identity(role))
        )

    def _node(self, name: str) -> ManagedIdentity:
        identity = Identity(self._authority.fleet, Role.NODE, name)
        return ManagedIdentity(
            identity=identity, folder=IdentityFolder(self._data_dir.node_identity(name))
        )


@asynccontextmanager
async def open_as_administrator(data_dir: DataDir) -> AsyncIterator[Transport]:
    """Open the store of a running fleet with the administrator's password.

    Raises:
        FleetctlError: the password or the socket cannot be used.

    """
    try:
        account = users.read_credentials(PasswordFolder(data_dir.passwords).file("admin.env"))
        socket = sockets.client_socket(data_dir.etcd)
    except (users.CredentialsError, SocketFolderError) as error:
        raise FleetctlError(str(error)) from error
    transport = connect(
        EtcdAddress(socket=socket, username=account.user, password=account.password)
    )
    try:
        yield transport
    finally:
        await transport.close()


def url_host(address: str) -> str:
    """Return the address as URLs have it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
