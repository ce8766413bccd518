"""The state of the fleet over HTTP: snapshots, views, and a stream that is resumed by its last id. On a real etcd."""

import asyncio
import json
import logging
from itertools import count
from typing import Any

import pytest

from dashboard.assets import Assets
from machinery.process_log import JsonFormatter, LogRing
from manifests.change_log import AuditedTransport, ChangeAuthor
from schemas.gitsource import Drift, GitSource, GitSourceSpec, GitSourceStatus
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import NodeLease
from schemas.records import DashboardLease, GatewayLease
from schemas.trust import PendingJoin
from store import codec, keys
from store.port import Delete, Put, Transport
from tests.support.dashboard_site import event
from tests.support.dashboards import CLOCK, read_events, running_dashboard
from tests.support.gateway_world import deployment
from tests.support.macs import GIB, put_status
from tests.support.waiting import until_async

pytestmark = pytest.mark.etcd


def put_lease(name: str) -> Put:
    return Put(key=keys.node_lease_key(name), value=codec.encode(NodeLease(uid=name, session="s")))


TOO_WARM = Condition(
    type="ThermalPressure", status=ConditionStatus.TRUE, reason="TooWarm", message="it is throttled"
)


async def write_fleet(store: Transport) -> None:
    lease = GatewayLease(url="http://127.0.0.1:1", version="1")
    await store.commit(
        [],
        [
            put_lease("mac-1"),
            put_status("mac-1"),
            put_lease("mac-2"),
            put_status("mac-2", TOO_WARM),
            put_status("mac-3"),
            codec.put_spec(deployment("qwen", replicas=2)),
            Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, "g1"), value=codec.encode(lease)),
            event("e1", "the node lost its lease"),
            Put(key=keys.ELECTION_RECONCILER, value=b"mac-1/7 1.0"),
        ],
    )


async def test_a_snapshot_has_the_whole_fleet(store: Transport) -> None:
    await write_fleet(store)
    async with running_dashboard(store) as running:
        found = await running.get("/api/v1/snapshot")
        states = {one["name"]: one["state"] for one in found["views"]["macs"]}
        assert states == {"mac-1": "online", "mac-2": "degraded", "mac-3": "offline"}
        assert "throttled" in found["views"]["macs"][1]["reason"]
        (model,) = found["views"]["models"]
        assert (model["name"], model["desired"], model["ready"]) == ("qwen", 2, 0)
        assert [one["url"] for one in found["views"]["gateways"]] == ["http://127.0.0.1:1"]
        (warm,) = found["views"]["conditions"]
        (problem,) = found["views"]["problems"]
        assert problem["title"] == "mac-2: the processor is throttled by heat"
        assert (warm["object"], warm["isProblem"]) == ("mac-2", True)
        assert "Cool the Mac" in warm["cure"]
        assert found["views"]["events"][0]["reason"] == "NodeNotReady"
        assert found["summary"]["sentence"].startswith("2 of 3 Macs online. qwen is starting.")
        assert found["summary"]["leader"] == "mac-1/7 1.0"
        health = await running.get("/health")
        assert (health["status"], health["worldSize"], health["store"]) == ("ok", 2, "ok")
        only = await running.get("/api/v1/snapshot?view=gateways")
        assert list(only["views"]) == ["gateways"]


async def test_a_view_is_filtered_sorted_and_paged(store: Transport) -> None:
    await write_fleet(store)
    async with running_dashboard(store) as running:
        found = await running.get("/api/v1/view/macs?sort=-name&limit=2&after=1")
        assert found["total"] == 3
        at = found["columns"].index("name")
        assert [row[at] for row in found["rows"]] == ["mac-2", "mac-1"]
        for query, names in (("state=offline", ["mac-3"]), ("THROTTLED", ["mac-2"]), ("x", [])):
            found = await running.get(f"/api/v1/view/macs?filter={query}")
            assert [row[at] for row in found["rows"]] == names
        error = await running.get("/api/v1/view/pods", 400)
        assert "There is no view 'pods'; there are macs, models" in error["error"]["message"]
        error = await running.get("/api/v1/view/macs?sort=age", 400)
        assert "There is no column 'age'" in error["error"]["message"]
        error = await running.get("/api/v1/view/macs?limit=501", 400)
        assert error["error"]["param"] == "limit"


