"""The way from a command to agents and gateways: its identity, the fleet's trust, and the authorities of --gateway-ca."""

import ssl
from pathlib import Path
from typing import Any

from fleetctl.cli.errors import FleetctlError
from identity.credentials import Credentials, CredentialsError
from identity.dialer import Dialer
from identity.folder import FolderError, IdentityFolder
from machinery.clock import SystemClock
from machinery.tls_client import Trust, TrustError, read_trust
from schemas.trust import FleetTrust, TrustSnapshot
from store import codec, keys
from store.port import Transport


async def open_dialer(options: dict[str, Any], transport: Transport) -> Dialer:
    """Return how to dial the fleet's processes, with the mode and the revocations that the store has now.

    Raises:
        FleetctlError: a file of --identity-dir or --gateway-ca cannot be used.
        StoreError: the store does not answer.

    """
    folder = _folder(options)
    if folder is not None:
        await _update_trust(transport, folder)
    return _dialer(options, folder)


def offline_dialer(options: dict[str, Any]) -> Dialer:
    """Return how to dial a gateway whose URL is known without the store. Raises FleetctlError."""
    return _dialer(options, _folder(options))


def _dialer(options: dict[str, Any], folder: IdentityFolder | None) -> Dialer:
    trust = _trust(options["gateway_ca"], folder)
    if folder is None:
        return Dialer(trust=trust)
    try:
        return Dialer(Credentials(folder, SystemClock()), trust=trust)
    except CredentialsError as error:
        raise FleetctlError(f"--identity-dir: {error}") from error


def _folder(options: dict[str, Any]) -> IdentityFolder | None:
    path: Path | None = options["identity_dir"]
    if path is None:
        return None
    folder = IdentityFolder(path.expanduser().absolute())
    if not folder.is_issued:
        raise FleetctlError(
            f"--identity-dir: {folder.path} holds no certificate. `fleetctl join` writes one with a token of the role "
            "admin; or give another folder"
        )
    return folder


def _trust(ca: Path | None, folder: IdentityFolder | None) -> Trust:
    """Return the trust in gateways at a URL: --gateway-ca; without it the system's authorities, and the fleet's."""
    if ca is not None or folder is None:
        try:
            return read_trust(ca)
        except TrustError as error:
            raise FleetctlError(f"--gateway-ca: {error}") from error
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(folder.authorities)
    except (ssl.SSLError, OSError) as error:
        raise FleetctlError(f"--identity-dir: {folder.authorities}: {error}") from error
    return context


async def _update_trust(transport: Transport, folder: IdentityFolder) -> None:
    """Write the fleet's mode and revocations to the folder. Raises FleetctlError, StoreError."""
    item = await transport.get(keys.FLEET_TRUST)
    if item is None:
        return
    fleet = codec.decode(FleetTrust, item)
    revoked = (await transport.list(keys.REVOKED_PREFIX)).items
    snapshot = TrustSnapshot(
        fleet=fleet.fleet,
        mode=fleet.mode,
        revoked=tuple(one.key.removeprefix(keys.REVOKED_PREFIX) for one in revoked),
        seen=SystemClock().now(),
    )
    try:
        folder.write_trust(snapshot)
    except FolderError as error:
        raise FleetctlError(f"--identity-dir: {error}") from error
