"""Changes of the fleet over HTTP: previewed, then written by compare-and-swap, with the effect of fleetctl."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from manifests import apply as applying
from manifests.load import parse_texts, read_objects
from schemas.deployment import ModelDeployment
from schemas.node import Node
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.clock import FakeClock
from tests.support.dashboard_fleets import MANIFEST, put_fleet
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.world import deployment, revision


@pytest.fixture
async def running() -> AsyncIterator[RunningDashboard]:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with running_dashboard(store, can_write=True) as dashboard:
        yield dashboard


async def stored(running: RunningDashboard, kind: str, name: str) -> dict[str, Any]:
    item = await running.store.get(keys.spec_key(kind, name))
    assert item is not None
    found: dict[str, Any] = json.loads(item.value)
    return found


async def test_what_is_applied_is_what_was_previewed_and_what_fleetctl_applies(
    running: RunningDashboard,
) -> None:
    checked = await running.post("/api/v1/whatif", {"manifest": MANIFEST})
    assert checked["errors"] == []
    (change,) = checked["changes"]
    assert (change["kind"], change["name"], change["result"]) == (
        "ModelDeployment",
        "small",
        "created",
    )
    assert "+  contextLength: 2048" in change["diff"]
    assert any(one["deployment"] == "small" for one in checked["steps"])
    body = {"manifests": MANIFEST, "plan": checked["plan"]}
    done = await running.post("/api/v1/apply", body)
    assert done["outcomes"] == [{"kind": "ModelDeployment", "name": "small", "result": "created"}]
    other = MemoryTransport(FakeClock())
    loaded = read_objects(parse_texts([("m", MANIFEST)]).documents)
    await applying.apply(other, loaded, CLOCK)
    item = await other.get(keys.spec_key("ModelDeployment", "small"))
    assert item is not None
    theirs, ours = json.loads(item.value), await stored(running, "ModelDeployment", "small")
    for one in (theirs, ours):  # what differs from one second to the next
        one["metadata"].pop("uid")
        one["metadata"].pop("creationTimestamp")
        for entry in one["metadata"]["managedFields"]:
            entry.pop("time")
    assert ours == theirs


async def test_a_plan_that_is_not_true_any_more_is_refused(running: RunningDashboard) -> None:
    checked = await running.post("/api/v1/whatif", {"manifest": MANIFEST})
    # Nothing may be written without a plan.
    await running.post("/api/v1/apply", {"manifests": MANIFEST}, 400)
    await running.store.commit([], [codec.put_spec(deployment(name="small", replicas=4))])
    body = {"manifests": MANIFEST, "plan": checked["plan"]}
    refused = await running.post("/api/v1/apply", body, 409)
    assert refused["error"]["code"] == "changed"
    assert (await stored(running, "ModelDeployment", "small"))["spec"]["replicas"] == 4
    # Another text under the plan of this one.
    again = await running.post("/api/v1/whatif", {"manifest": MANIFEST})
    other = MANIFEST.replace("2048", "4096")
    await running.post("/api/v1/apply", {"manifests": other, "plan": again["plan"]}, 409)


async def test_all_errors_have_their_line_and_field(running: RunningDashboard) -> None:
    wrong = MANIFEST.replace("replicas: 1", "replicas: -1").replace("concurrency", "concurency")
    found = await running.post("/api/v1/whatif", {"manifest": wrong})
    assert [(one["line"], one["path"]) for one in found["errors"]] == [
        (8, "spec.replicas"),
        (10, "spec.concurency"),
    ]
    assert any("concurrency" in one["hint"] + one["message"] for one in found["errors"])
    found = await running.post("/api/v1/whatif", {"manifest": "a: [\n"})
    assert found["errors"][0]["line"] >= 1
    found = await running.post("/api/v1/whatif", {"manifest": "# nothing"})
    assert "declares nothing" in found["errors"][0]["message"]


@pytest.mark.parametrize(
    ("verb", "name", "more", "command", "place", "value"),
    [
        ("cordon", "mac-1", {}, "fleetctl cordon mac-1", "unschedulable", True),
        ("drain", "mac-1", {}, "fleetctl drain mac-1", "draining", True),
        ("scale", "qwen", {"replicas": 3}, "fleetctl scale md/qwen --replicas=3", "replicas", 3),
    ],
)
async def test_an_action_is_previewed_then_written(
    running: RunningDashboard,
    verb: str,
    name: str,
    more: dict[str, int],
    command: str,
    place: str,
    value: object,
) -> None:
    path, body = f"/api/v1/actions/{verb}", {"name": name, **more}
    seen = await running.post(path, {**body, "dryRun": True})
    assert (seen["isChanged"], seen["command"]) == (True, command)
    assert f"+  {place}: {str(value).lower()}" in seen["diff"]
    kind = "ModelDeployment" if name == "qwen" else "Node"
    assert (await stored(running, kind, name)).get("spec", {}).get(place) != value
    await running.post(path, {**body, "version": seen["version"], "reason": "a test"})
    (change,) = (await running.get("/api/v1/changes"))["changes"]
    assert (change["manager"], change["command"], change["reason"]) == (
        "dashboard",
        command,
        "a test",
    )
    assert change["objects"][0]["fields"][0]["path"].startswith("spec.")
    after = await stored(running, kind, name)
    assert after["spec"][place] == value
    manager = after["metadata"]["managedFields"][-1]["manager"]
    assert manager == ("fleetctl-scale" if kind == "ModelDeployment" else "fleetctl-cordon")
    # The same question, asked with what was seen before.
    refused = await running.post(path, {**body, "version": seen["version"]}, 409)
    assert "was changed since" in refused["error"]["message"]


async def test_a_drain_says_what_moves(running: RunningDashboard) -> None:
    seen = await running.post("/api/v1/actions/drain", {"name": "mac-1", "dryRun": True})
    (moved,) = [one for one in seen["placement"]["steps"] if one["replica"] == "qwen-0"]
    assert (moved["from"], moved["to"]) == (["mac-1"], ["mac-2"])


async def test_a_rollout_is_undone(running: RunningDashboard) -> None:
    old, new = deployment(replicas=2), deployment(replicas=2, context_length=2048)
    puts = [codec.put_spec(revision(old, 1)), codec.put_spec(revision(new, 2))]
    await running.store.commit([], [*puts, codec.put_spec(new)])
    shown = await running.get("/api/v1/revisions/qwen")
    listed = shown["revisions"]
    assert shown["progress"] == "Waiting for the reconciler to look at the deployment"
    assert [(one["revision"], one["isCurrent"]) for one in listed] == [(2, True), (1, False)]
    assert "-contextLength: 1024\n+contextLength: 2048" in listed[0]["diff"]
    path = "/api/v1/revisions/qwen/diff"
    either = await running.get(f"{path}?from=2&to=1")
    assert "-contextLength: 2048\n+contextLength: 1024" in either["diff"]
    assert (await running.get(f"{path}?from=1&to=1"))["diff"] == ""
    missing = await running.get(f"{path}?from=1&to=7", 404)
    assert "qwen has no revision 7; it has 1, 2" in missing["error"]["message"]
    seen = await running.post("/api/v1/actions/undo", {"name": "qwen", "dryRun": True})
    assert "-  contextLength: 2048\n+  contextLength: 1024" in seen["diff"]
    await running.post("/api/v1/actions/undo", {"name": "qwen", "version": seen["version"]})
    obj = await objects.get(running.store, ModelDeployment, "qwen")
    assert obj is not None
    assert obj.spec.context_length == 1024
    refused = await running.post("/api/v1/actions/promote", {"name": "qwen", "dryRun": True}, 400)
    assert "no running canary" in refused["error"]["message"]


async def test_the_revision_before_each_change_is_found(running: RunningDashboard) -> None:
    models = [deployment(replicas=2, context_length=1024 * number) for number in (1, 2, 3)]
    revisions = [revision(one, number) for number, one in enumerate(models, 1)]
    await running.store.commit(
        [], [codec.put_spec(api_object) for api_object in (*revisions, models[2])]
    )

    async def act(verb: str, **more: int) -> None:
        path, body = f"/api/v1/actions/{verb}", {"name": "qwen", **more}
        seen = await running.post(path, {**body, "dryRun": True})
        await running.post(path, {**body, "version": seen["version"]})

    async def before(change: str, status: int = 200) -> Any:
        return await running.get(f"/api/v1/revisions/qwen?before={change}", status)

    await act("undo", revision=1)
    await act("scale", replicas=1)
    await act("undo", revision=2)
    await act("restart")
    changes = (await running.get("/api/v1/changes"))["changes"]
    found = [(await before(one["id"]))["before"] for one in changes]
    assert found == [2, 1, 1, 3]
    # Its content is in no revision any more: nothing is guessed.
    gone = keys.spec_key("Revision", revisions[0].metadata.name)
    await running.store.commit([], [Delete(key=gone)])
    found = [(await before(one["id"]))["before"] for one in changes]
    assert found == [2, None, None, 3]
    refused = await before("no-such-change", 404)
    assert "no change no-such-change of qwen is recorded" in refused["error"]["message"]


async def test_a_mac_that_its_agent_alone_knows_is_cordoned(running: RunningDashboard) -> None:
    status = await running.store.get(keys.status_key("Node", "mac-1"))
    assert status is not None
    await running.store.commit([], [Put(key=keys.status_key("Node", "new"), value=status.value)])
    seen = await running.post("/api/v1/actions/cordon", {"name": "new", "dryRun": True})
    await running.post("/api/v1/actions/cordon", {"name": "new", "version": seen["version"]})
    obj = await objects.get(running.store, Node, "new")
    assert obj is not None
    assert obj.spec.unschedulable
    await running.post("/api/v1/actions/cordon", {"name": "nobody", "dryRun": True}, 404)
    await running.post("/api/v1/actions/explode", {"name": "new"}, 404)


async def test_nothing_is_written_without_the_flag() -> None:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with running_dashboard(store) as running:
        seen = await running.post("/api/v1/actions/cordon", {"name": "mac-1", "dryRun": True})
        assert seen["canWrite"] is False
        before = (await store.status()).revision
        for path, body in (
            ("/api/v1/actions/cordon", {"name": "mac-1", "version": seen["version"]}),
            ("/api/v1/apply", {"manifests": MANIFEST, "plan": "x"}),
        ):
            refused = await running.post(path, body, 403)
            assert "--allow-writes" in refused["error"]["message"]
        assert (await store.status()).revision == before


async def test_a_taint_is_previewed_set_and_removed(running: RunningDashboard) -> None:
    path, taint = "/api/v1/actions/taint", {"key": "owner", "value": "anna", "effect": "NoExecute"}
    body = {"name": "mac-1", "taint": taint}
    seen = await running.post(path, {**body, "dryRun": True})
    assert seen["command"] == "fleetctl taint mac-1 owner=anna:NoExecute"
    assert "+  - key: owner" in seen["diff"]
    # Replicas that do not tolerate it move away, in the planner's own words.
    assert any("mac-1" in one["from"] for one in seen["placement"]["steps"])
    await running.post(path, {**body, "version": seen["version"]})
    assert (await stored(running, "Node", "mac-1"))["spec"]["taints"] == [taint]
    away = {"name": "mac-1", "taint": {"key": "owner", "effect": "NoExecute"}}
    seen = await running.post("/api/v1/actions/untaint", {**away, "dryRun": True})
    assert seen["command"] == "fleetctl taint mac-1 owner:NoExecute-"
    await running.post("/api/v1/actions/untaint", {**away, "version": seen["version"]})
    assert not (await stored(running, "Node", "mac-1"))["spec"].get("taints")
    refused = await running.post("/api/v1/actions/untaint", {**away, "dryRun": True}, 400)
    assert 'taint "owner:NoExecute" not found on node/mac-1' in refused["error"]["message"]
    wrong = {"name": "mac-1", "taint": {"key": "no good", "effect": "NoExecute"}, "dryRun": True}
    await running.post(path, wrong, 400)


async def test_a_model_is_deleted_only_as_it_was_seen(running: RunningDashboard) -> None:
    path, body = "/api/v1/actions/delete", {"name": "qwen"}
    seen = await running.post(path, {**body, "dryRun": True})
    assert seen["command"] == "fleetctl delete md/qwen"
    steps = [one for one in seen["placement"]["steps"] if one["deployment"] == "qwen"]
    assert steps
    assert all(step["to"] == [] for step in steps)
    await running.store.commit([], [codec.put_spec(deployment(replicas=4))])
    await running.post(path, {**body, "version": seen["version"]}, 409)
    seen = await running.post(path, {**body, "dryRun": True})
    await running.post(path, {**body, "version": seen["version"]})
    metadata = (await stored(running, "ModelDeployment", "qwen"))["metadata"]
    assert metadata["deletionTimestamp"]
    assert metadata["finalizers"]
