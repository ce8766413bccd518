"""`fleetctl node unlock`: unlocks the disk of a Mac over ssh after a restart, and waits for its agent."""

from typing import Any

import click

from fleetctl.cli.arguments import parse_duration, timeout_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance.fleet_watch import FleetWatch, NotReadyError
from fleetctl.maintenance.node_targets import find_targets, target_options
from fleetctl.maintenance.reboot import Restarter
from fleetctl.objects import targets
from fleetctl.remote import disk_unlock
from fleetctl.remote.ssh_flags import ssh_policy
from machinery.clock import SystemClock
from store.port import Transport

_HELP = """Unlock the disk of a Mac that waits for the password of FileVault after a restart, and wait until its agent is back.

A Mac with macOS 26 or newer, FileVault and Remote Login takes the password of a FileVault user over ssh, and then ends the
connection while it starts its services. Keys do not work until then. The password is asked at the terminal, and sent once
to a Mac whose host key is known.

\b
  fleetctl node unlock mac-2 --ssh-user admin
  fleetctl node unlock mac-2 --target mac-2=admin@mac-2.local
"""


@click.command("unlock", help=_HELP)
@click.argument("name")
@timeout_option("10m", "Time for its agent to be back.")
@target_options
@with_store
async def unlock(transport: Transport, name: str, **options: Any) -> None:
    """Unlock the disk of a Mac, and wait until its agent is back."""
    limit_s = parse_duration(options["timeout"])
    node = await targets.read_node(transport, name)
    restarter = Restarter(node.name, FleetWatch(transport, SystemClock()))
    if await restarter.session():
        click.echo(f"node/{name} is not locked: its agent holds a lease")
        return
    target = find_targets([node], options)[node.name]
    words = {
        "Unlocked": f"{target.host} is unlocked, and starts its services",
        "NotLocked": f"{target.host} was not locked: it lets {target.user} in; waiting for its agent",
        "Disconnected": f"{target.host} ended the connection after the password; waiting for its agent",
    }
    click.echo(words[await disk_unlock.unlock(target, ssh_policy(options))])

    async def lacks() -> str:
        return "" if await restarter.session() else "its agent holds no lease"

    try:
        await restarter.watch.wait(lacks, limit_s=limit_s)
    except NotReadyError as error:
        raise FleetctlError(
            f"node/{name}: {error}. `ssh {target}` there and `fleetctl service status` say whether the agent runs"
        ) from error
    click.echo(f"node/{name} is back")
