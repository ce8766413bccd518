"""The verb `fleetctl cert`: certificates of the fleet's processes, and the authorities that sign them."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.arguments import parse_duration, reason_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.fleets import certificates
from fleetctl.output import printers
from identity import authority_exchange
from identity.authority import AuthorityError, load_authorities
from identity.authority_exchange import ExchangeError
from identity.authority_folder import AuthorityFolder
from identity.names import Identity
from identity.signer import IssueError, revoke
from machinery.clock import SystemClock
from schemas.trust import MAX_PEM
from store.port import Transport

_NAME = click.argument("name", metavar="ROLE/NAME")


@click.group(cls=SuggestingGroup, short_help="Manage the certificates of the fleet's processes.")
def cert() -> None:
    """Manage the certificates of the fleet's processes, and the authority that signs them."""


@cert.command("list")
@with_store
async def list_(transport: Transport, **_: Any) -> None:
    """List current certificates, requests that wait, and revoked certificates."""
    rows = await certificates.list_certificates(transport, SystemClock().now())
    if not rows:
        click.echo("no certificate was issued yet", err=True)
        return
    click.echo(printers.align_columns([row.cells() for row in rows], certificates.TITLES))


@cert.command()
@_NAME
@with_store
async def describe(transport: Transport, name: str, **_: Any) -> None:
    """Show the certificate of one process."""
    identity = await _identity(transport, name)
    rows = await certificates.describe(transport, identity, SystemClock().now())
    click.echo(printers.align_columns(rows))


async def _identity(transport: Transport, name: str) -> Identity:
    fleet = await certificates.read_fleet(transport)
    return certificates.parse_name(name, fleet.fleet)


@cert.command("revoke")
@_NAME
@click.option("--reason", default="", metavar="TEXT", help="Reason to record, such as stolen.")
@with_store
async def revoke_(transport: Transport, name: str, reason: str, **_: Any) -> None:
    """Revoke all certificates of a process, and free its name.

    New connections are refused within a second, and open ones are closed within five. The process joins again with a
    token for its name. `fleetctl delete node` also deletes the node and its user of etcd.
    """
    identity = await _identity(transport, name)
    await certificates.read_issued(transport, identity)
    serial = await revoke(transport, SystemClock(), identity, reason[:200])
    click.echo(f"{name} revoked (serial {serial})")


@cert.command("rotate-authority")
@click.option(
    "--authority-dir",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    envvar="FLEET_AUTHORITY_DIR",
    required=True,
    help="Folder with the key of the fleet's authority, on this Mac.",
)
@click.option("--activate", is_flag=True, help="Second step: the new authority signs.")
@click.option("--finish", is_flag=True, help="Third step: the old authority is trusted no more.")
@click.option(
    "--settle",
    default="5m",
    show_default=True,
    help="With --activate: the time that processes have had to learn the new authority.",
)
@reason_option
@with_store
async def rotate_authority(
    transport: Transport,
    authority_dir: Path,
    settle: str,
    *,
    activate: bool,
    finish: bool,
    **_: Any,
) -> None:
    """Exchange the authority for a new one, in three steps, while everything runs.

    Without a flag, a new authority is made and trusted beside the old one. Copy next.pem and next.key to the other
    Macs with an authority folder, and restart the members of etcd one after the other. Then run the command with
    --activate: every process gets a certificate by the new authority. Then run it with --finish, which is refused
    until all have one. Signers finish an exchange by themselves after 60 days.
    """
    if activate and finish:
        raise click.UsageError("--activate and --finish are different steps; give one of them")
    folder = AuthorityFolder(authority_dir.expanduser().absolute())
    wait = timedelta(seconds=parse_duration(settle))
    clock = SystemClock()
    try:
        if activate:
            fleet = await authority_exchange.activate(transport, clock, folder, wait)
            new = load_authorities(fleet.authorities)[0]
            text = (
                "signs now; processes get new certificates within minutes\n"
                "next: run the command again with --finish"
            )
        elif finish:
            fleet = await authority_exchange.finish(transport, clock)
            (new,) = load_authorities(fleet.authorities)
            folder.promote()
            text = "is the only one; the old one's key was deleted here"
        else:
            fleet = await authority_exchange.begin(transport, clock, folder)
            new = load_authorities(fleet.authorities)[-1]
            text = (
                "is trusted beside the old one\n"
                f"next: copy next.pem and next.key in {folder.path} to the other Macs with an authority folder, restart "
                "the members of etcd one after the other, and run the command again with --activate"
            )
    except (ExchangeError, AuthorityError) as error:
        raise FleetctlError(str(error)) from error
    is_first = not (activate or finish)
    click.echo(f"{'new ' if is_first else ''}authority {certificates.authority_hash(new)} {text}")


@cert.command()
@_NAME
@with_store
async def csr(transport: Transport, name: str, **_options: Any) -> None:
    """Print the request of a process for its next certificate (PKCS#10), for an external authority."""
    request, _ = await certificates.read_request(transport, await _identity(transport, name))
    click.echo(request.request, nl=False)


@cert.command()
@_NAME
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@with_store
async def install(transport: Transport, name: str, file: Path, **_: Any) -> None:
    """Answer the request of a process with the certificate in FILE (PEM; - for stdin), signed by an external authority.

    Intermediate authorities follow in the same file. Before it is accepted, key, names, use, time and chain are
    checked: `fleetctl cert csr ROLE/NAME` prints a request with the right names.
    """
    chain, identity = _read(file), await _identity(transport, name)
    try:
        serial = await certificates.install(transport, SystemClock(), identity, chain)
    except (AuthorityError, IssueError) as error:
        raise FleetctlError(f"{file}: {error}") from error
    click.echo(f"certificate {serial} of {name} installed; the process takes it within minutes")


def _read(file: Path) -> str:
    try:
        with sys.stdin.buffer if str(file) == "-" else file.open("rb") as opened:
            return opened.read(MAX_PEM + 1).decode()
    except UnicodeDecodeError as error:
        raise FleetctlError(f"{file} is not text; expected a certificate in PEM") from error
    except OSError as error:
        raise FleetctlError(f"{file} cannot be read: {error.strerror}") from error
