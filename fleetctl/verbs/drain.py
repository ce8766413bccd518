"""`fleetctl drain`: asks the reconciler to move all replicas away from nodes, and follows the progress."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import parse_duration, reason_option, timeout_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError, InterruptedByUser
from fleetctl.objects import reader, targets, writer
from fleetctl.objects.kind_args import kind_of
from fleetctl.objects.targets import Selection
from fleetctl.verbs import drain_progress
from insight import actions, edits
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock, SystemClock
from reconciler.deployments import snapshot
from reconciler.deployments.snapshot import FleetSnapshot
from schemas.deployment import ModelDeployment
from schemas.node import Node
from schemas.replica import Replica
from store import keys, objects
from store.errors import CompactedError, UnavailableError
from store.port import Transport

# The longest wait for a change; a broken watch announces nothing.
_POLL_S = 1.0
_BACKOFF = Backoff(first_s=0.2, limit_s=4.0)

_HELP = """Move all replicas away from nodes, and stop placing new ones there.

The reconciler starts replacements on other nodes. It ends the replicas on the drained nodes as far as
spec.minAvailable of their deployments allows, after their requests have finished. This command starts the drain and
waits until no replica is assigned to the nodes. Ctrl-C ends the wait, not the drain.

\b
  fleetctl drain mac-1 --timeout 10m
  fleetctl drain -l site=berlin --no-wait
  fleetctl drain mac-1 --dry-run=client

