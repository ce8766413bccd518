"""`fleetctl drain`: nodes are given up, replica by replica; this only asks for it, and looks on."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError, InterruptedByUser
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.objects import targets
from fleetctl.objects.kind_args import kind_of
from fleetctl.objects.targets import Selection
from fleetctl.output import results
from fleetctl.verbs import drain_progress
from fleetctl.verbs.cordon import MANAGER
from fleetctl.verbs.wait import parse_duration
from machinery.clock import Clock, SystemClock
from reconciler import snapshot
from reconciler.snapshot import FleetSnapshot
from schemas.deployment import ModelDeployment
from schemas.node import Node
from schemas.replica import Replica
from store import keys, objects
from store.errors import CompactedError, UnavailableError
from store.port import Transport

# Changes come by a watch; this is for what no change announces, such as a watch that broke.
_POLL_S = 1.0
_RETRY_S = 0.2

_HELP = """Move everything away from nodes, and place nothing new there.

The reconciler does it: it starts replicas elsewhere where there is room, ends those on the node as far as
spec.minAvailable of their deployments allows, and lets requests under way finish. This command writes what is
wanted, and waits until no replica is assigned to the node. Ctrl-C ends the waiting, not the drain.

\b
  fleetctl drain mac-1 --timeout 10m
  fleetctl drain -l site=berlin --no-wait
  fleetctl drain mac-1 --dry-run=client

