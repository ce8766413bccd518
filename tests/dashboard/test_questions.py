"""Answers of the planner over HTTP: why a replica does not fit, and what would happen if. On a real etcd."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from dashboard import question_process
from dashboard.question_process import PlannerQuestion, answer, forecast_question
from insight.fleet_caches import make_fleet_caches
from insight.simulated_macs import FleetNode
from insight.what_if import Supposition
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec
from schemas.wire.errors import RefusedError
from store import codec
from store.port import Transport
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.fleetctl_manifests import put_replica
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.world import deployment

pytestmark = pytest.mark.etcd


async def write_fleet(store: Transport, **sizes: int) -> None:
    """Write Macs by name and GiB, and qwen with two replicas, of which one runs on the first Mac."""
    for name, gib in sizes.items():
        node = Node(
            metadata=ObjectMeta(name=name, uid=f"uid-{name}", generation=1), spec=NodeSpec()
        )
        status = put_node(name, node_status(name, memory_gib=gib, model="qwen"))
        await store.commit([], [codec.put_spec(node), status, put_lease(name)])
    owner = deployment(name="qwen", replicas=2)
    await store.commit([], [codec.put_spec(owner), put_replica(owner, 0, next(iter(sizes)))])


async def ask(it: RunningDashboard, status: int = 200, **question: object) -> dict[str, Any]:
    url = f"{it.url}/api/v1/whatif"
    async with it.http.post(
        url, json=question, headers={"origin": it.url, "x-fleet-csrf": "1"}
    ) as response:
        assert response.status == status, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def test_a_lost_mac_moves_its_replicas_and_nothing_is_written(store: Transport) -> None:
    await write_fleet(store, one=24, two=24)
    async with running_dashboard(store) as it:
        found = await ask(it, lose=["one"])
        moves = {one["replica"]: one["to"] for one in found["steps"]}
        assert moves == {"qwen-0": ["two"], "qwen-1": ["two"]}
        found = await ask(it, lose=["one", "two"])
        assert found["unplaced"] == 2
        found = await ask(
            it, lose=["one", "two"], add=[{"name": "new", "chip": "M4 Max", "memory": "64Gi"}]
        )
        assert {tuple(one["to"]) for one in found["steps"]} == {("new",)}
        assert [one["node"] for one in found["macs"]] == ["new"]
        # The recorder itself knows both Macs, and no other.
        view = await it.get("/api/v1/view/macs")
        assert view["total"] == 2


MANIFEST = """\
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata:
  name: qwen
spec:
  model: {path: qwen}
  servedNames: [qwen]
  replicas: 1
"""


async def test_wrong_questions_are_refused(store: Transport) -> None:
    await write_fleet(store, one=24)
    async with running_dashboard(store) as it:
        for question, words in (
            ({"lose": ["on"]}, "on"),
            ({"add": [{"name": "x", "chip": "M4", "memory": "64"}]}, "less than any Mac has"),
            (
                {"add": [{"name": "one", "chip": "M4", "memory": "64Gi"}]},
                "there is a Mac one already",
            ),
            (
                {"add": [{"name": "x", "chip": "M4", "memory": "64Gi", "count": 5000}]},
                "no more than 1000",
            ),
            ({"remove": []}, "remove"),
        ):
            refusal = await ask(it, 400, **question)
            assert words in refusal["error"]["message"]
        long = await ask(it, manifest="#" * (128 << 10) + "#")
        assert "longer than 128 KiB" in long["errors"][0]["message"]
        huge = await ask(it, 413, manifest="#" * ((1 << 20) - 20))
        assert "larger than 1 MB" in huge["error"]["message"]


async def longest_turn(until_done: asyncio.Task[Any]) -> float:
    """Return the most CPU time of the event loop's thread between two of its turns: a busy machine does not count."""
    longest, before = 0.0, time.thread_time()
    while not until_done.done():
        await asyncio.sleep(0.01)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    return longest


@pytest.mark.parametrize("has_macs", [True, False])
async def test_no_question_stops_the_dashboard(store: Transport, *, has_macs: bool) -> None:
    """Finding S7: 60 deployments of 500 replicas on 1,000 Macs kept it for a minute, and it lost its lease."""
    await write_fleet(store, one=24)
    many = "---\n".join(
        MANIFEST.replace("qwen]", f"many{at}]").replace("name: qwen", f"name: many{at}")
        for at in range(60 if has_macs else 1000)
    ).replace("replicas: 1", "replicas: 500")
    macs = [{"name": f"new{at}", "chip": "M4", "memory": "64Gi", "count": 10} for at in range(100)]
    body = {"manifest": many, "add": macs if has_macs else []}
    async with running_dashboard(store) as it:
        headers = {"origin": it.url, "x-fleet-csrf": "1"}
        url = f"{it.url}/api/v1/whatif"

        async def post() -> tuple[int, str]:
            async with it.http.post(url, json=body, headers=headers) as response:
                return response.status, await response.text()

        async with asyncio.TaskGroup() as group:
            asked = group.create_task(post())
            longest = await longest_turn(asked)
        status, text = asked.result()
        if has_macs:
            assert "compares 30,033,003 placements" in text
            assert status == 400
        assert longest < 0.3
        assert any("/lease/Dashboard/" in item.key for item in (await store.list("/")).items)


async def test_a_large_question_is_answered_by_a_child_or_ended_with_it(store: Transport) -> None:
    await write_fleet(store, one=24)
    caches = make_fleet_caches(store, CLOCK)
    await caches.list_once()
    new = FleetNode(name="new", chip="M4 Max", memory="64Gi", count=1000)
    wanted = deployment(name="other", replicas=25)
    large = forecast_question(Supposition(objects=(wanted,), lost=("one",), added=(new,)))
    found: Any = await asyncio.to_thread(answer, caches, CLOCK, large)
    assert found["unplaced"] == 0
    assert {step["deployment"] for step in found["steps"]} == {"qwen", "other"}
    hurried = replace(question_process.LIMITS, wall_s=0.1)  # no child starts as fast
    with pytest.raises(RefusedError) as ended:
        await asyncio.to_thread(answer, caches, CLOCK, large, hurried)
    assert "was ended. Ask about fewer replicas" in ended.value.refusal.message
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not any("question_process" in command for command in commands)
    # The same process answers a small one alike.
    small = PlannerQuestion(kind="forecast", lost=("one",))
    assert answer(caches, CLOCK, small)["unplaced"] == 2
