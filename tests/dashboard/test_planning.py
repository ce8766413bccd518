"""Explained placements and supposed changes: the answers of the planner and of fleetctl, over HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleetctl.objects import reader
from insight.doctor.checks import FleetObservation, run_checks
from insight.doctor.findings import findings_tree
from insight.doctor.group_admission import check_admission
from insight.placement import explain_placement, report_text
from reconciler.deployments import snapshot
from schemas.deployment import ModelDeployment
from schemas.gitsource import GitSource
from schemas.node import Node
from schemas.pools import NodePool
from schemas.replica import Replica
from schemas.route import ModelRoute
from schemas.shardgroup import ShardGroup
from store import objects
from store.memory import MemoryTransport
from tests.support.dashboard_fleets import put_fleet
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[RunningDashboard]:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with running_dashboard(store) as dashboard:
        yield dashboard


async def test_why_pending_is_the_text_of_fleetctl_with_what_would_help(
    running: RunningDashboard,
) -> None:
    found = await running.get("/api/v1/explain/deployment/long")
    fleet_snapshot = await snapshot.take(running.store, CLOCK)
    report = explain_placement(fleet_snapshot, "long")
    assert report is not None
    assert found["text"] == report_text(report)
    assert "0 of 1 replicas are placed" in found["text"]
    assert {one["refusal"]["reason"] for one in found["nodes"]} == {"InsufficientMemory"}
    assert all(one["refusal"]["need"] > one["refusal"]["have"] for one in found["nodes"])
    remedies = {one["text"]: one for one in found["remedies"]}
    assert "8-bit KV would fit on mac-1" in remedies
    assert remedies["8-bit KV would fit on mac-1"]["patch"] == {"kvCache": {"bits": 8}}
    missing = await running.get("/api/v1/explain/deployment/none", 404)
    assert "There is no ModelDeployment 'none'" in missing["error"]["message"]


async def tried(running: RunningDashboard, name: str, **fields: object) -> Any:
    """Return what would happen if a deployment had other values of fields of its spec."""
    path = f"/api/v1/objects/ModelDeployment/{name}?form=manifest"
    lines = (await running.get(path))["yaml"].splitlines()
    others = [line for line in lines if line.partition(":")[0].strip() not in fields]
    manifest = "\n".join([*others, *(f"  {field}: {value}" for field, value in fields.items())])
    return await running.post("/api/v1/whatif", {"manifest": manifest})


async def test_a_remedy_that_is_supposed_does_help(running: RunningDashboard) -> None:
    plain = await running.post("/api/v1/whatif", {})
    (left,) = [one for one in plain["steps"] if one["deployment"] == "long"]
    assert left["change"] == "New"
    assert "0/3 nodes fit" in left["refusal"]
    assert "1 left without a place" in plain["sentence"]
    found = await tried(running, "long", kvCache="{bits: 8}")
    (step,) = [one for one in found["steps"] if one["deployment"] == "long"]
    assert (step["to"], "refusal" in step) == (["mac-1"], False)
    mac = next(one for one in found["memory"] if one["name"] == "mac-1")
    comes = next(one for one in mac["replicas"] if one["replica"] == "long-0")
    assert comes["change"] == "comes"
    assert comes["bytes"] == comes["memory"]["totalBytes"] == step["memory"]["totalBytes"]
    used = sum(one["bytes"] for one in mac["replicas"] if one["change"] != "goes")
    assert mac["freeBytes"] == mac["allocatableBytes"] - used


async def test_the_doctor_judges_as_fleetctl_does(running: RunningDashboard) -> None:
    """The caches hold what the command lists: the same checks find the same."""
    store = running.store
    found = await running.get("/api/v1/doctor")
    nodes, ready = await objects.list_all(store, Node), await reader.ready_nodes(store)
    every = [
        api_object
        for kind in (ModelDeployment, NodePool, ShardGroup, ModelRoute, GitSource)
        for api_object in await objects.list_all(store, kind)
    ]
    stored = FleetObservation(
        nodes=nodes,
        ready=ready,
        replicas=await objects.list_all(store, Replica),
        objects=every,
        admissions=[
            check_admission(api_object, nodes, ready)
            for api_object in every
            if isinstance(api_object, ShardGroup)
        ],
        leader="",
    )
    assert found == findings_tree(run_checks(stored))
    told = [one["message"] for one in found["findings"]]
    assert any(text.startswith("modeldeployment/long is not Available: ") for text in told), told
    assert {one["check"] for one in found["findings"]} >= {"nodes", "memory", "objects"}


async def test_a_preview_has_only_what_the_change_does(running: RunningDashboard) -> None:
    """`long` has no place at any time: no other change is to blame."""
    found = await tried(running, "qwen", replicas=0)
    assert {step["deployment"] for step in found["steps"]} == {"qwen"}
    assert found["unplaced"] == 0
    assert [step["replica"] for step in found["waiting"]] == ["long-0"]
    found = await tried(running, "long", replicas=0)
    assert found["sentence"] == "Replicas: 1 no longer waiting for a place."
    found = await tried(running, "long", replicas=1)
    assert (found["sentence"], found["steps"]) == ("No replica changes.", [])
