"""Sleep and wake of Macs: the decision about one Mac, the networks that Macs share, and attempts to wake. Pure.

`reconciler/services/power.py` carries it out, and the simulation of a week plays with it.
"""

import ipaddress
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from machinery.backoff import Backoff
from reconciler.nodes.node_state import is_within
from schemas import duration
from schemas.node import NodeStatus
from schemas.pools import DailyWindow, NodePool
from schemas.power import WakePacket

MOST_ATTEMPTS: Final = 3
WAKE_LIMIT_S: Final = 90.0
"""A Mac that is not back this long after the first packet is lost. A wake took 68 to 112 s where it also booted."""
_ATTEMPTS: Final = Backoff(first_s=20.0, limit_s=40.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPolicy:
    """The policy of all pools of a Mac together."""

    mode: Literal["AlwaysOn", "SleepWhenIdle", "Schedule"] = "AlwaysOn"
    idle_s: float = 0.0
    awake: tuple[DailyWindow, ...] = ()


def power_policy(pools: Iterable[NodePool]) -> PowerPolicy:
    """Return the policy of a Mac: AlwaysOn goes first, then the longest idle time and the windows of all its pools."""
    policies = [pool.spec.power for pool in pools if pool.spec.power is not None]
    if not policies or any(power.mode == "AlwaysOn" for power in policies):
        return PowerPolicy()
    has_forecast = any(power.mode == "SleepWhenIdle" for power in policies)
    return PowerPolicy(
        mode="SleepWhenIdle" if has_forecast else "Schedule",
        idle_s=max(power.idle_s for power in policies),
        awake=tuple(window for power in policies for window in power.awake),
    )


class PowerDecision(NamedTuple):
    """The decision that a Mac should be awake, and the reason; the reason Idle is for sleep."""

    reason: str
    message: str = ""

    @property
    def is_awake(self) -> bool:
        return self.reason != "Idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerView:
    """Everything that the decision about one Mac depends on."""

    policy: PowerPolicy
    is_asleep: bool
    quiet_s: float
    """Seconds since the last request for one of its models, or since it woke."""
    is_expected: bool = False
    """True if its models are usually used in this hour, or in one that begins soon."""
    need: PowerDecision | None = None
    """The reason why it is needed now; None if it is not."""
    obstacle: PowerDecision | None = None
    """The reason why it must not sleep if it is awake."""
    awake_until: datetime | None = None


def decide(view: PowerView, now: datetime) -> PowerDecision:
    """Return whether the Mac should be awake."""
    idle = PowerDecision("Idle", f"no request for {duration.show(view.policy.idle_s)}")
    return next(_reasons_to_wake(view, now), None) or next(_reasons_to_stay(view), idle)


def _reasons_to_wake(view: PowerView, now: datetime) -> Iterator[PowerDecision]:
    policy = view.policy
    if policy.mode == "AlwaysOn":
        yield PowerDecision("AlwaysOn", "no pool lets it sleep")
    if view.awake_until is not None and now < view.awake_until:
        yield PowerDecision("WokenByOperator", f"until {view.awake_until:%Y-%m-%d %H:%M} UTC")
    if view.need is not None:
        yield view.need
    if any(is_within(window, now) for window in policy.awake):
        yield PowerDecision("AwakeHours", "a window of spec.power.awake is open")
    if policy.mode == "SleepWhenIdle" and view.is_expected:
        yield PowerDecision("Forecast", "its models are usually used at this hour of the week")


def _reasons_to_stay(view: PowerView) -> Iterator[PowerDecision]:
    """Yield the reasons of a Mac that is awake, and would not be woken for."""
    if view.is_asleep:
        return
    if view.obstacle is not None:
        yield view.obstacle
    if view.quiet_s < view.policy.idle_s:
        yield PowerDecision("RecentlyUsed", "idleTime is not over")


class WakeState(NamedTuple):
    """The attempts to wake one Mac; times are monotonic seconds."""

    began: float
    attempts: int
    next_at: float

    def is_over(self, now: float) -> bool:
        """Return whether the Mac is given up."""
        return now - self.began >= WAKE_LIMIT_S


def next_attempt(state: WakeState | None, now: float, *, jitter: float) -> WakeState:
    """Return the state after the attempt that is due now, if one is; at most three within the limit."""
    if state is None:
        return WakeState(now, 1, now + _ATTEMPTS.delay_s(1, jitter=jitter))
    if now < state.next_at or state.attempts >= MOST_ATTEMPTS or state.is_over(now):
        return state
    count = state.attempts + 1
    return WakeState(state.began, count, now + _ATTEMPTS.delay_s(count, jitter=jitter))


@lru_cache(maxsize=4096)
def _network(address: str, prefix_length: int) -> ipaddress.IPv4Network | None:
    try:
        return ipaddress.IPv4Network((address, prefix_length), strict=False)
    except ValueError:
        return None


def _networks(status: NodeStatus) -> Iterator[tuple[ipaddress.IPv4Network, str, bool]]:
    """Yield network, hardware address and whether it is wired, for each interface that a packet could use."""
    for interface in status.fabric.interfaces:
        network = _network(interface.address, interface.prefix_length)
        # 31 and 32 bits have no broadcast address; a cable to one other Mac carries no packet of a third.
        if network is not None and 0 < network.prefixlen < 31 and not interface.is_thunderbolt:
            yield network, interface.hardware_address, not interface.is_wireless


def wake_packets(sleeper: NodeStatus, relay: NodeStatus) -> tuple[WakePacket, ...]:
    """Return the packets by which the relay wakes the sleeper; none if they share no wired network of the sleeper."""
    shared = {network for network, _, _ in _networks(relay)}
    return tuple(
        dict.fromkeys(
            WakePacket(hardware_address=address, broadcast=str(network.broadcast_address))
            for network, address, is_wired in _networks(sleeper)
            if is_wired and address and network in shared
        )
    )


def link_obstacle(status: NodeStatus, awake: Collection[NodeStatus]) -> PowerDecision | None:
    """Return why nothing could wake the Mac; `awake` are the other Macs that stay awake."""
    if status.wakes_on_lan is not True:
        return PowerDecision("NoWakeOnLan", "wake on LAN is off: `sudo pmset -c womp 1` there")
    if not any(is_wired and address for _, address, is_wired in _networks(status)):
        return PowerDecision(
            "NoWiredLink", "it has no wired network that a magic packet could come from"
        )
    if not any(wake_packets(status, relay) for relay in awake):
        return PowerDecision("LastOnLink", "no other Mac of its network stays awake to wake it")
    return None


def pick_relay(
    status: NodeStatus, awake: Sequence[tuple[str, NodeStatus]], attempt: int
) -> tuple[str, tuple[WakePacket, ...]] | None:
    """Return the awake Mac that sends the attempt, and its packets; another one each time, where there are several."""
    able = [(name, packets) for name, relay in awake if (packets := wake_packets(status, relay))]
    return able[(attempt - 1) % len(able)] if able else None
