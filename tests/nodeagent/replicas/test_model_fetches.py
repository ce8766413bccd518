"""The fetches of a node: resumed, shared, cancelled, and reported with the reason of a failure."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from machinery.clock import SystemClock
from models import weight_headers
from models.hub.fetcher import FetchLimits, ModelFetcher
from models.hub.hub_settings import HubSettings
from models.model_store.store import ModelStore
from models.weight_headers import TensorShape, WeightHeaders
from nodeagent.replicas.model_fetches import ModelFetches
from nodeagent.replicas.model_parts import ModelParts
from nodeagent.replicas.observation import FetchState, ObservedFetch
from schemas.deployment import HubReference, ModelSource
from schemas.records import HubToken
from schemas.replica import Replica
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.hub import COMMIT, REPO, StandInHub, tiny_files
from tests.support.hub_repositories import FOLDER
from tests.support.modelscope import StandInModelScope
from tests.support.nodeagent_groups import group
from tests.support.nodeagent_plans import wanted
from tests.support.values import present
from tests.support.waiting import until, until_async

CLOCK = SystemClock()


def replica(hub: StandInHub, name: str = "qwen-0") -> Replica:
    found = wanted()
    source = HubReference(repo=REPO, revision=COMMIT, endpoint=hub.endpoint)
    spec = found.spec.model_copy(update={"model": ModelSource(hub=source)})
    metadata = found.metadata.model_copy(update={"name": name})
    return found.model_copy(update={"spec": spec, "metadata": metadata})


@asynccontextmanager
async def fetching(
    root: Path,
    hub: StandInHub,
    store: MemoryTransport | None = None,
    *,
    parts: ModelParts | None = None,
) -> AsyncIterator[ModelFetches]:
    """Run the fetches of a node, with few retries of their own."""
    fetcher = ModelFetcher(
        ModelStore(root, CLOCK), CLOCK, limits=FetchLimits(attempts=1, rate_limit_wait_s=0.0)
    )
    fetches = ModelFetches(
        fetcher,
        HubSettings(),
        store or MemoryTransport(CLOCK),
        CLOCK,
        parts=parts or ModelParts("a"),
    )
    async with hub.serve(), asyncio.TaskGroup() as group:
        task = group.create_task(fetches.run())
        yield fetches
        task.cancel()


async def reached(fetches: ModelFetches, wants: Replica, state: FetchState) -> ObservedFetch:
    """Ask for the model, as the planner does, until its fetch has the state."""

    async def look() -> ObservedFetch | None:
        found = present(await fetches.observe(wants))
        if found.state is FetchState.NOT_STARTED:
            fetches.start(wants)
        return found if found.state is state else None

    return await until_async(look, what=str(state))


def modelscope_replica(hub: StandInHub, commit: str) -> Replica:
    found = replica(hub)
    source = HubReference(
        repo=REPO, source="modelscope", revision=commit, branch="v1", endpoint=hub.endpoint
    )
    spec = found.spec.model_copy(update={"model": ModelSource(hub=source)})
    return found.model_copy(update={"spec": spec})


def metrics(fetches: ModelFetches) -> str:
    return "\n".join(fetches.lines())


async def test_a_model_is_fetched_once_for_two_replicas_and_counted(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files()})
    async with fetching(tmp_path, hub) as fetches:
        first, second = replica(hub), replica(hub, "other-0")
        await asyncio.gather(
            reached(fetches, first, FetchState.PRESENT),
            reached(fetches, second, FetchState.PRESENT),
        )
        assert (tmp_path / FOLDER / "config.json").is_file()
        assert len(hub.requests("GET", "/tree/")) == 1
        fetched = sum(
            path.stat().st_size for path in (tmp_path / FOLDER).rglob("*") if path.is_file()
        )
        # Its files are in place a moment before the fetch ends and is counted.
        ended = "fleet_model_fetch_duration_seconds_count 1"
        await until(lambda: ended in metrics(fetches), what="the fetch ends")
        assert f'fleet_model_fetch_bytes_total{{repo="{REPO}"}} {fetched}' in metrics(fetches)
        report = present(await fetches.observe(first))
        assert "of it from 127.0.0.1" in report.message
        assert await fetches.record_load(first)


async def test_fetch_ends_when_its_last_replica_goes_and_keeps_what_it_has(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files(weights=2 << 20)})
    hub.faults.bytes_per_s = 1 << 19
    async with fetching(tmp_path, hub) as fetches:
        first, second = replica(hub), replica(hub, "other-0")
        await reached(fetches, first, FetchState.RUNNING)
        fetches.start(second)
        await until(lambda: hub.body_bytes > 100_000, what="bytes")
        fetches.release(first.name)
        fetch = present(await fetches.observe(second))
        assert fetch.state is FetchState.RUNNING
        assert f'fleet_model_fetch_total_bytes{{model="{FOLDER}"}}' in metrics(fetches)
        assert f'fleet_model_fetch_bytes_per_second{{model="{FOLDER}"}}' in metrics(fetches)
        (counted,) = (
            int(line.rpartition(" ")[2])
            for line in fetches.lines()
            if line.startswith("fleet_model_fetch_bytes_total{")
        )
        assert counted > 0, "bytes count while they arrive"
        fetches.release(second.name)
        fetch = present(await fetches.observe(second))
        assert fetch.state is FetchState.NOT_STARTED
        assert not (tmp_path / FOLDER).exists()
        hub.faults.bytes_per_s = None
        before = hub.body_bytes
        await reached(fetches, first, FetchState.PRESENT)
        whole = sum(len(content) for content in hub.repos[REPO].values())
        assert hub.body_bytes - before <= whole


async def test_a_failure_has_the_hubs_reason_and_a_time(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files()})
    hub.faults.flip_bit_at = 7
    async with fetching(tmp_path, hub) as fetches:
        fetch = await reached(fetches, replica(hub), FetchState.FAILED)
        assert fetch.reason == "HashMismatch"
        assert fetch.next_attempt is not None
        assert not (tmp_path / FOLDER).exists()
        assert 'fleet_model_fetch_failures_total{reason="HashMismatch"} 1' in metrics(fetches)


async def test_the_granted_token_goes_to_its_own_endpoint_only(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files()}, token="hf_secret")
    store = MemoryTransport(CLOCK)

    async def grant(endpoint: str) -> None:
        token = HubToken(
            name="t", endpoint=endpoint, token=SecretStr("hf_secret"), created=CLOCK.now()
        )
        put = Put(key=keys.hub_grant_key("a", "qwen"), value=codec.encode(token))
        await store.commit([], [put])

    async with fetching(tmp_path, hub, store) as fetches:
        await grant("https://elsewhere.example")
        fetch = await reached(fetches, replica(hub), FetchState.FAILED)
        assert fetch.reason == "Unauthorized"
        assert not any(one.has_token for one in hub.seen)
        await grant(f"{hub.endpoint}/")
        fetches.release("qwen-0")
        await reached(fetches, replica(hub), FetchState.PRESENT)
        assert any(one.has_token for one in hub.seen)


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def packed_headers() -> str:
    """Return the headers of a model with one layer in each file."""
    shape = TensorShape(dtype="F32", shape=(1,), size=4)
    files = {FIRST: {"model.layers.0.x": shape}, SECOND: {"model.layers.1.x": shape}}
    return weight_headers.pack(WeightHeaders(config="{}", files=files))


def rank_replica(hub: StandInHub, *nodes: str, **formation: Any) -> Replica:
    """Return a replica of the hub's model with a rank of one layer on each node."""
    found = group(*nodes, **formation)
    ranks = tuple(rank.model_copy(update={"layers": 1}) for rank in found.spec.ranks)
    spec = found.spec.model_copy(update={"model": replica(hub).spec.model, "ranks": ranks})
    return found.model_copy(update={"spec": spec})


