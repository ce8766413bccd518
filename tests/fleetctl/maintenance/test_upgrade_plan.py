"""The plan of an upgrade: order, what is left alone, skew, and whether a rollback is possible."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.maintenance.mac_release import MacState, RunningPart
from fleetctl.maintenance.release import TargetRelease, changed_documents
from fleetctl.maintenance.rolling_run import PlanRefusal
from fleetctl.maintenance.upgrade_plan import (
    ORDER,
    FleetFacts,
    NodeFacts,
    Restart,
    UpgradePlan,
    plan_lines,
    plan_upgrade,
)

OLD, NEW = "0.1.0", "0.2.0"
INSTALLED = TargetRelease(version=NEW, stored={"Node": 1})


def mac(
    *parts: str, current: str = OLD, running: str = OLD, installed: tuple[str, ...] = (OLD, NEW)
) -> MacState:
    return MacState(
        prefix="/opt/mlx-fleet",
        current=current,
        installed=installed,
        needs_root=True,
        parts={part: RunningPart(pid=7, version=running) for part in (*parts, "nodeagent")},
        stored={"Node": 1},
    )


def node(name: str, state: MacState, *, is_ready: bool = True) -> NodeFacts:
    return NodeFacts(name=name, is_ready=is_ready, mac=state)


def planned(*nodes: NodeFacts, release: TargetRelease = INSTALLED, **facts: object) -> UpgradePlan:
    upgrade = plan_upgrade(replace(FleetFacts(nodes=nodes), **facts), release)  # type: ignore[arg-type]  # fields by name
    assert isinstance(upgrade, UpgradePlan), upgrade
    return upgrade


def refused(*nodes: NodeFacts, versions: dict[str, str]) -> str:
    upgrade = plan_upgrade(FleetFacts(nodes=nodes, versions=versions), INSTALLED)
    assert isinstance(upgrade, PlanRefusal), upgrade
    return upgrade.message


def test_servers_come_before_agents_and_one_mac_after_the_other() -> None:
    plan = planned(
        node("mac-2", mac("gateway")),
        node("mac-1", mac("gateway", "reconciler", installed=(OLD,))),
        release=replace(INSTALLED, archive=__file__),  # type: ignore[arg-type]  # only whether there is one counts
        etcd="3.5.21",
        gateways=2,
    )
    assert plan.installs == ("mac-1",)
    assert plan.restarts == (
        Restart("mac-1", "reconciler"),
        Restart("mac-1", "gateway"),
        Restart("mac-2", "gateway"),
        Restart("mac-1", "nodeagent"),
        Restart("mac-2", "nodeagent"),
    )
    lines = plan_lines(plan)
    assert lines[1:3] == [
        "  install beside the release in use: mac-1",
        "  1. reconciler of mac-1: 0.1.0 -> 0.2.0",
    ]
    assert "etcd stays at 3.5.21" in lines[-2]
    assert "goes back to its release" in lines[-1]


def test_a_run_that_was_killed_goes_on() -> None:
    done = node("mac-1", mac(current=NEW, running=NEW))
    half = node("mac-2", mac("reconciler", current=NEW, running=OLD))
    crashed = node("mac-3", mac(current=NEW, running=NEW), is_ready=False)
    plan = planned(done, half, crashed)
    assert plan.unchanged == ("mac-1",)
    assert plan.restarts == (
        Restart("mac-2", "reconciler"),
        Restart("mac-2", "nodeagent"),
        Restart("mac-3", "nodeagent"),
    )
    assert plan.previous == {"mac-1": OLD, "mac-2": OLD, "mac-3": OLD}


def test_without_a_known_release_to_go_back_to_none_is_named() -> None:
    state = mac(current=NEW, running=NEW, installed=(OLD, "0.1.1", NEW))
    assert planned(node("mac-1", state, is_ready=False)).previous == {"mac-1": ""}


@pytest.mark.parametrize(
    ("nodes", "versions", "refusal"),
    [
        ((node("mac-1", mac()),), {"gateway g": "0.4.0"}, "more than one minor version away: gateway g is 0.4.0"),
        ((node("mac-1", mac(installed=(OLD,))),), {}, "has no release 0.2.0: it has 0.1.0"),
        ((node("mac-1", mac(), is_ready=False),), {}, "mac-1 is not Ready"),
        ((node("mac-1", replace(mac(), parts={})),), {}, "its agent is no service"),
    ],
)  # fmt: skip
def test_refusals(nodes: tuple[NodeFacts, ...], versions: dict[str, str], refusal: str) -> None:
    assert refusal in refused(*nodes, versions=versions)


@pytest.mark.parametrize(
    ("stored", "line"),
    [
        ({"Node": 2}, "No rollback: documents are stored in another shape (Node (1 to 2))"),
        (None, "No rollback: it is unknown"),
        ({"Node": 1}, "A Mac that does not become Ready goes back"),
    ],
)
def test_a_rollback_is_offered_only_while_stored_versions_stay(
    stored: dict[str, int] | None, line: str
) -> None:
    plan = planned(node("mac-1", mac()), release=TargetRelease(version=NEW, stored=stored))
    assert plan.has_rollback is (stored == {"Node": 1})
    assert plan_lines(plan)[-1].startswith(line)


def test_documents_that_one_side_does_not_know_have_their_first_version() -> None:
    assert changed_documents({"Node": 2}, {}) == ["Node (2 to 1)"]
    assert changed_documents({}, {"Node": 1}) == []
    assert changed_documents(None, {}) is None


def test_engines_with_another_mlx_lm_are_restarted_by_rollouts() -> None:
    facts = replace(node("mac-1", mac()), mlx_lm="0.31.0", deployments=("qwen",))
    plan = planned(facts, release=replace(INSTALLED, mlx_lm="0.32.2"))
    assert plan.notes[-1].endswith("fleetctl rollout restart md/qwen")
    assert planned(facts, release=replace(INSTALLED, mlx_lm="0.31.0")).notes == ()


states = st.builds(
    lambda parts, current, running: mac(*parts, current=current, running=running),
    st.sets(st.sampled_from(ORDER)),
    st.sampled_from([OLD, NEW]),
    st.sampled_from([OLD, NEW]),
)


@given(st.lists(states, min_size=1, max_size=5), st.integers(0, 20))
def test_after_any_prefix_of_its_steps_the_rest_is_planned_again(
    found: list[MacState], count: int
) -> None:
    nodes = [node(f"mac-{number}", state) for number, state in enumerate(found)]
    plan = planned(*nodes)
    assert [restart.part for restart in plan.restarts] == sorted(
        (restart.part for restart in plan.restarts), key=ORDER.index
    )
    for step in plan.restarts[:count]:
        at = next(at for at, one in enumerate(nodes) if one.name == step.node)
        state = nodes[at].mac
        parts = {**state.parts, step.part: RunningPart(pid=8, version=NEW)}
        nodes[at] = replace(nodes[at], mac=replace(state, current=NEW, parts=parts))
    assert planned(*nodes).restarts == plan.restarts[count:]
