"""Where a fleet's gateways are, and what lets us in: flags, else the fleet's own folder, else the store."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir
from schemas.records import GatewayLease
from store import codec, keys
from store.port import Transport

_LONGEST_KEY = 1000


def read_api_key(options: dict[str, Any]) -> str:
    """Return the key that the flags say; empty if none.

    Raises:
        FleetctlError: the file cannot be read, or holds no key.

    """
    file: Path | None = options["api_key_file"]
    if file is None:
        return str(options["api_key"])
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise FleetctlError(f"cannot read the API key in {file}: {why}") from error
    if not text or len(text) > _LONGEST_KEY or not text.isprintable() or " " in text:
        raise FleetctlError(
            f"{file} holds no API key: one line is expected, as `fleetctl create apikey` prints it"
        )
    return text


def parse_url(url: str) -> str:
    """Return a gateway's address as it is used.

    Raises:
        click.UsageError: it is none.

    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"--gateway {url}: write it as http://HOST:PORT")
    return url.rstrip("/")


async def list_leases(transport: Transport) -> dict[str, GatewayLease]:
    """Return the gateways that renew their leases, by their ids."""
    items = (await transport.list(keys.GATEWAY_LEASE_PREFIX)).items
    prefix = keys.GATEWAY_LEASE_PREFIX
    return {item.key.removeprefix(prefix): codec.decode(GatewayLease, item) for item in items}


async def find_url(options: dict[str, Any]) -> str:
    """Return the address of a gateway.

    A fleet of this machine is found without its store: requests need no store either.

    Raises:
        FleetctlError: there is none.

    """
    if options["gateway"]:
        return parse_url(options["gateway"])
    folder = DataDir(options["data_dir"])
    fleet = None if options["etcd"] else folder.read()
    if fleet is not None and folder.is_held():
        return fleet.gateway_url.rstrip("/")
    async with open_store(options) as transport:
        found = await list_leases(transport)
    if not found:
        raise FleetctlError(
            "no gateway is registered. `fleetctl up` runs one; for another say where with --gateway"
        )
    return min(lease.url for lease in found.values()).rstrip("/")
