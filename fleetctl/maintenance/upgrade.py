"""Carries out the plan of an upgrade: installs beside, restarts one service after the other, goes back where one fails."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance.fleet_watch import FleetWatch, NotReadyError, Sighting
from fleetctl.maintenance.mac_release import MacRelease, MacState
from fleetctl.maintenance.upgrade_plan import ORDER, Restart, UpgradePlan
from fleetctl.remote.errors import RemoteError

_UPLOADS: Final = 4
READY_S: Final = 120.0
_BACK_S: Final = 60.0
_LOOK_S: Final = 1.5
_UNSTABLE_LOOKS: Final = 5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeLimits:
    """Limits of one upgrade."""

    ready_s: float = READY_S
    """Time for a service to be Ready after its restart."""
    concurrency: int = 1
    """The number of agents that restart at once."""


class Upgrader:
    """Carries out one plan."""

    def __init__(
        self,
        plan: UpgradePlan,
        macs: Mapping[str, MacRelease],
        watch: FleetWatch,
        say: Say,
        limits: UpgradeLimits,
    ) -> None:
        self._plan = plan
        self._macs = macs
        self._watch = watch
        self._say = say
        self._limits = limits

    async def install_all(self, *, python: str = "") -> None:
        """Install the release beside the one in use, on all Macs that lack it. Raises FleetctlError."""
        slots, release = asyncio.Semaphore(_UPLOADS), self._plan.release
        failures: list[str] = []

        async def install(node: str) -> None:
            async with slots:
                mac = self._macs[node]
                try:
                    await mac.install(await mac.read(), release, python=python)
                except RemoteError as error:
                    failures.append(f"  node/{node}: {error}")
                    return
                self._say(f"node/{node}: {release.version} is installed")

        async with asyncio.TaskGroup() as group:
            for node in self._plan.installs:
                group.create_task(install(node))
        if failures:
            raise FleetctlError(
                "\n".join(
                    [
                        f"{release.version} cannot be installed on {len(failures)} Macs; nothing was restarted:",
                        *sorted(failures),
                    ]
                )
            )

    async def restart_all(self) -> None:
        """Restart the services, in order. Raises FleetctlError: one failed, and the upgrade stopped."""
        for part in ORDER:
            steps = [restart for restart in self._plan.restarts if restart.part == part]
            size = self._limits.concurrency if part == "nodeagent" else 1
            for at in range(0, len(steps), size):
                failures = await self._restart_some(steps[at : at + size])
                if failures:
                    restarts = steps[at + size :]
                    rest = (
                        f"; not touched: {', '.join(one.node for one in restarts)}"
                        if restarts
                        else ""
                    )
                    raise FleetctlError("\n".join(failures) + f"\nThe upgrade stopped here{rest}")
        for node in self._plan.previous:
            # Move the link of a Mac on which nothing had to restart.
            mac = self._macs[node]
            state = await mac.read()
            if state.current != self._plan.release.version:
                await mac.use(state, self._plan.release.version)

    async def _restart_some(self, steps: Sequence[Restart]) -> list[str]:
        """Restart services at once; return why some failed. Raises StoreError."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._restart(step)) for step in steps]
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        return [task.result() for task in tasks if task.result()]

    async def _restart(self, step: Restart) -> str:
        """Restart one service with the release; return why it failed and what was done, "" if it did not."""
        mac, version = self._macs[step.node], self._plan.release.version
        before = await self._watch.look(step.node)
        began = self._watch.clock.monotonic()
        state = await mac.read()
        old = self._plan.previous[step.node]
        try:
            if state.current != version:
                await mac.use(state, version)
            await mac.restart(state, step.part, by=old or version)
            # Wait until a service is Ready. Raises NotReadyError: it is not in time, or its program
            # ends again and again.
            try:
                async with asyncio.TaskGroup() as group:
                    crashes = group.create_task(self._watch_crashes(step, state))
                    await self._watch.wait_ready(
                        step.node,
                        step.part,
                        self._plan.release.version,
                        before=before,
                        limit_s=self._limits.ready_s,
                    )
                    crashes.cancel()
            except BaseExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
        except (RemoteError, NotReadyError) as error:
            problem = f"node/{step.node}: {step.part} {version} is not Ready: {error}"
            return f"{problem}. {await self._go_back(step, before)}"
        took_s = self._watch.clock.monotonic() - began
        self._say(f"node/{step.node}: {step.part} runs {version} ({took_s:.1f} s)")
        return ""

    async def _watch_crashes(self, step: Restart, state: MacState) -> None:
        """Raise NotReadyError once the program was another process, or none, at each of several looks in a row.

        The fleet moves the replicas of a Mac whose agent is away for 30 s: a way back must be shorter than that.
        """
        by = self._plan.previous[step.node] or self._plan.release.version
        last, unstable = None, 0
        while unstable < _UNSTABLE_LOOKS:
            await self._watch.clock.sleep(_LOOK_S)
            try:
                pids = await self._macs[step.node].pids(state, by=by)
            except (
                RemoteError
            ):  # a busy Mac may not answer in time; the deadline of the service still counts
                continue
            pid = None if pids is None else pids.get(step.part)
            unstable = unstable + 1 if pid is None or pid != last else 0
            last = pid
        raise NotReadyError("its program ends again and again")

    async def _go_back(self, step: Restart, before: Sighting) -> str:
        """Return a Mac to its release, and say so."""
        node = step.node
        old = self._plan.previous[node]
        by_hand = (
            f"Its log says why (`fleetctl logs node/{node}`, or the service's log on that Mac)"
        )
        if not self._plan.has_rollback or not old:
            return f"It was not rolled back, as the plan said. {by_hand}"
        mac = self._macs[node]
        try:
            state = await mac.read_installed()
            self._say(f"node/{node}: going back to {old}")
            await mac.use(state, old)
            await self._restart_old(mac, old)
            await self._watch.wait_ready(node, step.part, old, before=before, limit_s=_BACK_S)
        except (RemoteError, NotReadyError) as error:
            return f"It did not come back with {old} either: {error}. {by_hand}"
        return f"It runs {old} again. {by_hand}"

    async def _restart_old(self, mac: MacRelease, old: str) -> None:
        """Restart every service of a Mac that does not run the old release."""
        state: MacState = await mac.read(by=old)
        for part in ORDER:
            if part in state.parts and not state.runs(part, old):
                await mac.restart(state, part, by=old)
