"""Earlier moments of a fleet: what was current then, what was deleted, and gaps. On a real etcd."""

import asyncio
from operator import itemgetter
from pathlib import Path

import pytest

from dashboard.api.time_parameters import show_time
from dashboard.history.database import HistoryFile, HistoryLimits
from dashboard.history.moments import MomentReader, NoMomentError
from dashboard.history.queries import HistoryReader
from dashboard.history.records import Batch, KeyRevision, Sample
from machinery.clock import SystemClock
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, Transport
from tests.support.dashboard_site import event
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.gateway_world import deployment
from tests.support.reconciler_agents import node_status, put_lease, put_node

NOW_S = 1_800_000_000


async def recorded(it: RunningDashboard, path: str, count: int) -> list[dict[str, object]]:
    """Wait until an object has so many changes in the history; return them, newest first."""
    path = f"/api/v1/objects/{path}/changes"
    await it.until(path, lambda found: len(found["changes"]) >= count)
    changes: list[dict[str, object]] = (await it.get(path))["changes"]
    return changes


@pytest.mark.etcd
async def test_a_moment_shows_the_fleet_as_it_was(store: Transport, tmp_path: Path) -> None:
    node = put_node("mac-1", node_status("mac-1", memory_gib=64, model="m"))
    await store.commit([], [node, put_lease("mac-1"), codec.put_spec(deployment("qwen"))])
    async with running_dashboard(store, state_dir=tmp_path) as it:
        await recorded(it, "ModelDeployment/qwen", 1)
        before = show_time(CLOCK.now().timestamp())
        await asyncio.sleep(0.01)
        await store.commit(
            [],
            [
                codec.put_spec(deployment("qwen", replicas=3)),
                Delete(key=keys.node_lease_key("mac-1")),
                codec.put_spec(deployment("other")),
            ],
        )
        await recorded(it, "ModelDeployment/other", 1)
        await store.commit([], [Delete(key=keys.spec_key("ModelDeployment", "other"))])
        changes = await recorded(it, "ModelDeployment/other", 2)
        assert (changes[0]["isDeletion"], changes[1]["isFirst"]) == (True, True)

        then = await it.get("/api/v1/snapshot", params={"at": before})
        assert (then["id"], then["views"]["macs"][0]["state"]) == (None, "online")
        (model,) = then["views"]["models"]
        assert (model["name"], model["desired"]) == ("qwen", 1)
        assert then["summary"]["macs"]["online"] == 1
        now = await it.get("/api/v1/snapshot")
        assert [one["name"] for one in now["views"]["models"]] == ["qwen"]
        assert now["views"]["macs"][0]["state"] == "offline"

        view = await it.get("/api/v1/view/models", params={"at": before})
        at = view["columns"].index("desired")
        assert ([row[at] for row in view["rows"]], view["total"]) == ([1], 1)
        yaml = await it.get("/api/v1/objects/ModelDeployment/qwen", params={"at": before})
        assert "replicas: 1" in yaml["yaml"]
        (latest, first) = await recorded(it, "ModelDeployment/qwen", 2)
        path, times = "/api/v1/objects/ModelDeployment/qwen/diff", {"from": first["at"]}
        for to in (latest["at"], "now"):
            found = await it.get(path, params={**times, "to": to})
            assert "-  replicas: 1\n+  replicas: 3" in found["diff"]
        assert (await it.get(path, params={**times, "to": first["at"]}))["diff"] == ""
        assert {"path": "spec.replicas", "old": 1, "new": 3} in latest["fields"]  # type: ignore[operator]


@pytest.mark.ci
@pytest.mark.etcd
async def test_what_changed_while_no_recorder_ran_is_found(
    store: Transport, tmp_path: Path
) -> None:
    await store.commit(
        [], [codec.put_spec(deployment("stays")), codec.put_spec(deployment("goes"))]
    )
    async with running_dashboard(store, state_dir=tmp_path, id_="run1") as it:
        await recorded(it, "ModelDeployment/goes", 1)
        await recorded(it, "ModelDeployment/stays", 1)
    await store.commit([], [Delete(key=keys.spec_key("ModelDeployment", "goes"))])
    async with running_dashboard(store, state_dir=tmp_path, id_="run2") as it:
        changes = await recorded(it, "ModelDeployment/goes", 2)
        assert changes[0]["isDeletion"]
        # What is as it was written is not written again.
        assert len(await recorded(it, "ModelDeployment/stays", 1)) == 1
        await store.commit([], [Delete(key=keys.spec_key("ModelDeployment", "stays"))])
        assert (await recorded(it, "ModelDeployment/stays", 2))[0]["isDeletion"]


