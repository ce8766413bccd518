"""The verb `fleetctl dashboard`: opens the page of the fleet's dashboard in a browser, logged in."""

import asyncio
import tempfile
import webbrowser
from html import escape
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.connect import open_store, store_options
from fleetctl.cli.errors import FleetctlError
from insight.tickets import LoginTicket, issue_login_ticket
from machinery import environment
from schemas.records import TICKET_TTL_S, DashboardLease
from store import codec, keys
from store.errors import PermissionDeniedError
from store.port import Transport


@click.command(short_help="Open the fleet's dashboard in a browser, logged in.")
@click.option("--url", "only_url", is_flag=True, help="Print the address, and open no browser.")
@click.option(
    "--link",
    "only_link",
    is_flag=True,
    help=f"Print a link that logs in once within {TICKET_TTL_S} seconds, and open no browser.",
)
@store_options
async def dashboard(*, only_url: bool, only_link: bool, **options: Any) -> None:
    """Open the fleet's dashboard in a browser, logged in with the role admin.

    The dashboard is a process of its own, fleet-dashboard; `fleetctl up` starts one at http://127.0.0.1:4003. The
    login needs the right to write to the store. Everyone else logs in with an API key.
    """
    if only_url and only_link:
        raise click.UsageError("--url and --link exclude each other")
    async with open_store(options) as transport:
        id_, lease = await _find(transport)
        ticket = None
        if lease.asks_for_keys and not only_url:
            ticket = await _login_ticket(transport, id_)
        link = lease.url if ticket is None else f"{lease.url}/#login={ticket.bearer}"
        is_printed = only_url or only_link or not environment.has_screen()
        click.echo(link if is_printed else lease.url)
        if is_printed:
            return
        if ticket is None:
            await asyncio.to_thread(webbrowser.open, link)
        else:
            # Open a link by a private file: other users can read the arguments of a browser.
            with tempfile.TemporaryDirectory(prefix="fleetctl-") as folder:  # mode 0700
                page = Path(folder, "login.html")
                target = escape(link, quote=True)
                page.write_text(
                    f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">'
                )
                await asyncio.to_thread(webbrowser.open, page.as_uri())
                if not await ticket.is_used(transport):
                    raise FleetctlError(
                        f"the browser did not log in within {TICKET_TTL_S} seconds. `fleetctl dashboard --link` prints a link"
                    )
                click.echo("logged in")


async def _login_ticket(transport: Transport, id_: str) -> LoginTicket | None:
    try:
        return await issue_login_ticket(transport, id_)
    except PermissionDeniedError:
        message = (
            "log in with an API key: only a user that may write to the store gets a login link"
        )
        click.echo(f"note: {message}", err=True)
        return None


async def find_dashboard(transport: Transport) -> str:
    """Return the URL of a registered dashboard, one on this machine first.

    Raises:
        FleetctlError: none is registered, or none listens.

    """
    return (await _find(transport))[1].url


async def _find(transport: Transport) -> tuple[str, DashboardLease]:
    """Return the id and the registration of a dashboard that listens, one on this machine first."""
    found = [
        (item.key.removeprefix(keys.DASHBOARD_LEASE_PREFIX), codec.decode(DashboardLease, item))
        for item in (await transport.list(keys.DASHBOARD_LEASE_PREFIX)).items
    ]
    if not found:
        raise FleetctlError(
            "no dashboard is registered. `fleetctl up` starts one; elsewhere run `fleet-dashboard --etcd ADDRESS`"
        )
    listening = sorted((one for one in found if one[1].url), key=lambda one: one[1].url)
    if not listening:
        raise FleetctlError(
            f"dashboard {found[0][0]} is registered, but does not listen yet: it starts, or another process has its "
            "port (see its log)"
        )
    return next((one for one in listening if "://127.0.0.1:" in one[1].url), listening[0])
