"""The plan of ending a whole fleet: gateways, reconcilers, agents with their engines, and etcd last.

Each stage is one `fleetctl service stop` on its Macs, which does nothing where the service has ended, so a run that was killed
is finished by the next. The targets are kept in a file meanwhile: once etcd is down, only it knows the Macs.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from fleetctl.maintenance.mac_release import MacState
from fleetctl.maintenance.rolling_run import Stage
from machinery.clock import Clock
from schemas.records import GatewayLease
from store import codec, keys
from store.port import Transport

ORDER: Final = ("gateway", "reconciler", "nodeagent", "etcd")
"""Gateways finish their requests while everything else works. Reconcilers end before agents, or they would move replicas.
Agents end before etcd, which their engines' leases are kept in."""

# A lease of a gateway lives for 4 s, and one that ends removes its key.
_GATEWAYS_S: Final = 6.0
_POLL_S: Final = 0.5


def plan_stages(states: Mapping[str, MacState]) -> tuple[Stage, ...]:
    """Return one stage for each kind of service, in order. Pure.

    An agent that has ended may have left engines behind, so its stage is never left out.
    """
    stages = []
    for part in ORDER:
        nodes = tuple(sorted(name for name, state in states.items() if part in state.parts))
        if nodes:
            stages.append(Stage(part=part, nodes=nodes, concurrency=1 if part == "etcd" else 8))
    return tuple(stages)


def plan_lines(
    stages: Sequence[Stage], states: Mapping[str, MacState], *, grace_s: float
) -> list[str]:
    """Return the plan as lines. Pure."""
    notes = {
        "gateway": "requests in flight finish within its --drain-timeout, new ones are refused",
        "nodeagent": f"then its engines, whose requests get {grace_s:g} s",
        "etcd": "one Mac after the other",
    }
    lines: list[str] = []
    for number, stage in enumerate(stages, 1):
        note = f" ({notes[stage.part]})" if stage.part in notes else ""
        lines.append(f"  {number}. {stage.part} of {', '.join(stage.nodes)}{note}")
        stopped = [node for node in stage.nodes if states[node].parts[stage.part].pid is None]
        if stopped:
            lines.append(f"     stopped already: {', '.join(stopped)}")
    if not any(stage.part == "etcd" for stage in stages):
        lines.append("  etcd is no service of these Macs, and goes on")
    return lines


async def gateways_left(transport: Transport, clock: Clock) -> list[str]:
    """Return the addresses of gateways that go on although those of all Macs were stopped. Raises StoreError."""
    deadline = clock.monotonic() + _GATEWAYS_S
    while True:
        listing = await transport.list(keys.GATEWAY_LEASE_PREFIX)
        if not listing.items or clock.monotonic() >= deadline:
            return sorted(codec.decode(GatewayLease, item).url for item in listing.items)
        await clock.sleep(_POLL_S)