async def test_a_stream_sends_what_changes_and_resumes(store: Transport) -> None:
    await write_fleet(store)
    async with running_dashboard(store) as running:
        async with running.http.get(f"{running.url}/api/v1/stream?view=macs") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            events = read_events(response)
            first = await anext(events)
            # An open page compares it, and offers to load the page of another release.
            assert first.data["page"] == Assets.load().version
            assert (first.name, len(first.data["views"]["macs"])) == ("snapshot", 3)
            await store.commit([], [Delete(key=keys.node_lease_key("mac-1"))])
            async with asyncio.timeout(10):
                patch = await anext(events)
            assert patch.name == "patch"
            # Columns that differ, and no others.
            reason = "its agent does not renew its lease"
            block = {"name": ["mac-1"], "state": ["offline"], "reason": [reason]}
            assert patch.data["views"] == {"macs": {"blocks": [block]}}
            assert patch.data["summary"]["macs"]["offline"] == 2
        # Two changes while nobody listens come as one patch.
        await store.commit([], [put_lease("mac-1"), Delete(key=keys.status_key("Node", "mac-3"))])
        path = "/api/v1/view/macs?filter=name=mac-3"
        await running.until(path, lambda found: found["total"] == 0)
        url = f"{running.url}/api/v1/stream?view=macs"
        async with running.http.get(url, headers={"last-event-id": patch.id}) as response:
            event = await anext(read_events(response))
        assert event.name == "patch"
        assert event.data["views"]["macs"]["gone"] == ["mac-3"]
        (block,) = event.data["views"]["macs"]["blocks"]
        assert (block["name"], block["state"]) == (["mac-1"], ["online"])
        # An id of another run means a snapshot.
        async with running.http.get(f"{url}&since=run0-5") as response:
            assert (await anext(read_events(response))).name == "snapshot"


async def test_a_stream_is_pinged_while_views_change_that_it_does_not_show(
    store: Transport,
) -> None:
    """A page takes silence for a broken connection."""
    async with running_dashboard(store) as running:

        async def write_events() -> None:
            for number in count():
                await store.commit([], [event("e1", f"event {number}")])
                await asyncio.sleep(0.2)

        url = f"{running.url}/api/v1/stream?view=groups"
        async with asyncio.TaskGroup() as group, running.http.get(url) as response:
            writes = group.create_task(write_events())
            events = read_events(response)
            assert (await anext(events)).name == "snapshot"
            async with asyncio.timeout(30):
                assert "ping" in [(await anext(events)).name for _ in range(3)]
            writes.cancel()


async def test_changes_and_git_sources_come_on_the_stream(store: Transport) -> None:
    ann = ChangeAuthor(user="ann", manager="fleetctl", command="fleetctl apply", reason="try it")
    spec = GitSourceSpec(repository="https://git.example.com/fleet.git")
    source = GitSource(metadata=ObjectMeta(name="home", uid="g"), spec=spec)
    stale = Condition(
        type="Ready", status=ConditionStatus.FALSE, reason="FetchFailed", message="no route"
    )
    async with running_dashboard(store) as running:
        await running.until("/api/v1/changes")
        url = f"{running.url}/api/v1/stream?view=changes,gitSources"
        async with running.http.get(url) as response, asyncio.timeout(30):
            events = read_events(response)
            assert (await anext(events)).data["views"] == {"changes": [], "gitSources": []}
            await AuditedTransport(store, CLOCK, ann).commit([], [codec.put_spec(source)])
            seen: dict[str, Any] = {}
            while set(seen) != {"changes", "gitSources"}:
                seen.update((await anext(events)).data.get("views", {}))
            (block,) = seen["changes"]["blocks"]
            assert (block["user"], block["reason"]) == (["ann"], ["try it"])
            assert block["objects"][0][0]["name"] == "home"
            (row,) = seen["gitSources"]["blocks"]
            assert (row["name"], row["isReady"], row["drift"]) == (["home"], [False], [[]])
            drifted = GitSourceStatus(
                observed_revision="main@2",
                conditions=(stale,),
                drift=(Drift(kind="ModelDeployment", name="qwen", fields=()),),
            )
            key = keys.status_key("GitSource", "home")
            await store.commit([], [Put(key=key, value=codec.encode(drifted))])
            while "gitSources" not in (views := (await anext(events)).data.get("views", {})):
                pass
            (row,) = views["gitSources"]["blocks"]
            assert (row["reason"], row["observedRevision"]) == (["FetchFailed"], ["main@2"])
            assert row["drift"][0][0]["name"] == "qwen"
        # Others are chosen by the server, from the same records.
        found = await running.get("/api/v1/changes?kind=GitSource&object=home")
        assert [one["id"] for one in found["changes"]] == block["name"]
        assert (await running.get("/api/v1/changes?user=eve"))["changes"] == []
        assert (await running.get("/api/v1/changes?to=1h"))["total"] == 0