`fleetctl uncordon` takes the node into use again, and ends a drain.
"""


@click.command(help=_HELP)
@click.argument("nodes", nargs=-1, metavar="NODE...")
@targets.selector_option
@click.option(
    "--timeout", default="5m", show_default=True, help="How long to wait; 0 means for ever."
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is done.")
@results.dry_run(("none", "client"), "client: say what would be moved away, and write nothing.")
@unsupported_flag("there are no daemon sets; leave it out", "--ignore-daemonsets")
@unsupported_flag(
    "replicas keep nothing on a node that a drain could lose; leave it out",
    "--delete-emptydir-data",
)
@unsupported_flag(
    "a drain keeps to spec.minAvailable of the ModelDeployments; change it there", "--force"
)
@unsupported_flag(
    "every replica is the reconciler's, and may go; leave it out", "--disable-eviction"
)
@store_options
def drain(nodes: tuple[str, ...], selector: str, timeout: str, **options: Any) -> None:
    """Move everything away from nodes, and place nothing new there."""
    chosen = targets.selection(
        kind_of("nodes"), targets.parse_node_names(nodes), labels=selector, is_all=None
    )
    timeout_s = parse_duration(timeout)
    asked: list[str] = []
    try:
        run(_drain(chosen, timeout_s, options, asked))
    except InterruptedByUser:
        if not asked:
            raise
        raise InterruptedByUser(
            f"interrupted; the drain of {', '.join(asked)} goes on. "
            f"`fleetctl uncordon {' '.join(asked)}` ends it"
        ) from None


def as_draining(node: Node) -> Node | None:
    """Return the node as it is while it is drained; None if it is that. Pure."""
    return targets.with_spec(node, unschedulable=True, draining=True)


async def _drain(
    chosen: Selection, timeout_s: float, options: dict[str, Any], asked: list[str]
) -> None:
    """Drain nodes; `asked` is told which were asked for."""
    clock, dry = SystemClock(), options["dry_run"] == "client"
    async with open_store(options) as transport:
        nodes = await targets.read_nodes(transport, chosen)
        for node in nodes:
            was_open = not node.spec.unschedulable
            if not dry:
                await targets.apply_edit(transport, clock, node, as_draining, manager=MANAGER)
                asked.append(node.name)
            done = "cordoned" if was_open else "already cordoned"
            click.echo(f"{targets.object_ref(node)} {done}{' (dry run)' if dry else ''}")
        if not nodes:
            return
        watch = _DrainWatch(transport, clock, nodes)
        await watch.announce(dry=dry)
        if dry:
            for node in nodes:
                click.echo(f"{targets.object_ref(node)} drained (dry run)")
        elif options["wait"]:
            await watch.wait(timeout_s)


class _DrainWatch:
    """Watches replicas leave nodes; remembers which it saw there."""

    def __init__(self, transport: Transport, clock: Clock, nodes: Sequence[Node]) -> None:
        self._transport = transport
        self._clock = clock
        self._given_up = nodes
        self._nodes = tuple(node.name for node in nodes)
        self._there: dict[str, Replica] = {}
        self._drained: set[str] = set()
        self._revision = 0

    async def announce(self, *, dry: bool) -> None:
        """Say what is to leave, and what cannot."""
        seen = await snapshot.take(self._transport, self._clock)
        if dry:  # where would things go if the nodes were given up?
            seen.suppose(as_draining(node) or node for node in self._given_up)
        self._there = drain_progress.replicas_on(
            list(seen.lister.replicas()), frozenset(self._nodes)
        )
        for name in self._there:
            click.echo(f"evicting replica/{name}{' (dry run)' if dry else ''}")
        deployments, lacks = self._outlook(seen)
        number = Counter(replica.spec.deployment for replica in self._there.values())
        for name, why in lacks.items():
            if drain_progress.count_blocked(deployments[name], number[name]):
                said = drain_progress.blocked_warning(deployments[name], number[name], why)
                click.echo(f"warning: {said}", err=True)

    def _outlook(self, seen: FleetSnapshot) -> tuple[dict[str, ModelDeployment], dict[str, str]]:
        """Return the deployments with their statuses; and those that have no place for a replacement."""
        deployments = {
            one.name: one.model_copy(update={"status": seen.lister.deployment_status(one.name)})
            for one in seen.deployments()
        }
        names = {replica.spec.deployment for replica in self._there.values()}
        return deployments, drain_progress.unplaceable_deployments(seen, names)

    async def wait(self, timeout_s: float) -> None:
        """Wait until no replica is assigned to the nodes.

        Raises:
            FleetctlError: it took too long, with what is left and why; or somebody ended the drain.

        """
        deadline = self._clock.monotonic() + timeout_s if timeout_s else float("inf")
        while not await self._is_done(deadline):
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0:
                raise FleetctlError(await self._too_late(timeout_s))
            await self._next_change(min(left_s, _POLL_S))

    async def _is_done(self, deadline: float) -> bool:
        try:
            # What changes while it is listed is seen again, rather than missed.
            self._revision = (await self._transport.status()).revision
            replicas = await objects.list_all(self._transport, Replica)
            await self._refuse_if_ended()
        except UnavailableError:
            # A store that restarts meanwhile is part of what is waited through.
            if self._clock.monotonic() >= deadline:
                raise
            await self._clock.sleep(_RETRY_S)
            return False
        there = drain_progress.replicas_on(replicas, frozenset(self._nodes))
        for name in sorted(self._there.keys() - there.keys()):
            click.echo(f"replica/{name} evicted")
        self._there = there
        for node in self._nodes:
            if node not in self._drained and not drain_progress.replicas_on(
                replicas, frozenset({node})
            ):
                self._drained.add(node)
                click.echo(f"node/{node} drained")
        return not there

    async def _refuse_if_ended(self) -> None:
        for name in self._nodes:
            node = await objects.get(self._transport, Node, name)
            if name not in self._drained and (node is None or not node.spec.draining):
                raise FleetctlError(
                    f"the drain of node/{name} was ended by somebody: spec.draining is not set any more"
                )

    async def _next_change(self, limit_s: float) -> None:
        """Wait until a replica changes, or for so long."""
        try:
            async with asyncio.timeout(limit_s):
                prefix = keys.spec_prefix("Replica")
                watch = self._transport.watch(prefix, after_revision=self._revision)
                async with aclosing(watch):
                    async for batch in watch:
                        if batch.changes:
                            return
        except (TimeoutError, CompactedError):
            return
        except UnavailableError:
            await self._clock.sleep(_RETRY_S)

    async def _too_late(self, timeout_s: float) -> str:
        deployments, lacks = self._outlook(await snapshot.take(self._transport, self._clock))
        lines = [
            f"  replica/{name}: {drain_progress.remaining_reason(replica, deployments, lacks)}"
            for name, replica in self._there.items()
        ]
        names = " ".join(node for node in self._nodes if node not in self._drained)
        if await self._transport.get(keys.ELECTION_RECONCILER) is None:
            lines.append("  no reconciler leads: start fleet-reconciler, for it moves replicas")
        count = f"{len(self._there)} {'replica is' if len(self._there) == 1 else 'replicas are'}"
        return (
            f"timed out after {timeout_s:g} s: {count} still on {names.replace(' ', ', ')}\n"
            + "\n".join(lines)
            + f"\nThe drain goes on; `fleetctl uncordon {names}` ends it"
        )
