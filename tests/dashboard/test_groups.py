"""One shard group over HTTP: its links, its split, and its epochs with the reason of their end."""

import asyncio
import json
from pathlib import Path
from typing import Any

from dashboard.api.group_routes import epochs_of
from dashboard.history.moments import ObjectChange
from store.memory import MemoryTransport
from tests.support.dashboard_groups import put_epoch, put_group, put_studios
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard


async def read_group(running: RunningDashboard) -> dict[str, Any]:
    group: dict[str, Any] = await running.get("/api/v1/groups/studios")
    return group


async def test_a_group_shows_links_split_and_epochs(tmp_path: Path) -> None:
    store = MemoryTransport(CLOCK)
    await put_studios(store)
    await put_group(store)
    async with running_dashboard(store, state_dir=tmp_path) as running:
        group: dict[str, Any] = {"epochs": ()}
        for number in (1, 2):
            await put_epoch(store, number)
            async with asyncio.timeout(60):
                while len(group["epochs"]) < number:
                    await asyncio.sleep(0.1)
                    group = await read_group(running)
        assert group["members"] == ["studio-1", "studio-2", "studio-3"]
        links = {(one["from"], one["to"]): one["cables"] for one in group["links"]}
        assert links["studio-1", "studio-2"] == [{"device": "en6", "gbitPerSecond": 80}]
        assert len(links) == 3
        (replica,) = group["replicas"]
        assert [one["layers"] for one in replica["ranks"]] == [24, 20, 20]
        now, before = group["epochs"]
        assert (now["epoch"], now["endedAt"]) == (2, None)
        assert before["epoch"] == 1
        assert before["endedAt"] is not None
        assert before["message"] == "rank 2 on studio-3 ended with code 137"
        (check,) = group["checks"]
        assert check["gbPerSecond"] == 7.94
        missing = await running.get("/api/v1/groups/none", 404)
        assert "There is no ShardGroup 'none'" in missing["error"]["message"]
    async with running_dashboard(store) as running:
        assert (await read_group(running))["epochs"] is None


def change(at_s: float, part: str, document: object) -> ObjectChange:
    body = None if document is None else json.dumps(document).encode()
    return ObjectChange(at_s=at_s, revision=int(at_s), part=part, document=body)


def test_an_epoch_ends_with_its_replica_and_documents_of_others_are_ignored() -> None:
    over = {
        "type": "EpochOver",
        "status": "True",
        "reason": "RankExited",
        "message": "epoch 1: rank 1 ended",
    }
    formation = {"epoch": 1, "formedAt": "2026-01-01T00:00:00Z"}
    found = epochs_of(
        "a-0",
        [
            change(30.0, "spec", None),
            change(10.0, "spec", {"spec": {"formation": formation}}),
            change(19.0, "status", {"conditions": [{"type": "EpochOver", "status": "False"}]}),
            change(20.0, "status", {"conditions": [{"type": "EpochOver", "status": "True"}]}),
            change(21.0, "status", {"conditions": [over]}),
        ],
    )
    (epoch,) = found
    assert str(epoch["endedAt"]).startswith("1970-01-01T00:00:21")
    assert (epoch["reason"], epoch["message"]) == ("RankExited", "rank 1 ended")
    assert epochs_of("a-0", [change(1.0, "spec", {"spec": {}})]) == []
