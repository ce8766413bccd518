"""Holds of a node with their messages, and the document that is written about it."""

import re
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from reconciler.nodes.liveness import Flapping
from reconciler.nodes.node_state import (
    MLX_LM,
    NodeContext,
    NodeState,
    evaluate_node,
    quiet_calendar,
)
from reconciler.nodes.reconcile import node_life_status
from reconciler.nodes.wired_limits import wired_limit_condition
from schemas.meta import Condition, ConditionStatus, ObjectMeta, find_condition
from schemas.node import Node, NodeLifeStatus, NodeSpec, WiredLimit
from schemas.pools import NodePool, NodePoolSpec
from tests.support.golden_cases import Golden
from tests.support.reconciler_agents import node_status
from tests.support.reconciler_world import pool
from tests.support.world import GIB, condition

NIGHT = datetime(2026, 3, 2, 23, 0, tzinfo=UTC)
NOON = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
BERLIN = {"start": "22:00", "end": "07:00", "time_zone": "Europe/Berlin"}
FLAP = Flapping(returns=4, until=60.0, until_at=NOON + timedelta(seconds=60))


def node(name: str = "a", *, created: int | None = 0, draining: bool = False, **said: Any) -> Node:
    status = node_status(name).model_copy(update=said)
    stamp = None if created is None else NOON - timedelta(days=1, minutes=-created)
    metadata = ObjectMeta(name=name, generation=1, creation_timestamp=stamp)
    return Node(metadata=metadata, spec=NodeSpec(draining=draining), status=status)


def policy(name: str = "desk", **rules: Any) -> NodePool:
    return pool(name, policy=rules)


def around(
    *pools: NodePool,
    now: datetime = NOON,
    version: str = "1.4.0",
    flapping: Flapping | None = None,
    peers: tuple[Node, ...] = (),
) -> NodeContext:
    return NodeContext(
        pools=pools,
        calendar=quiet_calendar(pools, now),
        version=version,
        flapping=flapping,
        peers=peers,
    )


def judged(found: Node, there: NodeContext) -> NodeState:
    assert found.status is not None
    return evaluate_node(found, found.status, there)


def pressed(type_: str, status: ConditionStatus = ConditionStatus.TRUE) -> tuple[Condition, ...]:
    return (Condition(type=type_, status=status, reason="SoItIs", message=f"{type_} it is"),)


TWIN = node("b", hardware_uuid="M")
NO_METAL = condition(
    "MetalAvailable", "MetalAborted", "the check was ended by SIGABRT", holds=False
)
HOLDS = {
    "draining": (node(draining=True), around()),
    "quiet hours": (node(), around(policy(quiet_hours=(BERLIN,)), policy("lab"), now=NIGHT)),
    "on battery": (node(power="Battery"), around(policy(mains_only=True))),
    "owner active": (node(is_owner_active=True), around(policy(owner_active="Yield"))),
    "a meeting": (node(is_in_meeting=True), around(policy(owner_active="Yield"))),
    "a shut lid": (node(is_lid_shut=True), around(policy(owner_active="Yield"))),
    "kernel panics": (
        node(conditions=pressed("KernelPanics")), around(policy(after_panics="Withhold")),
    ),
    "two pools": (
        node(is_owner_active=True, power="Battery"), around(policy(owner_active="Yield"), policy("lab", mains_only=True)),
    ),
    "a clone": (node(hardware_uuid="M", created=1), around(peers=(TWIN,))),
    "an old agent": (node(agent_version="1.2.9"), around()),
    "a new agent": (node(agent_version="2.0.0"), around()),
    "flapping": (node(), around(flapping=FLAP)),
    **{
        type_: (node(conditions=pressed(type_)), around())
        for type_ in ("MemoryPressure", "DiskPressure", "ThermalPressure", "NeedsReboot")
    },
    "no Metal": (node(conditions=(NO_METAL,)), around()),
    "little disk": (
        node(disk_bytes=500 * GIB, disk_free_bytes=12 * GIB),
        around(pool("small", reserved={"disk": "1Gi"}), pool("desk", reserved={"disk": "50Gi"})),
    ),
}  # fmt: skip


def test_holds(golden: Golden) -> None:
    cases = []
    for case, (found, there) in HOLDS.items():
        (hold,) = judged(found, there).holds
        amounts = f" (need {hold.need}, have {hold.have})" if hold.need else ""
        cases.append((case, [f"{hold.reason}: {hold.message}{amounts}"]))
    golden.check("reconciler/node_holds.txt", {"What keeps new replicas off a node": cases})