async def test_a_pipeline_rank_fetches_its_files_and_a_tensor_rank_all(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files()})
    parts = ModelParts("a", lambda folder: packed_headers() if folder == FOLDER else "")
    async with fetching(tmp_path, hub, parts=parts) as fetches:
        # Rank 0 has the last layers.
        piped = rank_replica(hub, "a", "b", parallelism="Pipeline")
        fetch = await reached(fetches, piped, FetchState.PRESENT)
        assert fetch.is_partial
        assert (hub.requests("GET", FIRST), len(hub.requests("GET", SECOND))) == ([], 1)
        # In the next epoch this Mac has the other rank: the files are those of both then.
        other = rank_replica(hub, "b", "a", parallelism="Pipeline", epoch=2)
        fetch = await reached(fetches, other, FetchState.PRESENT)
        assert not fetch.is_partial
        assert len(hub.requests("GET", SECOND)) == 1
        tensor = rank_replica(hub, "a", "b", parallelism="Tensor")
        fetch = await reached(fetches, tensor, FetchState.PRESENT)
        assert not fetch.is_partial


async def test_a_part_stays_enough_when_the_reconciler_forgets_the_commit(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files()})
    known = {FOLDER: packed_headers()}
    async with fetching(
        tmp_path, hub, parts=ModelParts("a", lambda folder: known.get(folder, ""))
    ) as fetches:
        piped = rank_replica(hub, "a", "b", parallelism="Pipeline")
        await reached(fetches, piped, FetchState.PRESENT)
    async with fetching(tmp_path, hub, parts=ModelParts("a")) as later:
        fetch = present(await later.observe(piped))
        assert (fetch.state, fetch.is_partial) == (FetchState.PRESENT, True)


