"""The verb `fleetctl cert`: certificates of the fleet's processes, and the authorities that sign them."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.arguments import parse_duration, reason_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import SuggestingGroup
from fleetctl.fleets import certificates
from fleetctl.output import printers
from identity import authority_exchange
from identity.authority import AuthorityError, load_authorities
from identity.authority_exchange import ExchangeError
from identity.authority_folder import AuthorityFolder
from identity.signer import IssueError, revoke
from machinery.clock import SystemClock
from schemas.trust import MAX_PEM

_NAME = click.argument("name", metavar="ROLE/NAME")


@click.group(cls=SuggestingGroup, short_help="Manage the certificates of the fleet's processes.")
def cert() -> None:
    """Manage the certificates of the fleet's processes, and the authority that signs them."""


@cert.command("list")
@store_options
def list_(**options: Any) -> None:
    """List current certificates, requests that wait, and revoked certificates."""
    rows = run(_list(options))
    if not rows:
        click.echo("no certificate was issued yet", err=True)
        return
    click.echo(printers.align_columns([row.cells() for row in rows], certificates.TITLES))


async def _list(options: dict[str, Any]) -> list[certificates.CertificateRow]:
    async with open_store(options) as transport:
        return await certificates.list_certificates(transport, SystemClock().now())


@cert.command()
@_NAME
@store_options
def describe(name: str, **options: Any) -> None:
    """Show the certificate of one process."""
    click.echo(printers.align_columns(run(_describe(name, options))))


async def _describe(name: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    async with open_store(options) as transport:
        fleet = await certificates.read_fleet(transport)
        identity = certificates.parse_name(name, fleet.fleet)
        return await certificates.describe(transport, identity, SystemClock().now())


@cert.command("revoke")
@_NAME
@click.option("--reason", default="", metavar="TEXT", help="Reason to record, such as stolen.")
@store_options
def revoke_(name: str, reason: str, **options: Any) -> None:
    """Revoke all certificates of a process, and free its name.

    New connections are refused within a second, and open ones are closed within five. The process joins again with a
    token for its name. `fleetctl delete node` also deletes the node and its user of etcd.
    """
    serial = run(_revoke(name, reason, options))
    click.echo(f"{name} revoked (serial {serial})")


async def _revoke(name: str, reason: str, options: dict[str, Any]) -> str:
    async with open_store(options) as transport:
        fleet = await certificates.read_fleet(transport)
        identity = certificates.parse_name(name, fleet.fleet)
        await certificates.read_issued(transport, identity)
        return await revoke(transport, SystemClock(), identity, reason[:200])


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
@store_options
def rotate_authority(
    authority_dir: Path, settle: str, *, activate: bool, finish: bool, **options: Any
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
    step = "activate" if activate else "finish" if finish else "begin"
    try:
        said = run(_rotate(folder, step, wait, options))
    except (ExchangeError, AuthorityError) as error:
        raise FleetctlError(str(error)) from error
    click.echo(said)


async def _rotate(
    folder: AuthorityFolder, step: str, settle: timedelta, options: dict[str, Any]
) -> str:
    clock = SystemClock()
    async with open_store(options) as transport:
        if step == "begin":
            fleet = await authority_exchange.begin(transport, clock, folder)
            new = load_authorities(fleet.authorities)[-1]
            return (
                f"new authority {certificates.authority_hash(new)} is trusted beside the old one\n"
                f"next: copy next.pem and next.key in {folder.path} to the other Macs with an authority folder, restart "
                "the members of etcd one after the other, and run the command again with --activate"
            )
        if step == "activate":
            fleet = await authority_exchange.activate(transport, clock, folder, settle)
            new = load_authorities(fleet.authorities)[0]
            return (
                f"authority {certificates.authority_hash(new)} signs now; processes get new certificates within "
                "minutes\nnext: run the command again with --finish"
            )
        fleet = await authority_exchange.finish(transport, clock)
        (new,) = load_authorities(fleet.authorities)
        folder.promote()
        return f"authority {certificates.authority_hash(new)} is the only one; the old one's key was deleted here"


@cert.command()
@_NAME
@store_options
def csr(name: str, **options: Any) -> None:
    """Print the request of a process for its next certificate (PKCS#10), for an external authority."""
    click.echo(run(_csr(name, options)), nl=False)


async def _csr(name: str, options: dict[str, Any]) -> str:
    async with open_store(options) as transport:
        fleet = await certificates.read_fleet(transport)
        identity = certificates.parse_name(name, fleet.fleet)
        asked, _ = await certificates.read_request(transport, identity)
        return asked.request


@cert.command()
@_NAME
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@store_options
def install(name: str, file: Path, **options: Any) -> None:
    """Answer the request of a process with the certificate in FILE (PEM; - for stdin), signed by an external authority.

    Intermediate authorities follow in the same file. Before it is accepted, key, names, use, time and chain are
    checked: `fleetctl cert csr ROLE/NAME` prints a request with the right names.
    """
    try:
        serial = run(_install(name, _read(file), options))
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


async def _install(name: str, chain: str, options: dict[str, Any]) -> str:
    async with open_store(options) as transport:
        fleet = await certificates.read_fleet(transport)
        identity = certificates.parse_name(name, fleet.fleet)
        return await certificates.install(transport, SystemClock(), identity, chain)
