"""Upgrades Macs: reads the facts for the plan, installs beside, restarts one service after the other, goes back where one fails."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance import rolling_run
from fleetctl.maintenance.fleet_watch import FleetWatch, NotReadyError, Sighting
from fleetctl.maintenance.mac_release import MacRelease, MacState
from fleetctl.maintenance.rolling_run import Mac, Stage
from fleetctl.maintenance.upgrade_plan import ORDER, FleetFacts, NodeFacts, UpgradePlan
from fleetctl.remote.errors import RemoteError
from insight import version_skew
from insight.version_skew import UNKNOWN, ComponentVersion
from machinery.version import version
from schemas.node import Node
from schemas.replica import Replica
from store import object_trees, objects
from store.port import Transport

_UPLOADS: Final = 4
_BACK_S: Final = 60.0
_LOOK_S: Final = 1.5
_UNSTABLE_LOOKS: Final = 5


async def read_facts(
    transport: Transport, nodes: Sequence[Node], macs: Mapping[str, Mac]
) -> FleetFacts:
    """Return what an upgrade is planned from. Raises StoreError."""
    ours = ComponentVersion(part="fleetctl", version=version())
    versions = await version_skew.read_versions(transport, ours)
    ready = await object_trees.ready_nodes(transport)
    replicas = await objects.list_all(transport, Replica)
    return FleetFacts(
        nodes=[
            NodeFacts(
                name=node.name,
                is_ready=node.name in ready,
                mac=macs[node.name].state,
                mlx_lm=node.status.mlx_lm_version if node.status is not None else "",
                deployments=tuple(
                    sorted(
                        {
                            replica.spec.deployment
                            for replica in replicas
                            if any(rank.node == node.name for rank in replica.spec.ranks)
                        }
                    )
                ),
            )
            for node in nodes
        ],
        versions={
            server.label: server.version
            for server in versions.servers()
            if server.part != "etcd"
            and server.version != UNKNOWN
            and not (server.part == "nodeagent" and server.name in macs)
        },
        etcd=versions.etcd.version,
        gateways=len(versions.gateways),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrader:
    """Carries out one plan."""

    plan: UpgradePlan
    macs: Mapping[str, Mac]
    watch: FleetWatch
    say: Callable[[str], None]
    ready_s: float
    """Time for a service to be Ready after its restart."""

    async def run(self, *, python: str, concurrency: int) -> None:
        """Install the release on all Macs that lack it, then restart the services with it.

        Args:
            python: Python on the Macs, for an archive that has none.
            concurrency: the number of agents that restart at once.

        Raises:
            FleetctlError: a step failed, and the upgrade stopped there.

        """
        plan = self.plan

        async def install(node: str) -> None:
            release = self.macs[node].release
            await release.install(await release.read(), plan.release, python=python)
            self.say(f"node/{node}: {plan.release.version} is installed")

        if failures := await rolling_run.for_each(plan.installs, install, concurrency=_UPLOADS):
            raise FleetctlError(
                "\n".join(
                    [
                        f"{plan.release.version} cannot be installed on {len(failures)} Macs; nothing was restarted:",
                        *failures,
                    ]
                )
            )
        await rolling_run.roll(
            [
                Stage(
                    part=part,
                    nodes=tuple(restart.node for restart in plan.restarts if restart.part == part),
                    concurrency=concurrency if part == "nodeagent" else 1,
                )
                for part in ORDER
            ],
            self._restart,
        )
        for node in plan.previous:
            # Move the link of a Mac on which nothing had to restart.
            release = self.macs[node].release
            state = await release.read()
            if state.current != plan.release.version:
                await release.use(state, plan.release.version)

    async def _restart(self, stage: Stage, node: str) -> None:
        """Restart one service with the release; go back to the one before if it does not become Ready.

        Raises:
            FleetctlError: it did not; the message says why, and what was done.

        """
        mac, new, old = self.macs[node].release, self.plan.release.version, self.plan.previous[node]
        before = await self.watch.look(node)
        began = self.watch.clock.monotonic()
        state = await mac.read()
        try:
            if state.current != new:
                await mac.use(state, new)
            await mac.restart(state, stage.part, by=old or new)
            try:
                async with asyncio.TaskGroup() as group:
                    crashes = group.create_task(
                        self._watch_crashes(mac, state, stage.part, by=old or new)
                    )
                    await self.watch.wait_ready(
                        node, stage.part, new, before=before, limit_s=self.ready_s
                    )
                    crashes.cancel()
            except BaseExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
        except (RemoteError, NotReadyError) as error:
            end = await self._go_back(node, stage.part, before)
            raise FleetctlError(f"{stage.part} {new} is not Ready: {error}. {end}") from error
        took_s = self.watch.clock.monotonic() - began
        self.say(f"node/{node}: {stage.part} runs {new} ({took_s:.1f} s)")

    async def _watch_crashes(self, mac: MacRelease, state: MacState, part: str, *, by: str) -> None:
        """Raise NotReadyError once the program was another process, or none, at each of several looks in a row.

        The fleet moves the replicas of a Mac whose agent is away for 30 s: a way back must be shorter than that.
        """
        last, unstable = None, 0
        while unstable < _UNSTABLE_LOOKS:
            await self.watch.clock.sleep(_LOOK_S)
            try:
                pids = await mac.pids(state, by=by)
            except RemoteError:  # a busy Mac; the deadline of the service still counts
                continue
            pid = None if pids is None else pids.get(part)
            unstable = unstable + 1 if pid is None or pid != last else 0
            last = pid
        raise NotReadyError("its program ends again and again")

    async def _go_back(self, node: str, part: str, before: Sighting) -> str:
        """Return a Mac to its release, with every service that does not run it, and say so."""
        mac, old = self.macs[node].release, self.plan.previous[node]
        by_hand = (
            f"Its log says why (`fleetctl logs node/{node}`, or the service's log on that Mac)"
        )
        if not self.plan.has_rollback or not old:
            return f"It was not rolled back, as the plan said. {by_hand}"
        try:
            self.say(f"node/{node}: going back to {old}")
            await mac.use(await mac.read_installed(), old)
            state = await mac.read(by=old)
            for name in ORDER:
                if name in state.parts and not state.runs(name, old):
                    await mac.restart(state, name, by=old)
            await self.watch.wait_ready(node, part, old, before=before, limit_s=_BACK_S)
        except (RemoteError, NotReadyError) as error:
            return f"It did not come back with {old} either: {error}. {by_hand}"
        return f"It runs {old} again. {by_hand}"