`fleetctl uncordon` ends a drain and enables placement again.
"""


@click.command(help=_HELP, short_help="Move all replicas away from nodes, and place no new ones.")
@click.argument("nodes", nargs=-1, metavar="NODE...")
@arguments.selector_option
@timeout_option("5m", "Time limit of the wait; 0 means no limit.")
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until the drain is complete."
)
@arguments.dry_run(("none", "client"), "client: say what would be moved away, and write nothing.")
@reason_option
@store_options
def drain(nodes: tuple[str, ...], selector: str, timeout: str, **options: Any) -> None:
    """Move all replicas away from nodes, and stop placing new ones there."""
    chosen = targets.selection(
        kind_of("nodes"), targets.parse_node_names(nodes), labels=selector, is_all=None
    )
    timeout_s = parse_duration(timeout)
    started: list[str] = []
    try:
        run(_drain(chosen, timeout_s, options, started))
    except InterruptedByUser:
        if not started:
            raise
        raise InterruptedByUser(
            f"interrupted; the drain of {', '.join(started)} continues. "
            f"`fleetctl uncordon {' '.join(started)}` ends it"
        ) from None


async def drain_node(name: str, timeout_s: float, options: dict[str, Any]) -> None:
    """Drain one node, and wait until it is empty. Raises FleetctlError, StoreError."""
    chosen = targets.selection(kind_of("nodes"), targets.parse_node_names((name,)), is_all=None)
    await _drain(chosen, timeout_s, {**options, "dry_run": "none", "wait": True}, [])


async def _drain(
    chosen: Selection, timeout_s: float, options: dict[str, Any], started: list[str]
) -> None:
    """Drain nodes; append the names of nodes that the store has as draining to `started`."""
    clock, dry = SystemClock(), options["dry_run"] == "client"
    async with open_store(options) as transport:
        nodes = await targets.read_nodes(transport, chosen)
        for node in nodes:
            if not dry:
                await writer.write_edit(transport, clock, node, actions.EDITS["drain"])
                started.append(node.name)
            done = "already cordoned" if node.spec.unschedulable else "cordoned"
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
    """Follows the replicas that leave nodes."""

    def __init__(self, transport: Transport, clock: Clock, nodes: Sequence[Node]) -> None:
        self._transport = transport
        self._clock = clock
        self._node_objects = nodes
        self._nodes = tuple(node.name for node in nodes)
        self._remaining: dict[str, Replica] = {}
        self._drained: set[str] = set()
        self._revision = 0
        self._retries = Retries(_BACKOFF, clock)

    async def announce(self, *, dry: bool) -> None:
        """Print which replicas will be moved, and warn about those that cannot."""
        fleet_snapshot = await snapshot.take(self._transport, self._clock)
        if dry:  # plan as if the nodes were draining
            fleet_snapshot.suppose(edits.as_draining(node) or node for node in self._node_objects)
        self._remaining = drain_progress.replicas_on(
            list(fleet_snapshot.lister.replicas()), frozenset(self._nodes)
        )
        for name in self._remaining:
            click.echo(f"evicting replica/{name}{' (dry run)' if dry else ''}")
        deployments, lacks = self._outlook(fleet_snapshot)
        number = Counter(replica.spec.deployment for replica in self._remaining.values())
        for name, why in lacks.items():
            if drain_progress.count_blocked(deployments[name], number[name]):
                warning = drain_progress.blocked_warning(deployments[name], number[name], why)
                click.echo(f"warning: {warning}", err=True)

    def _outlook(self, seen: FleetSnapshot) -> tuple[dict[str, ModelDeployment], dict[str, str]]:
        """Return the deployments with their statuses, and those without a node for a replacement, with the reason."""
        deployments = {
            deployment.name: deployment.model_copy(
                update={"status": seen.lister.deployment_status(deployment.name)}
            )
            for deployment in seen.deployments()
        }
        names = {replica.spec.deployment for replica in self._remaining.values()}
        return deployments, drain_progress.unplaceable_deployments(seen, names)

    async def wait(self, timeout_s: float) -> None:
        """Wait until no replica is assigned to the nodes.

        Raises:
            FleetctlError: the time is over, with the remaining replicas and reasons; or the drain was ended.

        """
        deadline = self._clock.monotonic() + timeout_s if timeout_s else float("inf")
        while not await self._is_done(deadline):
            left_s = deadline - self._clock.monotonic()
            if left_s <= 0:
                raise FleetctlError(await self._too_late(timeout_s))
            await self._next_change(min(left_s, _POLL_S))

    async def _is_done(self, deadline: float) -> bool:
        try:
            # Taken before the list: a change during the list is seen twice rather than missed.
            self._revision = (await self._transport.status()).revision
            self._retries.reset()
            replicas = await objects.list_all(self._transport, Replica)
            await self._refuse_if_ended()
        except UnavailableError:
            # Outages of the store are waited through.
            if self._clock.monotonic() >= deadline:
                raise
            await self._retries.wait()
            return False
        remaining = drain_progress.replicas_on(replicas, frozenset(self._nodes))
        for name in sorted(self._remaining.keys() - remaining.keys()):
            click.echo(f"replica/{name} evicted")
        self._remaining = remaining
        for node in self._nodes:
            if node not in self._drained and not drain_progress.replicas_on(
                replicas, frozenset({node})
            ):
                self._drained.add(node)
                click.echo(f"node/{node} drained")
        return not remaining

    async def _refuse_if_ended(self) -> None:
        for name in self._nodes:
            node = await objects.get(self._transport, Node, name)
            if name not in self._drained and (node is None or not node.spec.draining):
                raise FleetctlError(
                    f"the drain of node/{name} was ended by another user: spec.draining is no longer set"
                )

    async def _next_change(self, limit_s: float) -> None:
        """Wait until a replica changes, at most this long."""
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
            await self._retries.wait()

    async def _too_late(self, timeout_s: float) -> str:
        fleet_snapshot = await snapshot.take(self._transport, self._clock)
        deployments, lacks = self._outlook(fleet_snapshot)
        waiting = drain_progress.waiting_replicas(fleet_snapshot)
        reason_of = drain_progress.remaining_reason
        lines = [
            f"  replica/{name}: {reason_of(replica, deployments, lacks, waiting)}"
            for name, replica in self._remaining.items()
        ]
        names = " ".join(node for node in self._nodes if node not in self._drained)
        if why := await reader.reconciler_problem(self._transport):
            lines.append(f"  {why}, which moves replicas")
        count = f"{len(self._remaining)} {'replica is' if len(self._remaining) == 1 else 'replicas are'}"
        return (
            f"timed out after {timeout_s:g} s: {count} still on {names.replace(' ', ', ')}\n"
            + "\n".join(lines)
            + f"\nThe drain continues; `fleetctl uncordon {names}` ends it"
        )
