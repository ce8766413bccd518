"""Properties of all plans: docs/architecture.md, "Invariants", numbers 1, 2 and 8."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.deployments.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    EndPreload,
    MoveReplica,
    OrphanReplica,
    PreemptReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    RemoveRevision,
    SaveRevision,
    StartPreload,
    StartRanks,
)
from reconciler.deployments.observe import DeploymentView
from reconciler.deployments.plan import is_gone, plan
from reconciler.deployments.rollout import steps
from reconciler.deployments.rollout.revisions import template_hash
from reconciler.placement.inputs import NodeView
from reconciler.placement.table import NodeTable
from schemas import quantity
from schemas.deployment import with_content
from schemas.rollout import Canary, CanaryStep, Rollout
from tests.support.reconciler_world import housing
from tests.support.sampling import samples
from tests.support.world import NOW, deployment, node, observed, replica, revision, with_metadata

NAMES = ("a", "b", "c", "d")
AMOUNTS = st.sampled_from([0, 1, 2, "0%", "25%", "50%"])
CANARY = Canary(steps=(CanaryStep(weight=30), CanaryStep(weight=100)))
BEFORE = deployment(context_length=512)


def drained_or_not(view: NodeView) -> st.SearchStrategy[NodeView]:
    return st.sampled_from(
        [view, view, replace(view, is_cordoned=True, leave_reason="it is drained")]
    )


nodes = st.lists(
    st.builds(
        node,
        st.sampled_from(NAMES),
        memory_gib=st.floats(0, 20),
        is_ready=st.booleans(),
        is_cordoned=st.booleans(),
    ).flatmap(drained_or_not),
    unique_by=lambda view: view.name,
    max_size=4,
).map(tuple)

rollouts = st.builds(
    Rollout,
    strategy=st.just("RollingUpdate"),
    max_surge=AMOUNTS,
    max_unavailable=AMOUNTS,
    paused=st.booleans(),
    canary=st.sampled_from([None, None, CANARY]),
) | st.just(Rollout(strategy="Recreate"))

replicas = st.lists(
    st.builds(
        replica,
        st.integers(0, 6),
        on=st.sampled_from(NAMES),
        is_ready=st.booleans(),
        reported_ready=st.booleans(),
        is_deleting=st.booleans(),
        is_stopped=st.booleans(),
        is_node_lost=st.booleans(),
        is_outdated=st.booleans(),
    ),
    unique_by=lambda view: view.name,
    max_size=6,
).map(tuple)


def stably(seen: DeploymentView, revisions: int, is_stable: bool) -> DeploymentView:
    """Return the situation with some of the revisions there may be."""
    saved = (revision(BEFORE, 1), revision(seen.deployment or deployment(), 2))[:revisions]
    return replace(
        seen, revisions=saved, stable_template=template_hash(BEFORE) if is_stable else ""
    )


situations = st.builds(
    stably,
    st.builds(
        observed,
        st.one_of(
            st.none(),
            st.builds(
                deployment,
                replicas=st.integers(0, 6),
                rollout=rollouts,
                min_available=AMOUNTS,
                is_deleting=st.booleans(),
            ),
        ),
        replicas,
        nodes,
    ),
    st.integers(0, 2),
    st.booleans(),
)


def sound(seen: DeploymentView) -> DeploymentView:
    """Return the situation with the memory of what runs counted, as observing does."""
    lost = {r.node for r in seen.replicas if r.is_node_lost}
    nodes = [
        replace(
            view,
            allocations=(),
            allocatable_bytes=max(view.allocatable_bytes, view.used_bytes),
            is_ready=view.is_ready and view.name not in lost,
        )
        for view in housing(seen.table.nodes, seen.replicas, seen.name).nodes
    ]
    return replace(seen, table=NodeTable(tuple(nodes)))


def apply(seen: DeploymentView, action: Action) -> DeploymentView:
    """Return the view after an action, as the store and the agents would make it."""
    views = {r.name: r for r in seen.replicas}
    match action:
        case CreateReplica(name=name) | MoveReplica(name=name):
            assert seen.deployment is not None
            views[name] = replica(
                int(name.rpartition("-")[2]),
                on=action.ranks[0].node,
                of=with_content(seen.deployment, action.content),
                memory=action.ranks[0].memory,
                is_ready=False,
            )
        case DeleteReplica(name=name) | PreemptReplica(name=name):
            marked = with_metadata(views[name].replica, deletion_timestamp=NOW)
            views[name] = replace(views[name], replica=marked, is_ready=False)
        case RemoveReplica(name=name):
            del views[name]
        case RemoveDeployment():
            seen = replace(seen, deployment=None)
        case SaveRevision(number=number):
            assert seen.deployment is not None
            saved = revision(seen.deployment, number)
            others = [other for other in seen.revisions if other.name != saved.name]
            seen = replace(seen, revisions=(*others, saved))
        case RemoveRevision(name=name):
            revisions = tuple(other for other in seen.revisions if other.name != name)
            seen = replace(seen, revisions=revisions)
        case OrphanReplica() | AdoptReplica() | ReformReplica() | ReleaseRanks() | StartRanks():
            raise AssertionError(action)  # other tests hold these
        case StartPreload() | EndPreload():
            raise AssertionError(action)  # no model here is from a hub
    return sound(replace(seen, replicas=tuple(views.values())))


def agents_act(seen: DeploymentView) -> DeploymentView:
    """Return the view once the agents of live nodes have acted."""
    return replace(
        seen,
        replicas=tuple(
            replace(r, is_stopped=True)
            if r.is_deleting
            else replace(r, is_ready=not r.is_node_lost)
            for r in seen.replicas
        ),
    )


def settle(seen: DeploymentView) -> DeploymentView:
    """Plan and act until nothing is left to do."""
    for _ in range(60):
        actions = plan(seen).actions
        for action in actions:
            seen = apply(seen, action)
        settled = agents_act(seen)
        if not actions and settled == seen:
            return seen
        seen = settled
    raise AssertionError("the plan does not settle")


@settings(max_examples=samples(100))
@given(situations)
def test_planning_is_deterministic_and_blind_to_order(seen: DeploymentView) -> None:
    seen = sound(seen)
    shuffled = replace(
        seen,
        table=NodeTable(tuple(reversed(seen.table.nodes))),
        replicas=tuple(reversed(seen.replicas)),
    )
    assert plan(seen) == plan(seen)
    assert set(plan(seen).actions) == set(plan(shuffled).actions)


@settings(max_examples=samples(100))
@given(situations)
def test_a_settled_fleet_is_left_alone(seen: DeploymentView) -> None:
    settled = settle(sound(seen))
    assert plan(settled).actions == ()
    assert not any(is_gone(r) for r in settled.replicas)


def outcome(seen: DeploymentView) -> list[str]:
    """Return what counts of the replicas: which version they run. Names are as good as each other."""
    return sorted(r.replica.spec.template for r in settle(seen).replicas)


@settings(max_examples=samples(100))
@given(situations, st.integers(0, 12))
def test_any_prefix_of_a_plan_converges_to_the_same(seen: DeploymentView, length: int) -> None:
    seen = sound(seen)
    partly = seen
    for action in plan(seen).actions[:length]:
        partly = apply(partly, action)
    assert outcome(partly) == outcome(seen)


@settings(max_examples=samples(100))
@given(situations)
def test_a_rollout_keeps_within_its_limits(seen: DeploymentView) -> None:
    """After any planned termination enough replicas serve, and there are never too many."""
    seen = sound(seen)
    if (
        seen.deployment is None
        or seen.is_ending
        or seen.deployment.spec.rollout.strategy != "RollingUpdate"
    ):
        return
    wanted = seen.deployment
    surge, unavailable = steps.surge_limits(wanted, seen.desired_replicas)
    for _ in range(30):
        actions = plan(seen).actions
        before = seen
        for action in actions:
            seen = apply(seen, action)
        answered, answering = (sum(r.is_ready for r in view.replicas) for view in (before, seen))
        ended = [a for a in actions if isinstance(a, DeleteReplica)]
        if answering < answered:
            check_ending(before, ended, (answered, answering), unavailable)
        made = [a for a in actions if isinstance(a, CreateReplica)]
        leaving = sum(view_of(before, r.node).leave_reason != "" for r in before.replicas)
        if made:
            there = [r for r in seen.replicas if not r.is_deleting]
            trial = len(there) if wanted.spec.rollout.canary else 0
            assert len(there) <= seen.desired_replicas + surge + leaving + trial
        seen = agents_act(seen)


def view_of(seen: DeploymentView, name: str) -> NodeView:
    return next(
        (view for view in seen.table.nodes if view.name == name),
        NodeView(name=name, is_ready=False),
    )


def check_ending(
    before: DeploymentView,
    ended: Sequence[DeleteReplica],
    numbers: tuple[int, int],
    unavailable: int,
) -> None:
    answered, answering = numbers
    assert before.deployment is not None
    reasons = {delete_replica.because for delete_replica in ended}
    least = before.desired_replicas - unavailable
    if "Evicted" in reasons:
        of_wanted = before.deployment.spec.min_available
        least = min(
            least, quantity.resolve_amount(of_wanted, before.desired_replicas, round_up=True)
        )
    if "OutdatedInPlace" in reasons:
        assert len(ended) == 1
        assert not any(r.is_deleting for r in before.replicas)
        least = min(least, answered - 1)
    if "OwnerReplaced" not in reasons:
        assert answering >= least


@settings(max_examples=samples(100))
@given(situations)
def test_no_node_is_assigned_more_than_it_has(seen: DeploymentView) -> None:
    seen = sound(seen)
    before = {view.name: view for view in seen.table.nodes}
    for view in settle(seen).table.nodes:
        there = before[view.name]
        assert view.used_bytes <= max(there.allocatable_bytes, there.used_bytes)


@settings(max_examples=samples(100))
@given(situations)
def test_no_action_is_taken_twice_on_one_replica(seen: DeploymentView) -> None:
    names = [a.name for a in plan(sound(seen)).actions if not isinstance(a, RemoveDeployment)]
    assert len(names) == len(set(names))


@settings(max_examples=samples(100))
@given(situations)
def test_a_deleted_deployment_places_no_replica(seen: DeploymentView) -> None:
    if seen.deployment is not None and seen.deployment.metadata.deletion_timestamp is None:
        return
    kinds = {type(action) for action in plan(sound(seen)).actions}
    assert kinds <= {DeleteReplica, RemoveReplica, RemoveDeployment, RemoveRevision}
