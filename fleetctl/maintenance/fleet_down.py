"""Ends a whole fleet over ssh: gateways, reconcilers, agents with their engines, and etcd last.

Each step is one `fleetctl service stop` on a Mac, which does nothing where the service has ended, so a run that was killed
is finished by the next. The targets are kept in a file meanwhile: once etcd is down, only it knows the Macs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance.mac_release import MacRelease, MacState
from fleetctl.remote.errors import RemoteError
from machinery.clock import Clock
from schemas.records import GatewayLease
from store import codec, keys
from store.port import Transport

ORDER: Final = ("gateway", "reconciler", "nodeagent", "etcd")
"""Gateways finish their requests while everything else works. Reconcilers end before agents, or they would move replicas.
Agents end before etcd, which their engines' leases are kept in."""

_AT_ONCE: Final = 8
# A lease of a gateway lives for 4 s, and one that ends removes its key.
_GATEWAYS_S: Final = 6.0
_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kind of service, and the Macs that have it installed."""

    part: str
    nodes: tuple[str, ...]
    stopped: tuple[str, ...] = ()
    """Macs on which it does not run any more."""


def plan_steps(states: Mapping[str, MacState]) -> tuple[Step, ...]:
    """Return the steps in their order. Pure.

    An agent that has ended may have left engines behind, so its step is never left out.
    """
    steps: list[Step] = []
    for part in ORDER:
        installed = {
            name: state.parts[part] for name, state in states.items() if part in state.parts
        }
        if installed:
            ended = tuple(sorted(name for name, one in installed.items() if one.pid is None))
            steps.append(Step(part=part, nodes=tuple(sorted(installed)), stopped=ended))
    return tuple(steps)


def plan_lines(steps: Sequence[Step], *, grace_s: float) -> list[str]:
    """Return the plan as lines. Pure."""
    notes = {
        "gateway": "requests in flight finish within its --drain-timeout, new ones are refused",
        "nodeagent": f"then its engines, whose requests get {grace_s:g} s",
        "etcd": "one Mac after the other",
    }
    lines: list[str] = []
    for number, step in enumerate(steps, 1):
        note = f" ({notes[step.part]})" if step.part in notes else ""
        lines.append(f"  {number}. {step.part} of {', '.join(step.nodes)}{note}")
        if step.stopped:
            lines.append(f"     stopped already: {', '.join(step.stopped)}")
    if not any(step.part == "etcd" for step in steps):
        lines.append("  etcd is no service of these Macs, and goes on")
    return lines


async def read_states(macs: Mapping[str, MacRelease]) -> dict[str, MacState]:
    """Return what runs on each Mac. Raises FleetctlError: a Mac does not answer."""
    states: dict[str, MacState] = {}

    async def read(name: str) -> None:
        states[name] = await macs[name].read()

    failures = await for_each(tuple(macs), read)
    if failures:
        raise FleetctlError(refusal(failures))
    return states


def refusal(failures: Sequence[str]) -> str:
    """Return the refusal to begin while Macs cannot be reached. Pure."""
    return "\n".join(
        [
            "nothing was stopped, because these Macs cannot be:",
            *failures,
            "Their engines would go on without a fleet. Switch them on or correct --target, or leave them out with "
            "--except NODE",
        ]
    )


async def for_each(nodes: Sequence[str], work: Callable[[str], Awaitable[None]]) -> list[str]:
    """Do the work for each node, eight at once; return a line for each Mac that failed."""
    slots, failures = asyncio.Semaphore(_AT_ONCE), list[str]()

    async def one(name: str) -> None:
        async with slots:
            try:
                await work(name)
            except RemoteError as error:
                failures.append(f"  node/{name}: {error}")

    async with asyncio.TaskGroup() as group:
        for name in nodes:
            group.create_task(one(name))
    return sorted(failures)


class FleetDown:
    """Carries out the steps."""

    def __init__(
        self,
        macs: Mapping[str, MacRelease],
        states: Mapping[str, MacState],
        say: Callable[[str], None],
        *,
        grace_s: float,
    ) -> None:
        self._macs, self._states, self._say, self._grace_s = macs, states, say, grace_s

    async def take(self, step: Step) -> None:
        """Stop one kind of service on all Macs. Raises FleetctlError: one failed; the others are stopped."""

        async def stop(name: str) -> None:
            await self._macs[name].stop(self._states[name], step.part, grace_s=self._grace_s)
            self._say(f"node/{name}: {step.part} stopped")

        if step.part == "etcd":
            failures = [line for name in step.nodes for line in await for_each((name,), stop)]
        else:
            failures = await for_each(step.nodes, stop)
        if failures:
            raise FleetctlError(
                "\n".join(
                    [
                        f"{step.part} was not stopped everywhere, and what comes after it still runs:",
                        *failures,
                        "Run the same command again: it goes on where it stopped",
                    ]
                )
            )


async def gateways_left(transport: Transport, clock: Clock) -> list[str]:
    """Return the addresses of gateways that go on although those of all Macs were stopped. Raises StoreError."""
    deadline = clock.monotonic() + _GATEWAYS_S
    while True:
        listing = await transport.list(keys.GATEWAY_LEASE_PREFIX)
        if not listing.items or clock.monotonic() >= deadline:
            return sorted(codec.decode(GatewayLease, item).url for item in listing.items)
        await clock.sleep(_POLL_S)
