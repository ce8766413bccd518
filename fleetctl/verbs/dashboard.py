"""The verb `fleetctl dashboard`: opens the page of the fleet's dashboard in a browser."""

import webbrowser
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from machinery import environment
from schemas.records import DashboardLease
from store import codec, keys
from store.port import Transport


@click.command(short_help="Open the fleet's dashboard in a browser.")
@click.option("--url", "only_url", is_flag=True, help="Print the address, and open no browser.")
@store_options
def dashboard(*, only_url: bool, **options: Any) -> None:
    """Open the fleet's dashboard in a browser.

    The dashboard is a process of its own, fleet-dashboard; `fleetctl up` starts one at http://127.0.0.1:4003.
    """
    url = run(_find(options))
    click.echo(url)
    if not only_url and environment.has_screen():
        webbrowser.open(url)


async def _find(options: dict[str, Any]) -> str:
    async with open_store(options) as transport:
        return await find_dashboard(transport)


async def find_dashboard(transport: Transport) -> str:
    """Return the URL of a registered dashboard, one on this machine first.

    Raises:
        FleetctlError: none is registered, or none listens.

    """
    items = (await transport.list(keys.DASHBOARD_LEASE_PREFIX)).items
    urls = sorted(url for item in items if (url := codec.decode(DashboardLease, item).url))
    if not urls:
        raise FleetctlError(
            "no dashboard is registered. `fleetctl up` starts one; elsewhere run `fleet-dashboard --etcd ADDRESS`"
        )
    return next((url for url in urls if "://127.0.0.1:" in url), urls[0])
