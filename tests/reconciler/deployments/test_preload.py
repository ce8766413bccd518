"""Preloads: which nodes fetch a model before they get a replica, in which order, and what a rollout fetches first."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reconciler.deployments.actions import EndPreload, StartPreload
from reconciler.deployments.observe import DeploymentView, PreloadView
from reconciler.deployments.plan import plan
from reconciler.deployments.preload import preload_status
from reconciler.deployments.rollout.canary import CanaryProgress
from reconciler.deployments.status import compute_progress
from reconciler.placement.inputs import NodeView
from reconciler.placement.table import NodeTable
from schemas.deployment import (
    HubReference,
    ModelDeployment,
    ModelDeploymentSpec,
    ModelSource,
    Preload,
)
from schemas.node import ModelReport
from schemas.rollout import Rollout
from tests.support.reconciler_world import planned
from tests.support.world import GEOMETRY, GIB, NOW, deployment, node, observed, replica, with_spec

OLD, NEW = (
    ModelSource(hub=HubReference(repo="mlx-community/qwen", revision=commit * 20))
    for commit in ("ab", "cd")
)
assert NEW.hub is not None
assert OLD.hub is not None


def mac(
    name: str, *, new_gib: float = 4, old_gib: float = 0, problem: str = "", **fields: Any
) -> NodeView:
    """Return a node that lacks so many bytes of the new and the old commit."""
    reports = {
        source.folder: ModelReport(
            path=source.folder,
            geometry=GEOMETRY,
            missing_bytes=int(gib * GIB),
            fetch_problem=problem if source is NEW else "",
        )
        for source, gib in ((NEW, new_gib), (OLD, old_gib))
    }
    return node(name, models=reports, **fields)


def wanting(
    nodes: int | str = "100%",
    *,
    pools: tuple[str, ...] = (),
    has_preload: bool = True,
    **fields: Any,
) -> ModelDeployment:
    preload = Preload(nodes=nodes, pools=pools) if has_preload else None
    return deployment(**{"replicas": 0, "model": NEW, "preload": preload, **fields})


def view(
    wanted: ModelDeployment | None, *nodes: NodeView, preloads: tuple[str, ...] = ()
) -> DeploymentView:
    assert NEW.hub is not None
    views = tuple(PreloadView(node=name, source=NEW.hub, version=9) for name in preloads)
    return replace(observed(wanted, (), nodes), preloads=views)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        pytest.param(view(wanting(2), mac("a"), mac("b"), mac("c")), ["p@a"], id="the-first-fetches-alone"),
        pytest.param(view(wanting(2), mac("a"), mac("b"), preloads=("a",)), [], id="others-wait-for-it"),
        pytest.param(
            view(wanting(2), mac("a", new_gib=0), mac("b"), preloads=("a",)), ["p@b"], id="one-that-is-whole-gives-to-the-next",
        ),
        pytest.param(
            view(wanting(), *(mac(name, new_gib=0) for name in "abc"), *map(mac, "defg")),
            ["p@a", "p@b", "p@c", "p@d", "p@e", "p@f"], id="as-many-fetch-as-have-it",
        ),
        pytest.param(
            view(wanting(), mac("a", problem="NoSpace: full"), mac("b"), preloads=("a",)), ["p@b"],
            id="a-fetch-that-fails-holds-up-no-other",
        ),
        pytest.param(view(wanting(1), mac("a"), mac("b", new_gib=1)), ["p@b"], id="the-fewest-bytes-come-first"),
        pytest.param(view(wanting(1), mac("a"), mac("b", new_gib=0), preloads=("a",)), [], id="a-node-that-was-chosen-stays"),
        pytest.param(view(wanting(1), mac("a"), mac("b"), preloads=("a", "b")), ["xp@b"], id="fewer-are-asked"),
        pytest.param(view(wanting("50%"), mac("a"), mac("b"), mac("c")), ["p@a"], id="a-percentage"),
        pytest.param(view(wanting(pools=("fast",)), mac("a"), mac("b", pools=frozenset({"fast"}))), ["p@b"], id="a-pool"),
        pytest.param(
            view(wanting(), mac("a", is_cordoned=True), mac("b", allocatable_bytes=GIB), mac("c")), ["p@c"],
            id="only-nodes-that-may-run-a-replica",
        ),
        pytest.param(
            view(wanting(1), mac("a", is_ready=False), mac("b"), preloads=("a",)), [], id="a-node-that-is-away-keeps-its-place",
        ),
        pytest.param(
            view(wanting(1), mac("a", leave_reason="drained"), mac("b"), preloads=("a",)), ["xp@a", "p@b"],
            id="a-node-that-is-drained-loses-it",
        ),
        pytest.param(view(wanting(has_preload=False), mac("a"), preloads=("a",)), ["xp@a"], id="not-asked"),
        pytest.param(
            view(wanting(is_deleting=True), mac("a"), preloads=("a",)), ["xp@a", "Xqwen"], id="deletion-ends-preloads-first",
        ),
        pytest.param(view(None, mac("a"), preloads=("a",)), ["xp@a"], id="deployment-is-gone"),
    ],
)  # fmt: skip
def test_preloads(seen: DeploymentView, wanted: list[str]) -> None:
    assert planned(seen) == wanted


def test_a_new_commit_replaces_the_old_one_step_by_step() -> None:
    assert OLD.hub is not None
    deployment_view = view(wanting(), mac("a"), mac("b"))
    before = tuple(PreloadView(node=name, source=OLD.hub, version=5) for name in "ab")
    (action,) = plan(replace(deployment_view, preloads=before)).actions
    assert action == StartPreload(name="qwen", node="a", source=NEW.hub, version=5)  # type: ignore[arg-type]  # it has one


@given(
    st.lists(st.sampled_from([0, 0, 1, 4]), min_size=1, max_size=9),
    st.integers(0, 9) | st.sampled_from(["30%", "100%"]),
)
def test_preloads_end_with_the_number_that_is_asked_for(
    lacking: list[int], wanted: int | str
) -> None:
    """The nodes may have anything at first. As many fetch at a time as have the files, and four at most."""
    nodes = [mac(f"n{at}", new_gib=gib) for at, gib in enumerate(lacking)]
    current: dict[str, PreloadView] = {}
    deployment_view = view(wanting(wanted), *nodes)
    for _ in range(50):
        deployment_view = replace(view(wanting(wanted), *nodes), preloads=tuple(current.values()))
        actions = plan(deployment_view).actions
        whole = sum(node_view.has_files(NEW.folder) for node_view in nodes)
        for action in actions:
            match action:
                case StartPreload(node=name, source=source):
                    current[name] = PreloadView(node=name, source=source, version=1)
                case EndPreload(node=name):
                    del current[name]
                case _:
                    raise AssertionError(action)
        busy = [
            node_view
            for node_view in nodes
            if node_view.name in current and not node_view.has_files(NEW.folder)
        ]
        assert len(busy) <= min(4, max(1, whole))
        if not actions and not busy:
            break
        nodes = [
            mac(node_view.name, new_gib=0) if node_view in busy[:1] else node_view
            for node_view in nodes
        ]
    found = preload_status(replace(deployment_view, table=NodeTable(nodes)))
    assert found is not None
    number, condition = found
    expected = -(-len(nodes) * int(wanted[:-1]) // 100) if isinstance(wanted, str) else wanted
    assert number.present == number.desired == len(current) == min(expected, len(nodes))
    assert condition.reason == ("AllPresent" if number.desired else "NoNodeToPreload")


def test_the_status_says_what_is_missing_and_why() -> None:
    nodes = (mac("a", new_gib=0), mac("b", problem="NoSpace: 3 GiB too little"), mac("c"))
    found = preload_status(view(wanting(), *nodes))
    assert found is not None
    number, condition = found
    assert (number.desired, number.present, number.missing_bytes) == (3, 1, 8 * GIB)
    assert condition.reason == "PreloadFailing"
    assert condition.message == "1 of 3 nodes have the files; b: NoSpace: 3 GiB too little"
    found = preload_status(view(wanting(), mac("a"), mac("b")))
    assert found is not None
    assert found[1].reason == "Preloading"
    assert found[1].message.endswith("the others lack 8.0 GiB")


def test_a_folder_cannot_be_preloaded() -> None:
    with pytest.raises(ValidationError, match=r"has preload and model\.path"):
        ModelDeploymentSpec(model=ModelSource(path="qwen"), preload=Preload())


# Rollouts in place


def rolling(*nodes: NodeView, preloads: tuple[str, ...] = ()) -> DeploymentView:
    """Return a rollout without room for a surge: each node has a replica of the old commit."""
    wanted = wanting(
        replicas=len(nodes), rollout=Rollout(max_surge=0, max_unavailable=0), has_preload=False
    )
    before = with_spec(wanted, model=OLD)
    olds = tuple(replica(at, on=view.name, of=before) for at, view in enumerate(nodes))
    return replace(view(wanted, *nodes, preloads=preloads), replicas=olds)


def test_a_replica_in_place_serves_until_its_node_has_the_new_files() -> None:
    assert planned(rolling(mac("a"))) == ["p@a"]
    fetching = rolling(mac("a", new_gib=1), preloads=("a",))
    assert planned(fetching) == []
    assert fetching.deployment is not None
    progress = compute_progress(fetching, None, canary=CanaryProgress(), old=None, now=NOW)
    assert "the old replica serves while a fetches the new version" in progress.condition.message
    done = rolling(mac("a", new_gib=0), preloads=("a",))
    assert planned(done) == ["-qwen-0 OutdatedInPlace", "xp@a"]


def test_in_place_the_node_with_the_fewest_bytes_comes_first() -> None:
    assert planned(rolling(mac("a"), mac("b", new_gib=1))) == ["p@b"]
    assert planned(rolling(mac("a"), mac("b", new_gib=0))) == ["-qwen-1 OutdatedInPlace"]
    failing = mac("b", new_gib=1, problem="NoSpace: full")
    assert planned(rolling(mac("a"), failing, preloads=("b",))) == ["xp@b", "p@a"]
