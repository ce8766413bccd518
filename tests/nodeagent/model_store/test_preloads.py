"""Preloads of a node: fetched one at a time without an engine, ended when the assignment goes, and failures told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from machinery.clock import SystemClock
from models.hub.fetcher import FetchLimits, ModelFetcher
from models.hub.hub_settings import HubSettings
from models.hub.model_hub import folder_name
from models.model_store.store import ModelStore
from nodeagent.model_store.preloads import ModelPreloads, preload_cache
from nodeagent.model_store.usage import read_users
from nodeagent.replicas.model_fetches import ModelFetches
from nodeagent.replicas.model_parts import ModelParts
from schemas.deployment import HubReference
from schemas.model_snapshot import PreloadAssignment
from schemas.node import ModelReport
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.hub import COMMIT, REPO, StandInHub, tiny_files
from tests.support.hub_repositories import FOLDER
from tests.support.waiting import until
from tests.support.world import GEOMETRY

CLOCK = SystemClock()
OTHER = "mlx-community/Other-4bit"


@dataclass
class Node:
    """A node with preloads, and the store that assigns them."""

    store: MemoryTransport
    fetches: ModelFetches
    preloads: ModelPreloads
    root: Path
    changes: int = 0

    async def assign(self, hub: StandInHub, deployment: str, repo: str = REPO) -> None:
        preload_assignment = PreloadAssignment(
            deployment=deployment,
            node="a",
            source=HubReference(repo=repo, revision=COMMIT, endpoint=hub.endpoint),
        )
        key = keys.preload_key("a", deployment)
        await self.store.commit([], [Put(key=key, value=codec.encode(preload_assignment))])

    async def end(self, deployment: str) -> None:
        await self.store.commit([], [Delete(key=keys.preload_key("a", deployment))])

    def problem(self) -> str:
        """Return what the node reports of the model."""
        report = ModelReport(path=FOLDER, geometry=GEOMETRY, missing_bytes=1)
        (model_report,) = self.preloads.with_problems([report])
        return model_report.fetch_problem

    def has(self, repo: str = REPO) -> bool:
        return (self.root / folder_name(repo, COMMIT) / "config.json").is_file()


@asynccontextmanager
async def preloading(root: Path, hub: StandInHub) -> AsyncIterator[Node]:
    store = MemoryTransport(CLOCK)
    limits = FetchLimits(attempts=1, rate_limit_wait_s=0.0)
    fetcher = ModelFetcher(ModelStore(root, CLOCK), CLOCK, limits=limits)
    fetches = ModelFetches(fetcher, HubSettings(), store, CLOCK, parts=ModelParts("a"))
    node = Node(store, fetches, ModelPreloads(preload_cache(store, CLOCK, "a"), fetches), root)

    def changed() -> None:
        node.changes += 1

    async with hub.serve(), asyncio.TaskGroup() as group:
        tasks = [group.create_task(fetches.run()), group.create_task(node.preloads.run(changed))]
        yield node
        for task in tasks:
            task.cancel()


async def test_models_are_fetched_one_after_the_other_without_a_replica(tmp_path: Path) -> None:
    hub = StandInHub(repos={repo: tiny_files(weights=1 << 20) for repo in (REPO, OTHER)})
    hub.faults.bytes_per_s = 1 << 21
    async with preloading(tmp_path, hub) as node:
        await node.assign(hub, "a")
        await node.assign(hub, "b", OTHER)
        await until(node.has, what="the first model")
        assert not node.has(OTHER)
        listed = [request.path for request in hub.requests("GET", "/tree/")]
        assert not any(OTHER in path for path in listed), "the second waits for the first"
        await until(lambda: node.has(OTHER), what="the second model")
        await until(lambda: node.changes >= 2, what="a report for each")


async def test_an_assignment_that_goes_ends_its_fetch_and_keeps_what_came(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files(weights=2 << 20)})
    hub.faults.bytes_per_s = 1 << 19
    async with preloading(tmp_path, hub) as node:
        await node.assign(hub, "a")
        await until(lambda: hub.body_bytes > 200_000, what="bytes")
        await node.end("a")
        await until(lambda: "fetch_total_bytes{" not in "\n".join(node.fetches.lines()), what="end")
        hub.faults.bytes_per_s = None
        before = hub.body_bytes
        await node.assign(hub, "a")
        await until(node.has, what="the model")
        assert hub.body_bytes - before < sum(map(len, hub.repos[REPO].values()))
        await node.end("a")
        assert node.has()


async def test_a_failure_is_told_until_it_is_over(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files()})
    hub.faults.status, hub.faults.failures = 503, 1
    async with preloading(tmp_path, hub) as node:
        await node.assign(hub, "a")
        await until(lambda: node.problem() != "", what="the reason")
        assert node.problem().startswith("SourceUnreachable: ")
        await until(node.has, what="the model, at the next attempt")
        await until(lambda: node.problem() == "", what="no reason any more")


async def test_a_preload_is_a_user_of_its_model(tmp_path: Path) -> None:
    preload_assignment = PreloadAssignment(
        deployment="qwen", node="a", source=HubReference(repo=REPO, revision=COMMIT)
    )
    users = await read_users(MemoryTransport(CLOCK), tmp_path, None, (preload_assignment,))
    assert users.of(FOLDER) == ("preload/qwen",)
