"""The signer of a control Mac: signs certificates beside the control loop, whether or not this reconciler leads."""

import asyncio
import logging
from dataclasses import replace

from identity.authority_folder import AuthorityFolder
from identity.signing_controller import SigningController
from machinery.clock import Clock
from reconciler.services.revocations import RevocationController
from store.etcd.accounts import JoinedAccounts
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.users import ROOT_USER, Credentials, CredentialsError, read_credentials

log = logging.getLogger(__name__)


class SignerError(Exception):
    """A file of the authorities' folder cannot be used; the message says what to do."""


def signer_address(folder: AuthorityFolder, etcd: EtcdAddress) -> EtcdAddress:
    """Return the store's address with the signer's user: root where the folder has its password.

    The reconciler itself keeps its own user, which may neither write certificates nor add users.

    Raises:
        SignerError: the password cannot be read.

    """
    path = folder.root_password
    if path is None:
        if etcd.username:
            log.warning(
                "the signer cannot write certificates with this user; copy the file of `fleetctl init-auth` for root",
                extra={"user": etcd.username, "wanted": str(folder.path / "root.env")},
            )
        return etcd
    try:
        credentials = read_credentials(path)
    except CredentialsError as error:
        raise SignerError(str(error)) from error
    return replace(etcd, username=credentials.user or ROOT_USER, password=credentials.password)


async def run_signer(folder: AuthorityFolder, etcd: EtcdAddress, clock: Clock) -> None:
    """Sign, and end the access of revoked machines, forever, over a connection to the store of its own."""
    transport = connect(etcd)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(SigningController(transport, clock, folder).run())
            if folder.root_password is not None:
                root = Credentials(user=etcd.username, password=etcd.password)
                accounts = JoinedAccounts(etcd, root)
                group.create_task(RevocationController(transport, clock, accounts).run())
    finally:
        await transport.close()