@pytest.mark.etcd
async def test_events_outlive_their_lease(store: Transport, tmp_path: Path) -> None:
    put = event("e1", "the node lost its lease")
    await store.commit([], [put])
    async with running_dashboard(store, state_dir=tmp_path) as it:
        await it.until("/api/v1/events", itemgetter("total"))
        await store.commit([], [Delete(key=put.key)])
        path = "/api/v1/snapshot?view=events"
        await it.until(path, lambda found: not found["views"]["events"])
        for query, count in (("kind=Node&type=Warning", 1), ("object=mac-2", 0)):
            assert (await it.get(f"/api/v1/events?{query}"))["total"] == count


@pytest.mark.etcd
async def test_unknown_moments_are_refused_with_what_is_known(
    store: Transport, tmp_path: Path
) -> None:
    async with running_dashboard(store, state_dir=tmp_path) as it:
        refusal = await it.get("/api/v1/snapshot?at=23h", 404)
        assert "GET /api/v1/history lists what is known" in refusal["error"]["message"]
        refusal = await it.get("/api/v1/view/macs?at=noon", 400)
        assert "is no time" in refusal["error"]["message"]
    async with running_dashboard(store) as it:
        refusal = await it.get("/api/v1/snapshot?at=1m", 404)
        assert "--state-dir" in refusal["error"]["message"]


def fleet_step(at_s: int, macs: float) -> Sample:
    return Sample(tier_s=10, at_s=at_s, kind="fleet", values={"": (macs, 0.0, 0.0, 0.0)})


async def test_a_gap_is_told_from_what_was_known(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path, HistoryLimits())
    spec = codec.put_spec(deployment("qwen"))
    unknown = float("nan")
    file.write(
        Batch(
            at_s=NOW_S,
            samples=[
                *(fleet_step(NOW_S + at, 1.0) for at in (0, 10)),
                # The store was away.
                fleet_step(NOW_S + 20, unknown),
                fleet_step(NOW_S + 60, 1.0),
            ],
            revisions=[KeyRevision(key=spec.key, at_s=NOW_S + 5, revision=7, value=spec.value)],
        )
    )
    file.close()
    reader = MomentReader(HistoryReader(tmp_path, SystemClock()), SystemClock())
    known = await reader.known(NOW_S, NOW_S + 600)
    assert [(time.begin_s - NOW_S, time.end_s - NOW_S) for time in known] == [(0, 20), (60, 70)]
    for at_s, age_s in ((8, 0.0), (19, 0.0), (50, 30.0), (65, 0.0), (100, 30.0)):
        moment = await reader.at(NOW_S + at_s)
        assert (moment.age_s, moment.revision) == (age_s, 7), at_s
    with pytest.raises(NoMomentError):
        await reader.at(NOW_S)


async def test_wrong_queries_are_refused_with_what_is_right(tmp_path: Path) -> None:
    async with running_dashboard(MemoryTransport(CLOCK), state_dir=tmp_path) as it:
        for path, words in (
            ("series?subject=mac-1&metric=cpu_ratio", "is not fleet, node/NAME or model/NAME"),
            ("series?subject=node/a&metric=cpu", "it has cpu_ratio,"),
            ("series?subject=fleet", "Name 1 to 20 metrics"),
            ("series?metric=active&from=yesterday", "is no time: write `now`"),
            ("series?metric=active&from=1h&to=2h", "must be before 'to'"),
            ("series?metric=active&from=600h&step=1m", "use a longer step"),
            ("requests?status=good", "No request ends as 'good'"),
        ):
            refusal = await it.get(f"/api/v1/{path}", 400)
            assert words in refusal["error"]["message"]


async def test_without_a_folder_there_is_no_history() -> None:
    async with running_dashboard(MemoryTransport(CLOCK)) as it:
        refusal = await it.get("/api/v1/series?metric=active", 404)
        assert "--state-dir" in refusal["error"]["message"]
        assert (await it.get("/health"))["history"]["status"].startswith("off")
        # The last requests are known all the same, as the page lists them.
        assert await it.get("/api/v1/requests") == {"requests": []}
