"""Who leaves a node that is drained or withheld, and when; what a taint drives out."""

from dataclasses import replace

import pytest

from reconciler.plan import plan
from reconciler.views import DeploymentView, ReplicaView
from schemas.node import Taint
from schemas.placement import Placement, Toleration
from tests.support.fleets import deployment, node, observed, replica
from tests.support.reconciler_shorthand import short

DRAINED = node("d", is_cordoned=True, leave="it is drained")
B = node("b")
FULL = node("full", memory_gib=0.5)


def on(name: str, *ordinals: int, is_ready: bool = True) -> tuple[ReplicaView, ...]:
    return tuple(replica(ordinal, on=name, is_ready=is_ready) for ordinal in ordinals)


SITUATIONS = [
    pytest.param(
        observed(deployment(), on("d", 0), (DRAINED, B)), ["+qwen-1@b"], id="replaced-first"
    ),
    pytest.param(
        observed(deployment(), (*on("d", 0), *on("b", 1, is_ready=False)), (DRAINED, B)),
        [],
        id="waits-for-the-replacement",
    ),
    pytest.param(
        observed(deployment(), (*on("d", 0), *on("b", 1)), (DRAINED, B)),
        ["-qwen-0 Evicted"],
        id="then-goes",
    ),
    pytest.param(
        observed(deployment(), on("d", 0, is_ready=False), (DRAINED, B)),
        ["-qwen-0 Evicted", "+qwen-1@b"],
        id="what-does-not-answer-goes-at-once",
    ),
    pytest.param(
        observed(deployment(), on("d", 0), (DRAINED, FULL)),
        ["-qwen-0 Evicted"],
        id="without-a-place-it-goes-if-nothing-is-said",
    ),
    pytest.param(
        observed(deployment(min_available=1), on("d", 0), (DRAINED, FULL)),
        [],
        id="min-available-holds-it",
    ),
    pytest.param(
        observed(deployment(replicas=3, min_available="50%"), on("d", 0, 1, 2), (DRAINED, FULL)),
        ["-qwen-0 Evicted"],
        id="as-many-as-min-available-allows",
    ),
    pytest.param(
        observed(deployment(replicas=0), on("d", 0), (DRAINED, B)),
        ["-qwen-0 Evicted"],
        id="what-nobody-wants-goes",
    ),
]


@pytest.mark.parametrize(("seen", "wanted"), SITUATIONS)
def test_leaving(seen: DeploymentView, wanted: list[str]) -> None:
    assert [short(action) for action in plan(seen).actions] == wanted


def test_whose_agent_is_away_is_not_idle() -> None:
    away = replica(0, on="d", is_ready=False, reported_ready=True)
    seen = observed(deployment(min_available=1), (away,), (DRAINED, FULL))
    assert plan(seen).actions == ()


TAINTED = replace(node("d"), taints=(Taint(key="broken", effect="NoExecute"),))


def test_a_taint_drives_out_at_once() -> None:
    seen = observed(deployment(min_available=1), on("d", 0), (TAINTED, B))
    assert [short(action) for action in plan(seen).actions] == ["-qwen-0 Evicted", "+qwen-1@b"]


def test_who_tolerates_a_taint_stays() -> None:
    placement = Placement(tolerations=(Toleration(key="broken", operator="Exists"),))
    seen = observed(deployment(placement=placement), on("d", 0), (TAINTED, B))
    assert plan(seen).actions == ()


def test_a_drained_node_that_is_lost_gives_up_what_it_had() -> None:
    gone = replace(DRAINED, is_ready=False)
    lost = replica(0, on="d", is_node_lost=True)
    seen = observed(deployment(min_available=1), (lost,), (gone, B))
    assert [short(action) for action in plan(seen).actions] == [">qwen-0@b"]
