"""`fleetctl node reboot`: drains a Mac, restarts it, and lets it serve again."""

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import click

from fleetctl.cli import terminal
from fleetctl.cli.arguments import parse_duration, reason_option, timeout_option
from fleetctl.cli.connect import etcd_address, with_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance import reboot as restarts
from fleetctl.maintenance.fleet_watch import FleetWatch
from fleetctl.maintenance.node_targets import (
    NodeSessions,
    find_targets,
    target_options,
)
from fleetctl.maintenance.reboot import Restarter
from fleetctl.maintenance.reboot_plan import (
    RebootFacts,
    RebootPlan,
    RebootWishes,
    plan_reboot,
)
from fleetctl.maintenance.rolling_run import PlanRefusal
from fleetctl.objects import targets, writer
from fleetctl.remote.errors import RemoteError
from fleetctl.remote.ssh_flags import ssh_policy
from fleetctl.verbs.drain import drain_node
from insight import actions
from machinery.clock import SystemClock
from schemas import quantity
from schemas.node import Node
from store import objects
from store.port import Transport

_HELP = """Restart a Mac: move its replicas away (--drain), restart it over ssh, wait until it is back, and place on it again.

It says before what will happen, and refuses if another Mac of the same shard group is away or draining, or if etcd would
lose its majority. If FileVault is on, it asks for its password at the terminal, which unlocks the disk once
(fdesetup authrestart); --leave-locked restarts without. A Mac that was cordoned before stays cordoned.

\b
  fleetctl node reboot mac-2 --drain --ssh-user admin
  fleetctl node reboot mac-2 --drain --target mac-2=admin@mac-2.local --yes
"""


@click.command("reboot", help=_HELP)
@click.argument("name")
@click.option("--drain", is_flag=True, help="Move the replicas away first, as `fleetctl drain`.")
@click.option(
    "--drain-timeout", default="10m", show_default=True, help="Time for the replicas to move."
)
@timeout_option("15m", "Time for the Mac to come back.")
@click.option(
    "--leave-locked",
    is_flag=True,
    help="Restart although FileVault keeps the disk locked until a person unlocks it.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@target_options
@reason_option
@with_store
async def reboot(transport: Transport, name: str, **options: Any) -> None:
    """Restart a Mac, and wait until it serves again."""
    drain_s, back_s = parse_duration(options["drain_timeout"]), parse_duration(options["timeout"])
    clock = SystemClock()
    wishes = RebootWishes(drain=options["drain"], leaves_locked=options["leave_locked"])
    async with AsyncExitStack() as stack:
        node = await targets.read_node(transport, name)
        restarter = Restarter(node.name, FleetWatch(transport, clock))
        session = await restarter.session()
        if not session:
            raise FleetctlError(
                f"node/{node.name} holds no lease, so nothing could tell when it is back. Restart it by hand: "
                "`sudo shutdown -r now` on it"
            )
        sessions = NodeSessions.create(find_targets([node], options), ssh_policy(options), stack)
        facts = await _facts(transport, node, sessions, options)
        plan = _plan(facts, wishes)
        click.echo("\n".join(plan.lines))
        terminal.confirm("Go on?", is_confirmed=options["yes"])
        mac = await sessions.open(node.name)
        await mac.check_sudo()
        wired = await restarts.wired_bytes(mac)
        if wishes.drain:
            # Before it, so that the second look below sees the drain of whoever restarts another Mac of the group.
            await drain_node(node.name, drain_s, options)
            facts = replace(await _facts(transport, node, sessions, options), replicas=())
            _plan(facts, wishes, is_drained=True)
        prompts = sessions.policy.prompts
        await restarter.restart(mac, prompts, unlocks=plan.asks_password)
        click.echo(f"node/{node.name} restarts")
        await restarter.wait_down(session)
        sessions.forget(node.name)
        await restarter.wait_back(session, limit_s=back_s)
        await _report_wired(node, sessions, wired)
        await _uncordon(transport, node)


async def _facts(
    transport: Transport, node: Node, sessions: NodeSessions, options: dict[str, Any]
) -> RebootFacts:
    mac = await sessions.open(node.name)
    return await restarts.read_facts(
        transport,
        node,
        etcd_address(options),
        mac,
        can_unlock=sessions.policy.prompts is not None,
    )


def _plan(facts: RebootFacts, wishes: RebootWishes, *, is_drained: bool = False) -> RebootPlan:
    reboot_plan = plan_reboot(facts, wishes)
    if isinstance(reboot_plan, PlanRefusal):
        rest = (
            f". It stays drained; `fleetctl uncordon {facts.node}` ends that" if is_drained else ""
        )
        raise FleetctlError(reboot_plan.message + rest)
    return reboot_plan


async def _report_wired(node: Node, sessions: NodeSessions, before: int | None) -> None:
    """Print how the wired memory changed, if the Mac tells; its NeedsReboot condition was judged already."""
    if before is None:
        click.echo(f"node/{node.name} is back")
        return
    try:
        after = await restarts.wired_bytes(await sessions.open(node.name))
    except RemoteError:
        after = None
    if after is None:
        click.echo(f"node/{node.name} is back; its wired memory is unknown")
        return
    texts = f"{quantity.show(before)} before, {quantity.show(after)} now"
    click.echo(f"node/{node.name} is back; wired memory: {texts}")
    if after >= before:
        click.echo(f"warning: the wired memory of node/{node.name} did not fall", err=True)


async def _uncordon(transport: Transport, before: Node) -> None:
    name = before.name
    if before.spec.unschedulable:
        click.echo(f"node/{name} was cordoned before, and stays so: `fleetctl uncordon {name}`")
        return
    node = await objects.get(transport, Node, name)
    if node is not None:
        await writer.write_edit(transport, SystemClock(), node, actions.EDITS["uncordon"])
    click.echo(f"node/{name} uncordoned")