async def test_a_fetch_of_another_part_ends_when_the_layers_change(tmp_path: Path) -> None:
    hub = StandInHub(repos={REPO: tiny_files(weights=2 << 20)})
    hub.faults.bytes_per_s = 1 << 18
    async with fetching(
        tmp_path, hub, parts=ModelParts("a", lambda _: packed_headers())
    ) as fetches:
        await reached(
            fetches, rank_replica(hub, "a", "b", parallelism="Pipeline"), FetchState.RUNNING
        )
        other = rank_replica(hub, "b", "a", parallelism="Pipeline", epoch=2)
        await reached(fetches, other, FetchState.RUNNING)
        hub.faults.bytes_per_s = None
        fetch = await reached(fetches, other, FetchState.PRESENT)
        assert fetch.is_partial
        model = present(fetches.store.find(REPO, COMMIT))
        assert set(model.absent) == {SECOND}


async def test_nothing_is_fetched_before_the_store_has_told_the_headers(tmp_path: Path) -> None:
    """An agent that has just restarted would fetch the whole model, or lack room for it."""
    hub = StandInHub(repos={REPO: tiny_files()})
    told: list[str] = []
    parts = ModelParts("a", lambda _: told[0] if told else None)
    async with fetching(tmp_path, hub, parts=parts) as fetches:
        piped = rank_replica(hub, "a", "b", parallelism="Pipeline")
        for _ in range(2):
            fetch = present(await fetches.observe(piped))
            assert fetch.state is FetchState.NOT_STARTED
            fetches.start(piped)
        assert hub.seen == []
        told.append(packed_headers())
        fetch = await reached(fetches, piped, FetchState.PRESENT)
        assert fetch.is_partial
        told.clear()
        fetch = present(await fetches.observe(piped))
        assert fetch.state is FetchState.PRESENT, "what is known of this part stays known"


async def test_a_model_of_modelscope_is_fetched_from_the_pinned_branch(tmp_path: Path) -> None:
    files = tiny_files()
    hub = StandInModelScope(repos={REPO: files})
    async with fetching(tmp_path, hub) as fetches, HubSettings().open() as factory:
        unpinned = HubReference(
            repo=REPO, source="modelscope", revision="v1", endpoint=hub.endpoint
        )
        commit = await factory(unpinned, "").resolve(REPO, "v1")
        await reached(fetches, modelscope_replica(hub, commit), FetchState.PRESENT)
        folder = tmp_path / f"mlx-community--Tiny-4bit@{commit[:12]}"
        assert (folder / "config.json").read_bytes() == files["config.json"]
        assert {one.query["Revision"] for one in hub.seen} == {"v1"}
        hub.repos[REPO]["config.json"] = b"{}"
        again = await reached(fetches, modelscope_replica(hub, "a" * 40), FetchState.FAILED)
        assert again.reason == "NotFound"
