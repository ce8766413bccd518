"""The reconciler's plan: a table of situations."""

from dataclasses import replace

import pytest

from reconciler.plan import plan
from reconciler.rollout.revisions import template_hash
from reconciler.views import DeploymentView
from schemas.placement import Placement
from tests.support.fleets import deployment, node, observed, replica
from tests.support.reconciler_shorthand import short

A, B = node("a"), node("b")
GONE = node("gone", is_ready=False)

SITUATIONS = [
    pytest.param(observed(deployment(replicas=0), (), (A,)), [], id="nothing-wanted"),
    pytest.param(
        observed(deployment(replicas=2), (), (A, B)), ["+qwen-0@a", "+qwen-1@b"], id="spread"
    ),
    pytest.param(
        observed(deployment(replicas=2), (), (A,)), ["+qwen-0@a", "+qwen-1@a"], id="stack"
    ),
    pytest.param(observed(deployment(), (replica(0),), (A,)), [], id="settled"),
    pytest.param(
        observed(deployment(replicas=1), (replica(0), replica(1)), (A,)),
        ["-qwen-1 ScaledDown"],
        id="scale-down-takes-the-highest",
    ),
    pytest.param(
        observed(deployment(replicas=0), (replica(0),), (A,)),
        ["-qwen-0 ScaledDown"],
        id="scale-to-zero",
    ),
    pytest.param(
        observed(deployment(replicas=0), (replica(0, is_deleting=True),), (A,)),
        [],
        id="a-draining-replica-is-left-alone",
    ),
    pytest.param(
        observed(deployment(replicas=0), (replica(0, is_deleting=True, is_stopped=True),), (A,)),
        ["xqwen-0"],
        id="a-stopped-replica-is-removed",
    ),
    pytest.param(
        observed(deployment(replicas=0), (replica(0, is_deleting=True, is_node_lost=True),), (A,)),
        ["xqwen-0"],
        id="nobody-is-left-to-stop-it",
    ),
    pytest.param(
        observed(deployment(), (replica(0, is_deleting=True),), (A, B)),
        ["+qwen-1@a"],
        id="a-name-is-used-again-only-when-it-is-free",
    ),
    pytest.param(
        observed(deployment(), (replica(0, on="gone", is_node_lost=True),), (GONE, A)),
        [">qwen-0@a"],
        id="a-lost-node-gives-up-its-replica",
    ),
    pytest.param(
        observed(deployment(), (replica(0, on="gone", is_node_lost=True),), (GONE,)),
        [],
        id="nowhere-to-go-so-it-stays",
    ),
    pytest.param(
        observed(deployment(), (replica(0, on="gone", is_ready=False),), (GONE, A)),
        [],
        id="within-the-grace-period-nothing-moves",
    ),
    pytest.param(
        observed(deployment(is_deleting=True), (replica(0),), (A,)),
        ["-qwen-0 OwnerDeleted"],
        id="deletion-drains-first",
    ),
    pytest.param(
        observed(deployment(is_deleting=True), (), (A,)), ["Xqwen"], id="deletion-removes-last"
    ),
    pytest.param(
        observed(None, (replica(0),), (A,)), ["-qwen-0 OwnerDeleted"], id="what-lost-its-owner-ends"
    ),
    pytest.param(
        observed(deployment(), (replica(0, is_outdated=True, is_node_lost=True),), (GONE, A)),
        [">qwen-0@a"],
        id="an-outdated-replica-on-a-lost-node-just-moves",
    ),
]


@pytest.mark.parametrize(("seen", "wanted"), SITUATIONS)
def test_plan(seen: DeploymentView, wanted: list[str]) -> None:
    assert [short(action) for action in plan(seen).actions] == wanted


def test_a_replica_of_an_earlier_deployment_is_ended() -> None:
    stranger = replace(replica(0), is_ours=False)
    decided = plan(observed(deployment(), (stranger,), (A,)))
    assert [short(action) for action in decided.actions] == [
        "-qwen-0 OwnerReplaced",
        "+qwen-1@a",
    ]


def test_what_cannot_be_placed_is_explained() -> None:
    decided = plan(observed(deployment(), (), (GONE, node("small", memory_gib=1))))
    assert decided.actions == ()
    assert decided.unschedulable is not None
    reasons = {name: why.reason for name, why in decided.unschedulable.refusals}
    assert reasons == {"gone": "NodeNotReady", "small": "InsufficientMemory"}


def test_some_are_placed_even_if_not_all_fit() -> None:
    decided = plan(observed(deployment(replicas=3), (), (node("a", memory_gib=3.5),)))
    assert [short(action) for action in decided.actions] == ["+qwen-0@a"]
    assert decided.unschedulable is not None


@pytest.mark.parametrize(
    "change",
    [
        {"context_length": 2048},
        {"concurrency": 2},
        {"served_names": ("fast",)},
    ],
)
def test_every_field_an_engine_depends_on_moves_the_template(change: dict[str, object]) -> None:
    before = deployment()
    after = before.model_copy(update={"spec": before.spec.model_copy(update=change)})
    assert template_hash(before) != template_hash(after)


def test_scaling_or_placing_does_not_restart_engines() -> None:
    assert template_hash(deployment(replicas=1)) == template_hash(deployment(replicas=5))
    assert template_hash(deployment()) == template_hash(
        deployment(placement=Placement(pools=("p",)))
    )