async def test_machines_that_wait_for_an_approval_are_shown(store: Transport) -> None:
    waiting = PendingJoin(
        id="abcdefghijklmnop",
        name="mini-9",
        request="a request for a certificate",
        key_hash="0" * 64,
        hardware_uuid="11111111-2222-3333-4444-555555555555",
        source="192.0.2.7",
        memory_bytes=GIB,
        created=CLOCK.now(),
    )
    key = keys.named(keys.JOIN_REQUEST_PREFIX, waiting.id)
    async with running_dashboard(store) as running:
        await store.commit([], [Put(key=key, value=codec.encode(waiting))])
        path = "/api/v1/snapshot?view=joinRequests"
        (row,) = await running.until(path, lambda found: found["views"]["joinRequests"])
        assert (row["node"], row["source"], row["isApproved"]) == ("mini-9", "192.0.2.7", False)
        assert not {"request", "keyHash", "hardwareUuid"} & set(row)
        await store.commit([], [Delete(key=key)])
        await running.until(path, lambda found: not found["views"]["joinRequests"])


async def test_a_stream_sends_the_selected_columns_and_rows(store: Transport) -> None:
    await write_fleet(store)
    query = "view=macs:state,allocatableBytes:state=online&view=conditions::isProblem=true"
    async with running_dashboard(store) as running:
        async with running.http.get(f"{running.url}/api/v1/stream?{query}") as response:
            assert response.headers["content-encoding"] == "gzip"
            events = read_events(response)
            first = (await anext(events)).data["views"]
            row = {"name": "mac-1", "state": "online", "allocatableBytes": 36 * GIB}
            assert first["macs"] == [row]
            assert [one["object"] for one in first["conditions"]] == ["mac-2"]
            # A row that begins to match comes with all its columns, one that ceases to is gone.
            await store.commit([], [put_status("mac-1", TOO_WARM), put_status("mac-2")])
            found: dict[str, Any] = {}
            async with asyncio.timeout(10):
                while "conditions" not in found or "macs" not in found:
                    event = await anext(events)
                    found |= event.data.get("views", {}) if event.name == "patch" else {}
            assert found["macs"]["gone"] == ["mac-1"]
            (block,) = found["macs"]["blocks"]
            assert block["name"] == ["mac-2"]
            assert block["allocatableBytes"] == [36 * GIB]
            assert found["conditions"]["gone"] == ["Node/mac-2/ThermalPressure"]
            assert found["conditions"]["blocks"][0]["object"] == ["mac-1"]
        for query, word in (
            ("macs:state:online", "is no COLUMN=VALUE"),
            ("macs&view=macs:state", "can be selected once"),
            ("pods:name", "There is no view 'pods'"),
        ):
            error = await running.get(f"/api/v1/stream?view={query}", 400)
            assert word in error["error"]["message"]


async def test_the_fourth_stream_of_a_client_ends_the_first(store: Transport) -> None:
    async with running_dashboard(store) as running:
        url = f"{running.url}/api/v1/stream?view=macs"
        async with running.http.get(url) as oldest:
            events = read_events(oldest)
            assert (await anext(events)).name == "snapshot"
            others = [await running.http.get(url) for _ in range(3)]
            async with asyncio.timeout(10):
                assert (await anext(events)).name == "bye"
            for other in others:
                other.close()


async def test_it_registers_at_its_address(store: Transport) -> None:
    key = keys.named(keys.DASHBOARD_LEASE_PREFIX, "run1")
    async with running_dashboard(store) as running:

        async def url() -> str:
            item = await store.get(key)
            return "" if item is None else codec.decode(DashboardLease, item).url

        assert await until_async(url) == running.url
    assert await store.get(key) is None


async def test_the_log_of_a_dashboard_is_read_through_it(store: Transport) -> None:
    """The ticket is written by the dashboard; lines are chosen by what they are about."""
    ring = LogRing()
    ring.setFormatter(JsonFormatter("dashboard"))
    ring.handle(logging.makeLogRecord({"msg": "something", "node": "mac-1"}))
    async with running_dashboard(store, ring=ring) as running:
        await running.until("/api/v1/logs?of=dashboard/run1")

        async def read(name: str) -> str:
            query = {"of": "dashboard/run1", "about": name}
            async with running.http.get(f"{running.url}/api/v1/logs", params=query) as response:
                assert response.status == 200, await response.text()
                return await response.text()

        assert json.loads(await read("mac-1"))["message"] == "something"
        assert await read("mac-2") == ""
        for wrong, status in (
            ("dashboard/none", 404),
            ("etcd/1", 400),
            ("replica/none/1", 404),
            ("replica/none/x", 400),
        ):
            await running.get(f"/api/v1/logs?of={wrong}", status=status)
        await running.get("/v1/logs/dashboard", status=401)
