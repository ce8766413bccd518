"""An etcd with the fleet's users and roles, as `fleetctl init-auth` creates them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fleetctl.fleets.etcd_accounts import AccountSetup, PasswordFolder
from store.etcd import users
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import AuthClient
from tests.support.store_tcp_etcd import TcpEtcd

NODES = ("mac-1", "mac-10", "mac-2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """An etcd with users, and the password of each user."""

    etcd: TcpEtcd
    passwords: Path
    prefix: str = ""

    def address(self, component: str, *, way: str = "grpc") -> EtcdAddress:
        """Return the address for a user (`admin`, `gateway`, `node-mac-1`, ...) over gRPC or HTTP."""
        who = users.read_credentials(self.file(component))
        etcd_address = replace(self.etcd.address, username=who.user, password=who.password)
        return replace(etcd_address, transport="http" if way == "http" else "grpc")

    def file(self, component: str) -> Path:
        return self.passwords / f"{component}.env"


@asynccontextmanager
async def guarded_etcd(
    folder: Path, *flags: str, binary: Path | None = None, prefix: str = ""
) -> AsyncIterator[Guarded]:
    """Run an etcd that requires passwords."""
    # etcd hashes passwords slowly on purpose; the tests use the lowest cost.
    async with TcpEtcd(folder, "--bcrypt-cost=4", *flags, binary=binary) as etcd:
        passwords = folder / "passwords"
        await guard(etcd.address, passwords, prefix=prefix)
        yield Guarded(etcd=etcd, passwords=passwords, prefix=prefix)


async def guard(address: EtcdAddress, passwords: Path, *, prefix: str = "") -> None:
    """Create users and roles, and turn authentication on."""
    accounts = AuthClient(address)
    try:
        setup = AccountSetup(accounts, PasswordFolder(passwords), lambda _: None, is_on=False)
        await setup.create_root()
        for account in users.fleet_accounts(NODES, prefix=prefix):
            await setup.set_up_account(account)
        await accounts.enable()
    finally:
        await accounts.close()
