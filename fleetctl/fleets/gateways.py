"""Gateway address and API key of a command: from flags, from the local fleet's data folder, or from the store."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir
from identity.dialer import Dial, UntrustedAddressError
from identity.peers import PeerError
from machinery import process_secrets
from machinery.tls_client import Trust, TrustError, read_trust, untrusted_reason
from schemas.records import GatewayLease
from store import codec, keys
from store.port import Transport

_MAX_KEY_LENGTH = 1000


def read_api_key(options: dict[str, Any]) -> str:
    """Return the API key that the flags give; empty if they give none.

    Raises:
        FleetctlError: the file cannot be read, or does not contain a key.

    """
    file: Path | None = options["api_key_file"]
    if file is None:
        return str(options["api_key"])
    try:
        text = process_secrets.read_secret_file(file).decode().strip()
    except process_secrets.OpenSecretError as error:
        raise FleetctlError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or error if isinstance(error, OSError) else "the file is not text"
        raise FleetctlError(f"cannot read the API key in {file}: {why}") from error
    if not text or len(text) > _MAX_KEY_LENGTH or not text.isprintable() or " " in text:
        raise FleetctlError(
            f"{file} does not contain an API key: expected one line, as `fleetctl create apikey` prints it"
        )
    return text


def trust(ca: Path | None) -> Trust:
    """Return the trust in gateways' certificates that --gateway-ca gives.

    Raises:
        FleetctlError: the file cannot be used.

    """
    try:
        return read_trust(ca)
    except TrustError as error:
        raise FleetctlError(f"--gateway-ca: {error}") from error


_REMEDIES = {
    "Revoked": "Let it join again with a new token, or delete it",
    "Expired": "See its log for why it was not renewed, or let it join again with a new token",
}


def untrusted_text(error: Exception) -> str:
    """Return the message for a certificate that is not trusted, with the remedy; empty for another error."""
    refused = getattr(error, "certificate_error", error)
    if isinstance(refused, PeerError):
        # The authority is known: the process itself has to be mended.
        return f"{refused.verify_message}. {_REMEDIES.get(refused.refusal, 'See `fleetctl cert list`')}"
    reason = untrusted_reason(error)
    return reason and (
        f"its certificate is not trusted ({reason}). Give the certificate of its authority with --gateway-ca FILE, "
        "FLEET_GATEWAY_CA or `fleetctl config set-context NAME --gateway-ca FILE`"
    )


def parse_url(url: str) -> str:
    """Return the URL of a gateway without a trailing slash.

    Raises:
        click.UsageError: the text is not an HTTP URL.

    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"--gateway {url}: expected http://HOST:PORT")
    return url.rstrip("/")


async def list_leases(transport: Transport) -> dict[str, GatewayLease]:
    """Return the leases of registered gateways, by gateway id."""
    items = (await transport.list(keys.GATEWAY_LEASE_PREFIX)).items
    prefix = keys.GATEWAY_LEASE_PREFIX
    return {item.key.removeprefix(prefix): codec.decode(GatewayLease, item) for item in items}


async def find(options: dict[str, Any]) -> tuple[str, Dial]:
    """Return the URL of a gateway, and how to dial it.

    A local fleet is found through its data folder, so that requests work while the store is down.

    Raises:
        FleetctlError: no gateway is registered.

    """
    if options["gateway"]:
        return parse_url(options["gateway"]), _offline(options)
    folder = DataDir(options["data_dir"])
    fleet = None if options["etcd"] else folder.read()
    if fleet is not None and folder.is_locked():
        return fleet.gateway_url.rstrip("/"), _offline(options)
    found = await list_dials(options)
    if not found:
        raise FleetctlError(
            "no gateway is registered. `fleetctl up` starts one; for a gateway elsewhere give --gateway URL"
        )
    return found[0]


async def list_dials(options: dict[str, Any]) -> list[tuple[str, Dial]]:
    """Return the URL of each registered gateway and how to dial it, sorted by URL.

    Raises:
        FleetctlError: a file of the identity cannot be used, or no gateway may be dialled.

    """
    from fleetctl.fleets.dialer import open_dialer  # noqa: PLC0415 - it imports this module

    async with open_store(options) as transport:
        leases = await list_leases(transport)
        dialer = await open_dialer(options, transport)
    found, refused = {}, ""
    for id_, lease in leases.items():
        try:
            found[lease.url.rstrip("/")] = dialer.gateway(id_, lease)
        except UntrustedAddressError as error:
            refused = str(error)
    if refused and not found:
        raise FleetctlError(refused)
    return sorted(found.items(), key=lambda one: one[0])


def _offline(options: dict[str, Any]) -> Dial:
    from fleetctl.fleets.dialer import offline_dialer  # noqa: PLC0415 - it imports this module

    return offline_dialer(options).address()
