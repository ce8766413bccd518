"""The verb `fleetctl fabric setup`: network services and addresses of this Mac's Thunderbolt ports."""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from fleetctl.cli.errors import FleetctlError
from fleetctl.services import launchd, link_plan, macos_network
from fleetctl.services.changes import Change, FileChange
from fleetctl.services.link_plan import LinkPlan
from fleetctl.services.plan import sentence
from fleetctl.verbs.service import Installation, installation_at
from nodeagent.hardware.service_definitions import label_of

_ROOT: Final = Path("/")

_HELP = """Give each Thunderbolt port of this Mac a network service of its own, and each cable a small network (/30).

\b
  sudo fleetctl fabric setup --dry-run
  sudo fleetctl fabric setup

Run it on each Mac of a ShardGroup, once all cables are plugged in, and again after they were moved. Both ends derive the
addresses from the UUIDs of their ports, so that no Mac asks another. The Thunderbolt Bridge is dissolved: in a ring of cables
it makes a loop. Every change is recorded first; --undo and `sudo fleetctl service uninstall` undo it. A job applies the
settings again at each boot.

It has not run on hardware yet: docs/hardware.md has a checklist for the first Macs.
"""


@click.command(help=_HELP)
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@click.option("--undo", "is_undo", is_flag=True, help="Undo every change that this command made.")
@click.option(
    "--replace",
    "is_replacing",
    is_flag=True,
    help="Switch off network services that give a Thunderbolt port an address by hand; without it, such ports stay.",
)
@click.option(
    "--salt",
    metavar="WORD",
    help="Word that changes all networks, for Macs of which one would have the same network twice; the same on all of them.",
)
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    default=_ROOT,
    hidden=True,
    help="Folder above all paths: for tests.",
)
def setup(
    *, dry_run: bool, is_undo: bool, is_replacing: bool, salt: str | None, root: Path
) -> None:
    """Set up the Thunderbolt ports of this Mac."""
    if sys.platform != "darwin" and root == _ROOT:
        raise FleetctlError("only a Mac has Thunderbolt ports that this command can set up")
    if not dry_run and os.geteuid() != 0:
        raise FleetctlError(
            "this needs root: run `sudo fleetctl fabric setup`; --dry-run shows the changes without"
        )
    installation = installation_at(root, "launchd", is_user=False)
    if is_undo:
        asyncio.run(_undo(installation, is_dry_run=dry_run))
        return
    asyncio.run(apply_setup(installation, is_dry_run=dry_run, is_replacing=is_replacing, salt=salt))


async def _undo(installation: Installation, *, is_dry_run: bool) -> None:
    installer = installation.installer
    if is_dry_run:
        changes = list(reversed(installer.recorded(link_plan.PART)))
        _print_changes("These changes would be undone:", changes)
        return
    was_set_up = await installer.uninstall(link_plan.PART, click.echo)
    click.echo(
        "the Thunderbolt ports are as before `fabric setup`"
        if was_set_up
        else "`fabric setup` changed nothing on this Mac"
    )


async def apply_setup(
    installation: Installation, *, is_dry_run: bool, is_replacing: bool, salt: str | None
) -> None:
    """Make the changes that the ports of this Mac need, and print its addresses.

    Raises:
        FleetctlError: this Mac has no such ports.
        ServiceError: macOS refuses a change; the others are recorded.

    """
    installer = installation.installer
    recorded = installer.recorded(link_plan.PART)
    state = await macos_network.read_state()
    if not state.ports:
        raise FleetctlError("this Mac has no Thunderbolt port that system_profiler knows")
    plan = link_plan.plan_links(state, recorded, salt=salt, is_replacing=is_replacing)
    changes = (*plan.changes, *_boot_job(plan, installation))
    pending = await installer.preview(changes)
    if is_dry_run:
        _print_changes("These changes need root:", pending)
    else:
        await installer.apply(changes, link_plan.PART, installation.backend, click.echo)
    for line in _report(plan):
        click.echo(line)
    if not (is_dry_run or pending):
        click.echo("Nothing had to be changed.")


def _print_changes(head: str, changes: list[Change]) -> None:
    if changes:
        click.echo(head)
    for change in changes:
        click.echo(f"  {sentence(change)}")
    click.echo("Nothing was changed." if changes else "Nothing has to be changed.")


def _boot_job(plan: LinkPlan, installation: Installation) -> Iterator[FileChange]:
    if plan.changes:
        job = launchd.command_plist(link_plan.PART, link_plan.boot_command(plan))
        path = installation.layout.definitions / f"{label_of(link_plan.PART)}.plist"
        yield FileChange(path=str(path), content=job.decode())


def _report(plan: LinkPlan) -> Iterator[str]:
    """Yield the addresses, and the lines for a ShardGroup."""
    yield from (f"note: {note}" for note in plan.notes)
    for link in plan.links:
        yield (
            f"Thunderbolt {link.port.receptacle} ({link.port.interface}): {link.here}; "
            f"the other end of its cable is {link.there.ip}"
        )
    if not plan.links:
        yield "No cable leads to another Mac yet: plug the cables in, and run this again."
        return
    addresses = ", ".join(str(link.here.ip) for link in plan.links)
    yield "In the ShardGroup:"
    node = socket.gethostname().partition(".")[0].lower()
    yield f"  - {{node: {node}, addresses: [{addresses}]}}"
    if len(plan.links) > 1:
        yield (
            "  (with backend ring and three Macs or more: only the addresses on cables to the Mac before it in the list)"
        )
