"""The decision about one Mac, attempts to wake, networks and learned weeks."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.hardware.machine_sleep import magic_packet
from reconciler.nodes import demand_week, power
from reconciler.nodes.power import MOST_ATTEMPTS, WAKE_LIMIT_S, PowerDecision, PowerView, WakeState
from schemas.node import FabricInterface, NodeFabric, NodeStatus
from schemas.pools import DailyWindow
from schemas.power import WakePacket
from tests.support.reconciler_agents import node_status
from tests.support.reconciler_world import pool

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
IDLE = power.power_policy([pool("a", power={"mode": "SleepWhenIdle", "idleTime": "10m"})])
LUNCH = DailyWindow(start="11:30", end="12:30")
NEED = PowerDecision("RequestsWait", "requests wait for qwen")
OBSTACLE = PowerDecision("RunsEtcd", "etcd would lose a member")


@pytest.mark.parametrize(("fields", "asleep", "awake"), [
    ({}, "Idle", "Idle"),
    ({"quiet_s": 599}, "Idle", "RecentlyUsed"),
    ({"obstacle": OBSTACLE}, "Idle", "RunsEtcd"),
    ({"is_expected": True}, "Forecast", "Forecast"),
    ({"need": NEED, "is_expected": True}, "RequestsWait", "RequestsWait"),
    ({"awake_until": NOW + timedelta(minutes=1)}, "WokenByOperator", "WokenByOperator"),
    ({"awake_until": NOW}, "Idle", "Idle"),
    ({"policy": power.PowerPolicy(mode="Schedule", awake=(LUNCH,))}, "AwakeHours", "AwakeHours"),
    ({"policy": power.PowerPolicy(mode="Schedule"), "is_expected": True}, "Idle", "Idle"),
    ({"policy": power.PowerPolicy()}, "AlwaysOn", "AlwaysOn"),
])  # fmt: skip
def test_decisions(fields: dict[str, Any], asleep: str, awake: str) -> None:
    for is_asleep, reason in ((True, asleep), (False, awake)):
        view = PowerView(**{"policy": IDLE, "is_asleep": is_asleep, "quiet_s": 3600, **fields})
        assert power.decide(view, NOW).reason == reason


def test_the_pools_of_a_mac_together() -> None:
    schedule = pool("b", power={"mode": "Schedule", "idleTime": "1h", "awake": (LUNCH,)})
    idle, always = pool("a", power={"mode": "SleepWhenIdle"}), pool("c", power={})
    both = power.power_policy([idle, schedule, pool("d")])
    assert (both.mode, both.idle_s, both.awake) == ("SleepWhenIdle", 3600, (LUNCH,))
    assert power.power_policy([idle, always]).mode == "AlwaysOn"
    assert power.power_policy([]).mode == "AlwaysOn"


@given(waits=st.lists(st.floats(0, 30), max_size=40), jitter=st.floats(0, 1))
def test_attempts_are_bounded_and_spaced(waits: list[float], jitter: float) -> None:
    now, state = 0.0, power.next_attempt(None, 0.0, jitter=jitter)
    sent = [0.0]
    for wait in waits:
        now += wait
        before, state = state, power.next_attempt(state, now, jitter=jitter)
        if state.attempts > before.attempts:
            sent.append(now)
        assert state.is_over(now) == (now >= WAKE_LIMIT_S)
    assert len(sent) == state.attempts <= MOST_ATTEMPTS
    assert all(after - before >= 10 for before, after in pairwise(sent))
    assert WakeState(0.0, 1, 5.0) == power.next_attempt(WakeState(0.0, 1, 5.0), 4.0, jitter=0)


def mac(name: str, *interfaces: FabricInterface, wakes: bool | None = True) -> NodeStatus:
    fields = {"fabric": NodeFabric(interfaces=interfaces), "wakes_on_lan": wakes}
    return node_status(name).model_copy(update=fields)


def interface(address: str, number: int, **fields: Any) -> FabricInterface:
    fields = {"name": "en0", "prefix_length": 24, **fields}
    return FabricInterface(
        address=address, hardware_address=f"02:00:00:00:00:{number:02x}", **fields
    )


LAN = interface("10.0.0.1", 1)
OTHER = mac("other", interface("10.0.0.9", 9))


@pytest.mark.parametrize(("sleeper", "awake", "reason"), [
    (mac("a", LAN), [OTHER], ""),
    (mac("a", LAN), [], "LastOnLink"),
    (mac("a", LAN), [mac("b", interface("10.0.1.9", 9))], "LastOnLink"),
    (mac("a", LAN, wakes=False), [OTHER], "NoWakeOnLan"),
    (mac("a", LAN, wakes=None), [OTHER], "NoWakeOnLan"),
    (mac("a"), [OTHER], "NoWiredLink"),
    (mac("a", interface("10.0.0.1", 1, is_wireless=True)), [OTHER], "NoWiredLink"),
    (mac("a", interface("10.0.0.1", 1, is_thunderbolt=True)), [OTHER], "NoWiredLink"),
    (mac("a", interface("10.0.0.1", 1, prefix_length=0)), [OTHER], "NoWiredLink"),
    # A Mac on Wi-Fi of the same network may send.
    (mac("a", LAN), [mac("b", interface("10.0.0.7", 7, is_wireless=True))], ""),
])  # fmt: skip
def test_links(sleeper: NodeStatus, awake: list[NodeStatus], reason: str) -> None:
    obstacle = power.link_obstacle(sleeper, awake)
    assert ("" if obstacle is None else obstacle.reason) == reason


def test_each_attempt_takes_another_relay_and_names_the_sleeper() -> None:
    relays = [(name, mac(name, interface(f"10.0.0.{n}", n))) for n, name in enumerate("bc", 2)]
    picked = [power.pick_relay(mac("a", LAN), relays, attempt) for attempt in (1, 2, 3)]
    packet = WakePacket(hardware_address="02:00:00:00:00:01", broadcast="10.0.0.255")
    assert picked == [("b", (packet,)), ("c", (packet,)), ("b", (packet,))]
    assert power.pick_relay(mac("a", LAN), [], 1) is None
    payload = magic_packet(packet.hardware_address)
    assert (len(payload), payload[:6], payload[6:12]) == (
        102,
        b"\xff" * 6,
        bytes([2, 0, 0, 0, 0, 1]),
    )


def test_an_hour_is_usual_if_it_was_used_last_week_or_mostly() -> None:
    week = demand_week.EMPTY_WEEK
    hour = demand_week.hour_of_week(NOW)
    assert hour == 12
    assert not demand_week.is_expected(week, NOW)
    shown = []
    for is_used in (True, False, False, True, True, False):
        week = demand_week.with_hour(week, hour, is_used=is_used)
        shown.append(demand_week.is_usual(week, hour))
    assert shown == [True, True, False, True, True, False]
    week = demand_week.with_hour(week, hour, is_used=True)
    # Macs are awake five minutes before the hour, and the week begins again after its last hour.
    assert demand_week.is_expected(week, NOW - timedelta(minutes=5))
    assert not demand_week.is_expected(week, NOW - timedelta(minutes=6))
    assert demand_week.is_expected(week, NOW + timedelta(days=7))
