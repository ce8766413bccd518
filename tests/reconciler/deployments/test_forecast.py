"""The forecast of a plan: all steps of all replicas."""

from dataclasses import replace

import pytest

from reconciler.deployments.forecast import ForecastKind, ForecastStep, forecast
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.placer import Assignment, PendingAssignment, PreemptingAssignment
from reconciler.deployments.rollout.revisions import template_hash
from reconciler.placement.inputs import NodeView
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelDeployment, Revision
from schemas.node import Taint
from schemas.rollout import Rollout
from tests.support.reconciler_world import housing
from tests.support.world import (
    GIB,
    OLD,
    deployment,
    node,
    observed,
    proof,
    replica,
    revision,
    with_spec,
)

THREE = proof(3)
WANTED = deployment(memory="3Gi")


def shown(steps: tuple[ForecastStep, ...]) -> list[str]:
    """Return the steps as `qwen-0 New >a`, with what becomes of each."""
    return [f"{s.replica} {s.kind} {s.before}>{_where(s)}" for s in steps]


def _where(step: ForecastStep) -> str:
    match step.outcome:
        case Assignment(node=node):
            return node
        case PendingAssignment(node=node):
            return f"{node} waits"
        case PreemptingAssignment(node=node, victims=victims):
            return f"{node} displaces {','.join(v.replica for v in victims)}"
        case Unschedulable():
            return "nowhere"
        case None:
            return ""


def seen_of(
    wanted: ModelDeployment,
    replicas: tuple[ReplicaView, ...],
    table: NodeTable,
    *,
    revisions: tuple[Revision, ...] | None = None,
) -> DeploymentView:
    view = observed(wanted, replicas, table.nodes, revisions=revisions)
    return replace(view, name=wanted.name)


def steps_of(
    wanted: ModelDeployment, replicas: tuple[ReplicaView, ...], *nodes: NodeView
) -> list[str]:
    table = housing(nodes, replicas)
    return shown(forecast([seen_of(wanted, replicas, table)], table))


OLD_0 = replica(0, of=WANTED, on="a", is_outdated=True, memory=THREE)
NOW_0 = replica(0, of=WANTED, on="a", memory=THREE)
NOW_1 = replica(1, of=WANTED, on="b", memory=THREE)


def wanting(replicas: int, **spec: object) -> ModelDeployment:
    return with_spec(WANTED, replicas=replicas, **spec)


TAINTED = node("a", taints=(Taint(key="k", effect="NoExecute"),))


@pytest.mark.parametrize(
    ("wanted", "there", "nodes", "after"),
    [
        pytest.param(wanting(1), (NOW_0,), (node("a"),), [], id="nothing-to-do"),
        pytest.param(wanting(2), (NOW_0,), (node("a"), node("b")), ["qwen-1 New >b"], id="new"),
        pytest.param(
            wanting(1, context_length=9000), (OLD_0,), (node("a"),), ["qwen-0 Kept a>nowhere"],
            id="what-fits-nowhere-replaces-nothing",
        ),
        pytest.param(
            wanting(4), (NOW_0,), (node("a"),), ["qwen-1 New >a", "qwen-2 New >nowhere", "qwen-3 New >nowhere"],
            id="no-room-for-all",
        ),
        pytest.param(wanting(1), (NOW_0, NOW_1), (node("a"), node("b")), ["qwen-1 Ends b>"], id="too-many"),
        pytest.param(wanting(0), (NOW_0,), (node("a"),), ["qwen-0 Ends a>"], id="to-zero"),
        pytest.param(wanting(1), (OLD_0,), (node("a"), node("b")), ["qwen-0 Replaced a>b"], id="rolls"),
        pytest.param(wanting(1), (OLD_0,), (node("a", memory_gib=4),), ["qwen-0 ReplacedInPlace a>a"], id="no-room-for-both"),
        pytest.param(
            wanting(1, rollout=Rollout(max_surge=0, max_unavailable=1)), (OLD_0,), (node("a"), node("b")),
            ["qwen-0 ReplacedInPlace a>a"], id="without-surge",
        ),
        pytest.param(
            wanting(1, rollout=Rollout(strategy="Recreate")), (OLD_0,), (node("a"),), ["qwen-0 ReplacedInPlace a>a"],
            id="recreate",
        ),
        pytest.param(
            wanting(1), (NOW_0,), (node("a", leave_reason="draining"), node("b")), ["qwen-0 Replaced a>b"],
            id="its-node-is-drained",
        ),
        pytest.param(
            wanting(1), (NOW_0,), (replace(node("a", leave_reason="draining"), is_cordoned=True),), ["qwen-0 Replaced a>nowhere"],
            id="drained-and-nowhere-to-go",
        ),
        pytest.param(wanting(1), (NOW_0,), (TAINTED, node("b")), ["qwen-0 Replaced a>b"], id="driven-out"),
        pytest.param(deployment(memory="3Gi", is_deleting=True), (NOW_0,), (node("a"),), ["qwen-0 Ends a>"], id="being-deleted"),
    ],
)  # fmt: skip
def test_one_deployment(
    wanted: ModelDeployment,
    there: tuple[ReplicaView, ...],
    nodes: tuple[NodeView, ...],
    after: list[str],
) -> None:
    assert steps_of(wanted, there, *nodes) == after


def test_the_higher_priority_places_first_and_preempts() -> None:
    low = deployment(name="low", memory="3Gi", replicas=2)
    there = (
        replica(0, of=low, on="a", memory=THREE),
        replica(1, of=low, on="b", memory=THREE),
    )
    table = housing([node(name, memory_gib=4) for name in "ab"], there)
    high = deployment(name="high", memory="3Gi", priority=5)
    mid = deployment(name="mid", memory="3Gi", priority=1, replicas=2)
    steps = forecast(
        [seen_of(low, there, table), seen_of(mid, (), table), seen_of(high, (), table)], table
    )
    assert shown(steps) == [
        "high-0 New >a displaces low-0",
        "mid-0 New >b displaces low-1",
        "mid-1 New >nowhere",
    ]
    assert [step.memory.total_bytes if step.memory else 0 for step in steps] == [
        3 * GIB, 3 * GIB, 0,
    ]  # fmt: skip


def test_ending_replicas_make_room_for_waiting_ones() -> None:
    there = (replica(0, of=WANTED, on="a", memory=THREE),)
    table = housing([node("a", memory_gib=4)], there, priority=1)
    gone = seen_of(wanting(0, priority=1), there, table)
    after = forecast([gone, seen_of(deployment(name="next", memory="3Gi"), (), table)], table)
    assert shown(after) == ["qwen-0 Ends a>", "next-0 New >a waits"]


def test_a_paused_rollout_makes_more_of_the_old_version() -> None:
    before = deployment(memory="2Gi")
    there = (replica(0, of=before, on="a", memory=THREE),)
    table = housing([node("a")], there)
    paused = wanting(2, rollout=Rollout(paused=True))
    view = seen_of(paused, there, table, revisions=(revision(before), revision(paused, 2)))
    view = replace(view, stable_template=template_hash(before))
    [step] = forecast([view], table)
    assert (step.kind, step.memory and step.memory.total_bytes) == (ForecastKind.NEW, 2 * GIB)
    assert template_hash(paused) not in (OLD, template_hash(before))
