"""Gateway addresses and API key of a command: from flags, from the local fleet's data folder, or from the store."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.arguments import parse_urls
from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir
from fleetctl.fleets.dialer import offline_dialer, open_dialer
from fleetctl.fleets.known_gateways import KnownFleet, KnownGateways, store_name
from fleetctl.output import printers
from identity.dialer import Dial, Dialer, UntrustedAddressError, is_local
from insight import process_client
from machinery import process_secrets
from machinery.clock import SystemClock
from schemas.records import GatewayLease
from store.errors import StoreError, UnavailableError

_MAX_KEY_LENGTH = 1000
# With gateways to fall back on, a command does not wait longer for the store.
_STORE_S = 3.0


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


async def find(options: dict[str, Any]) -> list[tuple[str, Dial]]:
    """Return the URLs of gateways in the order in which a command tries them, and how to dial each.

    A local fleet is found through its data folder, so that requests work while the store is down; `find_others` returns
    the gateways of its other Macs.

    Raises:
        FleetctlError: no gateway is registered.

    """
    if urls := parse_urls(options["gateway"]):
        dial = _offline(options)
        return [(url, dial) for url in urls]
    if local := local_url(options):
        return [(local, _offline(options))]
    dials = await list_dials(options)
    if not dials:
        raise FleetctlError(
            "no gateway is registered. `fleetctl up` starts one; for a gateway elsewhere give --gateway URL"
        )
    return dials


async def find_others(options: dict[str, Any]) -> list[tuple[str, Dial]]:
    """Return the registered gateways besides the one that `find` returns; none if the store does not answer in time."""
    local = local_url(options)
    with contextlib.suppress(FleetctlError, StoreError, TimeoutError):
        async with asyncio.timeout(_STORE_S):
            return [dial for dial in await list_dials(options) if dial[0] != local]
    return []


def local_url(options: dict[str, Any]) -> str:
    """Return the URL of the gateway that `fleetctl up` runs on this machine; empty if the options lead elsewhere."""
    if options["gateway"] or options["etcd"]:
        return ""
    folder = DataDir(options["data_dir"])
    fleet = folder.read()
    return fleet.gateway_url.rstrip("/") if fleet is not None and folder.is_locked() else ""


async def list_dials(options: dict[str, Any]) -> list[tuple[str, Dial]]:
    """Return the URL of each registered gateway and how to dial it, sorted by URL.

    While the store is away, those are returned that it listed last.

    Raises:
        FleetctlError: a file of the identity cannot be used, or no gateway may be dialled.
        StoreError: the store does not answer, and no gateways are known.

    """
    known, store = KnownGateways.of_command(), store_name(options)
    now = SystemClock().now()
    fleet = known.find(store, now)
    before = None if fleet is None or not fleet.gateways else fleet
    try:
        async with asyncio.timeout(None if before is None else _STORE_S):
            leases, dialer = await _read_store(options)
    except (UnavailableError, TimeoutError) as error:
        if before is None:
            raise
        dials = _known_dials(before, options)
        if not dials:
            raise
        why = str(error) or f"no answer within {_STORE_S:g} s"
        age = printers.age(before.seen, now)
        click.echo(f"warning: {why}; using the gateways that were known {age} ago", err=True)
        return dials
    known.remember(store, leases, now)
    return _dials(leases, dialer)


async def _read_store(options: dict[str, Any]) -> tuple[dict[str, GatewayLease], Dialer]:
    async with open_store(options) as transport:
        return await process_client.list_gateway_leases(transport), await open_dialer(
            options, transport
        )


def _known_dials(fleet: KnownFleet, options: dict[str, Any]) -> list[tuple[str, Dial]]:
    """Return the gateways that the store listed last.

    A gateway without TLS on another machine is left out if a key would be sent: another machine may have its address now.
    """
    has_key = bool(options.get("api_key") or options.get("api_key_file"))
    leases = {
        id_: lease
        for id_, lease in fleet.gateways.items()
        if not has_key or lease.url.startswith("https:") or is_local(lease.url)
    }
    return _dials(leases, offline_dialer(options))


def _dials(leases: dict[str, GatewayLease], dialer: Dialer) -> list[tuple[str, Dial]]:
    """Return how to dial each gateway, sorted by URL. Raises FleetctlError if there are some and none may be dialled."""
    found, refused = {}, ""
    for id_, lease in leases.items():
        try:
            found[lease.url.rstrip("/")] = dialer.gateway(id_, lease)
        except UntrustedAddressError as error:
            refused = str(error)
    if refused and not found:
        raise FleetctlError(refused)
    return sorted(found.items(), key=lambda item: item[0])


def _offline(options: dict[str, Any]) -> Dial:
    return offline_dialer(options).address()
