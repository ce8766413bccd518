"""Several deployments on one fleet: priorities, evictions, convergence. test_plan_properties.py has single ones."""

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.actions import (
    CreateReplica,
    DeleteReplica,
    PreemptReplica,
    RemoveReplica,
)
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.plan import plan
from reconciler.placement.inputs import NodeView, Rival, request_for
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelDeployment
from schemas.replica import RankAssignment
from tests.support.reconciler_world import housing
from tests.support.world import GIB, NOW, deployment, node, observed, replica, with_metadata


@dataclass
class World:
    """A fleet with several deployments; `look` returns the view that observe.py would make."""

    nodes: dict[str, NodeView]
    deployments: dict[str, ModelDeployment]
    replicas: dict[str, ReplicaView] = field(default_factory=dict)
    preempted: list[tuple[str, str]] = field(default_factory=list)

    def look(self, name: str) -> DeploymentView:
        me = self.deployments[name]
        there = Counter(
            r.replica.spec.deployment for r in self.replicas.values() if not r.is_deleting
        )
        rivals = [
            Rival(request=request_for(other), missing=other.spec.replicas - there[other.name])
            for other in sorted(self.deployments.values(), key=lambda d: (-d.spec.priority, d.name))
            if other.spec.priority > me.spec.priority and other.spec.replicas > there[other.name]
        ]
        mine = [r for r in self.replicas.values() if r.replica.spec.deployment == name]
        table = NodeTable(tuple(map(self.seen, self.nodes.values())))
        view = observed(me, tuple(mine))
        return replace(view, name=name, table=table, rivals=tuple(rivals))

    def seen(self, bare: NodeView) -> NodeView:
        (view,) = housing([bare], tuple(self.replicas.values())).nodes
        priorities = {name: owner.spec.priority for name, owner in self.deployments.items()}
        there = [a._replace(priority=priorities[a.deployment]) for a in view.allocations]
        return replace(view, allocations=tuple(there))

    def reconcile(self, name: str) -> int:
        """Plan for one deployment and do it; return how many actions there were."""
        actions = plan(self.look(name)).actions
        for action in actions:
            match action:
                case CreateReplica(name=new, ranks=(RankAssignment(node=on, memory=memory),)):
                    owner = self.deployments[name]
                    ordinal = int(new.rpartition("-")[2])
                    self.replicas[new] = replica(ordinal, on=on, of=owner, memory=memory)
                case DeleteReplica(name=old) | PreemptReplica(name=old):
                    self.mark(old)
                case RemoveReplica(name=old):
                    del self.replicas[old]
                case _:
                    raise AssertionError(action)  # no node is lost here, and nothing is deleted
            if isinstance(action, PreemptReplica):
                self.preempted.append((action.name, name))
        self.check()
        return len(actions)

    def mark(self, name: str) -> None:
        there = self.replicas[name]
        marked = with_metadata(there.replica, deletion_timestamp=NOW)
        self.replicas[name] = replace(there, replica=marked, is_ready=False, is_stopped=False)

    def agents_act(self) -> None:
        for name, there in self.replicas.items():
            if there.is_deleting:
                self.replicas[name] = replace(there, is_stopped=True)

    def check(self) -> None:
        for view in map(self.seen, self.nodes.values()):
            assert view.used_bytes <= view.allocatable_bytes

    def settle(self, order: list[str]) -> None:
        for _ in range(40):
            actions = sum(self.reconcile(name) for name in order)
            draining = any(there.is_deleting for there in self.replicas.values())
            self.agents_act()
            if not actions and not draining:
                return
        raise AssertionError("it does not settle")


def world(nodes: dict[str, float], *deployments: ModelDeployment) -> World:
    return World(
        nodes={name: node(name, memory_gib=gib) for name, gib in nodes.items()},
        deployments={owner.name: owner for owner in deployments},
    )


def on(found: World) -> dict[str, str]:
    return {name: there.node for name, there in sorted(found.replicas.items())}


LOW = deployment(name="low", replicas=2, memory="4Gi")
HIGH = deployment(name="high", priority=10, memory="4Gi")


def test_the_higher_gets_the_place_of_the_lower_once_it_is_free() -> None:
    fleet = world({"a": 8}, LOW)
    fleet.settle(["low"])
    fleet.deployments["high"] = HIGH
    decided = plan(fleet.look("high"))
    (action,) = decided.actions
    assert isinstance(action, PreemptReplica)
    assert (action.name, action.deployment, action.by) == ("low-0", "low", "high-0")
    assert action.because == "high-0 has priority 10, low-0 has 0"
    assert decided.unschedulable is not None
    fleet.reconcile("high")
    assert plan(fleet.look("high")).actions == ()  # it waits, and preempts no other replica
    fleet.agents_act()
    fleet.reconcile("low")  # the victim's name is free again, but its room is kept
    assert on(fleet) == {"low-1": "a"}
    fleet.settle(["low", "high"])
    assert on(fleet) == {"high-0": "a", "low-1": "a"}
    assert fleet.preempted == [("low-0", "high")]


def test_the_displaced_goes_elsewhere_if_it_can() -> None:
    fleet = world({"a": 4}, deployment(name="low", memory="4Gi"))
    fleet.settle(["low"])
    fleet.deployments["high"] = HIGH
    fleet.nodes["b"] = replace(node("b", memory_gib=4), labels={"only": "low"}, is_cordoned=True)
    fleet.reconcile("high")
    fleet.nodes["b"] = replace(fleet.nodes["b"], is_cordoned=False)
    fleet.settle(["low", "high"])
    assert sorted(on(fleet)) == ["high-0", "low-0"]


def test_a_lower_priority_leaves_room_for_a_higher_one() -> None:
    """Low asks first; high misses a replica, which fits nowhere but where low would go."""
    fleet = world({"a": 4}, deployment(name="low", memory="2Gi"), HIGH)
    fleet.reconcile("low")
    assert on(fleet) == {}
    fleet.settle(["low", "high"])
    assert on(fleet) == {"high-0": "a"}


sizes = st.sampled_from(["1Gi", "2Gi", "3Gi", "5Gi"])
worlds = st.builds(
    lambda nodes, wanted: world(nodes, *wanted),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 8), min_size=1),
    st.lists(
        st.builds(
            deployment,
            name=st.sampled_from(["p", "q", "r", "s"]),
            replicas=st.integers(0, 3),
            priority=st.integers(-1, 1),
            memory=sizes,
        ),
        unique_by=lambda one: one.name,
        min_size=1,
    ),
)


@given(worlds, st.randoms(use_true_random=False))
def test_plans_converge_in_any_order_without_oscillation(fleet: World, dice: object) -> None:
    order = sorted(fleet.deployments)
    dice.shuffle(order)  # type: ignore[attr-defined]  # hypothesis' own Random
    fleet.settle(order)
    assert all(plan(fleet.look(name)).actions == () for name in order)
    # No replica was preempted by an equal, and none is unplaced that a preemption would help.
    priorities = {name: owner.spec.priority for name, owner in fleet.deployments.items()}
    for victim, by in fleet.preempted:
        assert priorities[victim.rpartition("-")[0]] < priorities[by]
    # No replica is displaced more often than there are priorities above its own.
    assert all(number <= 2 for number in Counter(fleet.preempted).values())
    assert all(0 <= view.used_bytes <= 8 * GIB for view in map(fleet.seen, fleet.nodes.values()))
