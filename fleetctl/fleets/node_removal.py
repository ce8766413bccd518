"""The traces of a node besides its object: its certificates, which are revoked, and its user of etcd, which is deleted."""

from dataclasses import replace
from pathlib import Path

from fleetctl.cli.errors import FleetctlError
from identity.authority_folder import AuthorityFolder
from identity.names import Identity, Role
from identity.signer import revoke
from machinery.clock import Clock
from schemas.trust import FleetTrust
from store import codec, keys
from store.etcd import accounts, users
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import AuthClient
from store.etcd.users import ROOT_USER, CredentialsError
from store.port import Transport


async def revoke_node(transport: Transport, clock: Clock, name: str) -> str:
    """Revoke the certificates of a node, and free its name for another Mac; return the serial number, or ""."""
    item = await transport.get(keys.FLEET_TRUST)
    if item is None:
        return ""
    identity = Identity(codec.decode(FleetTrust, item).fleet, Role.NODE, name)
    return await revoke(transport, clock, identity, "node deleted")


def root_address(address: EtcdAddress, authority_dir: Path | None) -> EtcdAddress | None:
    """Return the store's address with the user root; None if its password is not at hand.

    Raises:
        FleetctlError: root.env in the folder cannot be used.

    """
    if address.username == ROOT_USER:
        return address
    path = None if authority_dir is None else AuthorityFolder(authority_dir).root_password
    if path is None:
        return None
    try:
        credentials = users.read_credentials(path)
    except CredentialsError as error:
        raise FleetctlError(str(error)) from error
    return replace(address, username=credentials.user or ROOT_USER, password=credentials.password)


async def delete_user(root: EtcdAddress, node: str) -> bool:
    """Delete the user and the role of the node's agent; return whether there was a user."""
    client = AuthClient(root)
    try:
        account = users.joined_account("node", node, prefix=root.prefix)
        return await accounts.delete_account(client, account)
    finally:
        await client.close()