@pytest.mark.parametrize(
    ("found", "there"),
    [
        (node(), around()),
        (node(), around(policy(quiet_hours=(BERLIN,)))),
        (node(power="Mains", is_owner_active=True), around(policy(mains_only=True))),
        (node(power="Unknown"), around(policy(mains_only=True, owner_active="Yield"))),
        (node(power="Battery"), around(pool("desk"))),
        (node(conditions=pressed("KernelPanics")), around(policy(mains_only=True), pool("lab"))),
        # The older of two nodes keeps its replicas; for equal age and unregistered nodes the name decides.
        (node("a", hardware_uuid="M", created=0), around(peers=(node("b", created=1),))),
        (node("a", hardware_uuid="M", created=0), around(peers=(node("b", created=0),))),
        (node("a", hardware_uuid="M", created=0), around(peers=(node("0", created=None),))),
        (node("a", hardware_uuid="M", created=None), around(peers=(node("b", created=None),))),
        (node(hardware_uuid="M", is_part=True, created=1), around(peers=(node("b", hardware_uuid="M", is_part=True),))),
        (node(agent_version="1.3.0"), around()),
        (node(agent_version="1.5.2"), around()),
        (node(agent_version="hollow"), around()),
        (node(agent_version="9.9"), around(version="")),
        (node(conditions=pressed("MemoryPressure", ConditionStatus.FALSE)), around()),
        (node(conditions=pressed("ThermalPressure", ConditionStatus.UNKNOWN)), around()),
        (node(conditions=pressed("Ready")), around()),
        (node(disk_free_bytes=0), around(pool("desk", reserved={"disk": "50Gi"}))),
        (node(disk_bytes=90 * GIB, disk_free_bytes=50 * GIB), around(pool("desk", reserved={"disk": "50Gi"}))),
    ],
)  # fmt: skip
def test_nothing_holds_it_back(found: Node, there: NodeContext) -> None:
    state = judged(found, there)
    assert (state.holds, state.leave_reason) == ((), "")


@pytest.mark.parametrize(
    ("found", "there", "leave"),
    [
        (node(draining=True, power="Battery"), around(policy(mains_only=True)), "draining: fleetctl drain"),
        (
            node(power="Battery"), around(policy(mains_only=True)),
            "withheld: pool desk: mainsOnly, until it runs on mains power again",
        ),
        (node(conditions=pressed("MemoryPressure")), around(), ""),
        (node(conditions=pressed("ThermalPressure")), around(flapping=FLAP, peers=(TWIN,)), ""),
    ],
)  # fmt: skip
def test_some_of_it_is_a_reason_to_leave(found: Node, there: NodeContext, leave: str) -> None:
    assert judged(found, there).leave_reason == leave


def life(
    found: Node, there: NodeContext, *, old: NodeLifeStatus | None = None, is_ready: bool = True
) -> NodeLifeStatus:
    now = NOON if old is None else NOON + timedelta(hours=1)
    return node_life_status(found, judged(found, there), there, is_ready=is_ready, old=old, now=now)


@pytest.mark.parametrize(
    ("found", "there", "type_", "reason", "message"),
    [
        (node(), around(flapping=FLAP), "Flapping", "CameBackTooOften", "it came back 4 times"),
        (node(agent_version="1.2.9"), around(), "VersionSkew", "AgentVersion", "its agent is 1.2.9"),
        (
            node(mlx_lm_version="0.31.3"), around(), "VersionSkew", "MlxLmVersion",
            f"its mlx-lm is 0.31.3, memory proofs were tested with {MLX_LM}: install mlx-lm " f"{MLX_LM} there. Until then replicas may take more memory than proven",
        ),
        (
            node(hardware_uuid="M", created=1), around(peers=(TWIN,)), "DuplicateHardware", "SameHardware",
            "node b is the same machine",
        ),
        (node(power="Battery"), around(policy(mains_only=True)), "Withheld", "PoolPolicy", "pool desk: mainsOnly"),
    ],
)  # fmt: skip
def test_conditions_that_are_true(
    found: Node, there: NodeContext, type_: str, reason: str, message: str
) -> None:
    document = life(found, there)
    (true,) = [c for c in document.conditions if c.status == "True" and c.type != "Ready"]
    assert (true.type, true.reason, true.last_transition_time) == (type_, reason, NOON)
    assert true.message.startswith(message)
    assert true.observed_generation == document.observed_generation == 1


