"""The command `fleet-dashboard`: flags and wiring."""

import asyncio
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from dashboard.history.database import HistoryLimits
from dashboard.server import Dashboard, DashboardSettings
from dashboard.sessions import session_secret
from identity.credentials import Credentials, no_report
from identity.daemon import daemon_options, start_daemon
from identity.dialer import Dialer
from identity.flags import (
    gateway_trust,
)
from identity.listeners import insecure_http_flag, server_security
from identity.names import Role
from identity.renewal import Applicant, own_addresses
from identity.upkeep import IdentityUpkeep
from machinery.files import make_private_folder
from machinery.http_server import listen
from machinery.options import FOLDER, GATEWAY_CA, PORT, Option, options
from machinery.process_main import GRACE_S, run_until_signal
from machinery.process_secrets import OpenSecretError
from schemas import duration as durations
from schemas import sizes
from store.etcd.connect import connect

DEFAULT_PORT = 4003
_SHORTEST_S: Final = 600
_LONGEST_S: Final = 30 * 24 * 3600
_LEAST_BYTES: Final = 16 << 20


OPTIONS: Final = (
    Option("--host", default="127.0.0.1"),
    Option("--port", "Port of the page and its API; 0 for any.", type=PORT, default=DEFAULT_PORT),
    Option(
        "--auth",
        "Require a login: an API key (`fleetctl create apikey`) or a link of `fleetctl dashboard`.",
        type=click.Choice(["on", "off"]),
        default="on",
    ),
    Option(
        "--allow-writes",
        "Let operators and admins change the fleet from the page. The store's user must have the right, too.",
        is_flag=True,
    ),
    Option(
        "--allowed-host",
        "Name by which clients may address this process besides this machine's own names; may be repeated.",
        multiple=True,
        metavar="HOST",
    ),
    Option(
        "--state-dir",
        "Folder for the key that signs sessions, and for the history (mode 0700). Without it, both end with the process.",
        type=FOLDER,
    ),
    Option(
        "--history-time",
        "How long figures, requests and objects are kept in --state-dir, such as 24h or 48h.",
        default="24h",
        metavar="DURATION",
    ),
    Option(
        "--history-size",
        "How large the history may become; beyond it, the oldest is removed first.",
        default="1Gi",
        metavar="BYTES",
    ),
    GATEWAY_CA,
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("FLEET_DASHBOARD", *OPTIONS)
@daemon_options
@insecure_http_flag
def main(**options: Any) -> None:
    """Record the state of the whole fleet, and show it: an HTTP API, streams of changes, and a page."""
    daemon = start_daemon("dashboard", Role.DASHBOARD, options)
    clock, folder, own = daemon.clock, daemon.folder, daemon.credentials
    settings = replace(
        _settings(options, own, has_store_password=bool(daemon.etcd.password)),
        ring=daemon.ring,
        tls=no_report if own is None else own.report,
    )
    addresses = own_addresses(options["host"], *options["allowed_host"])
    # Two runs must never share an id: streams are resumed by it.
    id_ = secrets.token_hex(6)

    async def run() -> None:
        transport = connect(daemon.etcd)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(Dashboard(transport, clock, settings, id_=id_).run())
                if folder is not None:
                    applicant = Applicant(role=Role.DASHBOARD, addresses=lambda: addresses)
                    upkeep = IdentityUpkeep(transport, clock, folder, applicant, own)
                    group.create_task(upkeep.run())
        finally:
            await transport.close()

    sys.exit(run_until_signal(run, grace_s=GRACE_S))


def _settings(
    options: dict[str, Any], own: Credentials | None, *, has_store_password: bool
) -> DashboardSettings:
    """Return the settings that the flags describe.

    Raises:
        click.UsageError: the folder cannot be used, or the address is none of this machine.

    """
    state_dir: Path | None = options["state_dir"]
    try:
        if state_dir is not None:
            state_dir = state_dir.expanduser().absolute()
            make_private_folder(state_dir)
        secret = session_secret(state_dir)
    except (OSError, OpenSecretError) as error:
        raise click.UsageError(f"--state-dir: {error}") from error
    _check_host(options["host"])
    return DashboardSettings(
        address=(options["host"], options["port"]),
        asks_for_keys=options["auth"] == "on",
        can_write=options["allow_writes"],
        hosts=options["allowed_host"],
        session_secret=secret,
        state_dir=state_dir,
        history=_history(options),
        security=server_security(own, frozenset(Role), is_insecure=options["insecure_http"]),
        has_store_password=has_store_password,
        dialer=Dialer(own, trust=gateway_trust(options)),
    )


def _history(options: dict[str, Any]) -> HistoryLimits:
    """Return how much history is kept. Raises click.UsageError."""
    try:
        kept_s, size = (
            durations.parse(options["history_time"]),
            sizes.parse(options["history_size"]),
        )
    except ValueError as error:
        raise click.UsageError(f"--history-time or --history-size: {error}") from error
    if not _SHORTEST_S <= kept_s <= _LONGEST_S:
        raise click.UsageError("--history-time: expected 10m to 720h")
    if size < _LEAST_BYTES:
        raise click.UsageError("--history-size: expected 16Mi or more")
    return HistoryLimits(kept_s=kept_s, file_bytes=size)


def _check_host(host: str) -> None:
    """Raise click.UsageError if the host is no address of this machine."""
    try:
        listen(host, 0).close()
    except OSError as error:
        raise click.UsageError(
            f"--host {host}: {error.strerror or error}; expected an address of this machine"
        ) from error


if __name__ == "__main__":
    main()