def test_a_healthy_node_has_all_conditions_and_no_events() -> None:
    document = life(node(mlx_lm_version=f"{MLX_LM}.7"), around())
    assert [(c.type, str(c.status), c.reason) for c in document.conditions] == [
        ("DuplicateHardware", "False", "NothingFound"),
        ("Flapping", "False", "Steady"),
        ("Ready", "True", "LeaseHeld"),
        ("VersionSkew", "False", "VersionsAgree"),
        ("Withheld", "False", "NothingFound"),
    ]
    assert life(node(), around(), old=document) == document
    away = life(node(), around(), old=document, is_ready=False)
    ready = find_condition(away.conditions, "Ready")
    assert ready is not None
    assert (ready.reason, ready.message) == ("LeaseLost", "its agent does not renew its lease")
    assert ready.last_transition_time == NOON + timedelta(hours=1)
    sleeping = condition("Asleep", "Sleeping", "a request wakes it", holds=True)
    asleep = life(node(), replace(around(), asleep=sleeping), is_ready=False)
    ready = find_condition(asleep.conditions, "Ready")
    assert ready is not None
    assert (ready.reason, ready.message) == ("Sleeping", "a request wakes it")
    assert [c for c in away.conditions if c.type != "Ready"] == [
        c for c in document.conditions if c.type != "Ready"
    ]


def test_a_different_mlx_lm_holds_no_node_back() -> None:
    state = judged(node(mlx_lm_version="0.1.0"), around())
    assert state.holds == ()
    assert state.skew


def test_the_rules_are_those_of_the_pinned_mlx_lm() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (pin,) = [found for found in project["project"]["dependencies"] if "mlx-lm" in found]
    assert re.search(r"==(\d+\.\d+)\.", pin)[1] == MLX_LM  # type: ignore[index]  # it matches, or fails


NODE = Node(metadata=ObjectMeta(name="mac-1"))
STATUS = node_status("mac-1", memory_gib=128)


LIMIT_100 = WiredLimit(mebibytes=102_400, set_by="Service")
LIMIT_90 = WiredLimit(mebibytes=92_160, set_by="Other")
DEFAULT = WiredLimit(mebibytes=0, set_by="Default")


@pytest.mark.parametrize(
    ("sizes", "limit", "changes", "reason"),
    [
        pytest.param([None], LIMIT_90, {}, "", id="hands-off"),
        pytest.param(["100Gi"], LIMIT_100, {}, "LimitSet", id="set"),
        pytest.param(["100Gi", "102400Mi"], LIMIT_100, {}, "LimitSet", id="two-pools-agree"),
        pytest.param(["100Gi"], DEFAULT, {}, "LimitDiffers", id="default"),
        pytest.param(["100Gi"], LIMIT_90, {}, "LimitDiffers", id="other"),
        pytest.param(["100Gi", "90Gi"], LIMIT_90, {}, "PoolsDisagree", id="pools-disagree"),
        pytest.param(["200Gi"], DEFAULT, {}, "LimitTooLarge", id="more-than-the-mac-has"),
        pytest.param(["100Gi"], None, {"os": "Linux"}, "NoWiredLimit", id="linux"),
        pytest.param(["100Gi"], None, {}, "LimitUnknown", id="an-older-agent"),
    ],
)
def test_the_limit_of_a_mac_is_compared_with_its_pools(
    sizes: list[str | None], limit: WiredLimit | None, changes: dict[str, str], reason: str
) -> None:
    status = STATUS.model_copy(update={"wired_limit": limit, **changes})
    pools = [pool(f"p{number}", wired_limit=size) for number, size in enumerate(sizes)]
    condition = wired_limit_condition(NODE, status, pools)
    assert ("" if condition is None else condition.reason) == reason


def test_a_difference_has_what_is_effective_who_set_it_and_the_command() -> None:
    status = STATUS.model_copy(update={"wired_limit": LIMIT_90})
    condition = wired_limit_condition(NODE, status, [pool("studios", wired_limit="100Gi")])
    assert condition is not None
    assert condition.message == (
        "pool studios asks for a wired limit of 100Gi, and its limit is 90.0 GiB, set by a person or another program. "
        "On mac-1, with the flags that its service has after --: "
        "`sudo fleetctl service install nodeagent --wired-limit 100Gi`"
    )


@pytest.mark.parametrize("size", ["0", "1Mi", "1023Mi"])
def test_a_limit_that_leaves_no_room_for_a_model_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match="at least 1Gi"):
        NodePoolSpec(wired_limit=size)
