"""Limits of pools on model files: which pools count, what changes while transfers run, and what goes above a limit."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from models.hub.bandwidth import BandwidthLimit
from models.model_store.store import ModelStore
from nodeagent.engines.wired_memory import WiringPolicy
from nodeagent.model_store.collector import ModelCollector
from nodeagent.model_store.usage import read_users
from nodeagent.peers.uploads import Uploads
from nodeagent.pool_limits import PoolLimits
from schemas.event import Event
from schemas.memory import EngineMemory
from schemas.meta import ObjectMeta
from schemas.node import Node
from schemas.pools import NodePool, NodePoolSpec, NodeSelector
from store import codec, keys, objects
from store.events import EventRecorder
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.agent_api import STATUS
from tests.support.hub import COMMIT
from tests.support.model_store import ShiftedClock, add_model
from tests.support.waiting import until

CLOCK = SystemClock()


@asynccontextmanager
async def limits(
    store: MemoryTransport, models: ModelStore | None = None
) -> AsyncIterator[PoolLimits]:
    models = models or ModelStore(Path("/nowhere"), CLOCK)
    recorder = EventRecorder(store, CLOCK, source="Node/mac-1")
    pool_limits = PoolLimits(
        transport=store,
        clock=CLOCK,
        node="mac-1",
        status=STATUS,
        download=BandwidthLimit(CLOCK),
        uploads=Uploads(CLOCK, bytes_per_s=5e8),
        collector=ModelCollector(
            models, recorder, lambda: read_users(store, models.root, None), node="mac-1"
        ),
        wiring=WiringPolicy(),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pool_limits.run())
        yield pool_limits
        running.cancel()


async def put(store: MemoryTransport, name: str, spec: NodePoolSpec) -> None:
    pool = NodePool(metadata=ObjectMeta(name=name), spec=spec)
    key = keys.spec_key("NodePool", name)
    await store.commit([], [Put(key=key, value=codec.encode(pool))])


async def shown(found: PoolLimits, download: float | None, upload: float) -> None:
    assert found.uploads is not None
    uploads = found.uploads
    await until(
        lambda: (found.download.bytes_per_s, uploads.bandwidth.bytes_per_s) == (download, upload),
        what="the limits",
    )


async def test_the_lowest_limit_of_the_nodes_pools_counts_and_goes_with_the_pool() -> None:
    store = MemoryTransport(CLOCK)
    await put(store, "other", NodePoolSpec(nodes=("mac-2",), download_limit="1M"))
    await put(store, "slow", NodePoolSpec(nodes=("mac-1",), download_limit="20M"))
    chips = NodeSelector(chips=(STATUS.chip,))
    await put(store, "m4", NodePoolSpec(selector=chips, download_limit="50M", upload_limit="100M"))
    async with limits(store) as pool_limits:
        await shown(pool_limits, 20e6, 1e8)
        await put(store, "slow", NodePoolSpec(nodes=("mac-1",), upload_limit="900M"))
        await shown(pool_limits, 50e6, 1e8)
        await store.commit([], [Delete(key=keys.spec_key("NodePool", "m4"))])
        await shown(pool_limits, None, 5e8)  # the agent's own flag is the most


async def test_a_pool_selects_by_the_labels_of_the_owner() -> None:
    store = MemoryTransport(CLOCK)
    node = Node(metadata=ObjectMeta(name="mac-1", labels={"site": "attic"}))
    key = keys.spec_key("Node", "mac-1")
    await store.commit([], [Put(key=key, value=codec.encode(node))])
    attic = NodeSelector(match_labels={"site": "attic"})
    await put(store, "attic", NodePoolSpec(selector=attic, download_limit="3M"))
    async with limits(store) as pool_limits:
        await shown(pool_limits, 3e6, 5e8)


async def test_limits_stay_while_the_node_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """A newer mlx-fleet wrote it, or a person by hand. The agent of an earlier release goes on."""
    caplog.set_level(logging.INFO, "nodeagent")
    store = MemoryTransport(CLOCK)
    await put(store, "slow", NodePoolSpec(nodes=("mac-1",), download_limit="3M"))
    key = keys.spec_key("Node", "mac-1")
    async with limits(store) as pool_limits:
        await shown(pool_limits, 3e6, 5e8)
        await store.commit([], [Put(key=key, value=b'{"metadata": {"name": "mac-1", "new": 1}}')])
        await put(store, "slow", NodePoolSpec(nodes=("mac-1",), download_limit="2M"))
        await until(lambda: "limits of pools not applied" in caplog.text, what="the refusal")
        await shown(pool_limits, 3e6, 5e8)
        await store.commit([], [Delete(key=key)])
        await put(store, "slow", NodePoolSpec(nodes=("mac-1",), download_limit="1M"))
        await shown(pool_limits, 1e6, 5e8)


async def test_models_above_the_limit_of_a_pool_go_the_longest_unused_first(tmp_path: Path) -> None:
    store, clock = MemoryTransport(CLOCK), ShiftedClock()
    models = ModelStore(tmp_path, clock)
    names = []
    for number in range(3):
        files = {"model.safetensors": bytes([number]) * 1000}
        names.append(add_model(models, f"org/m{number}", COMMIT, files).name)
    clock.shift_s = 7200
    assert models.record_load(names[0])
    clock.shift_s = 14400
    await put(store, "mac", NodePoolSpec(nodes=("mac-1",), model_disk_limit="2500"))
    async with limits(store, models) as pool_limits:
        collector = pool_limits.collector
        await until(lambda: collector.policy.limit_bytes == 2500, what="the limit")
        assert (await collector.collect_if_due()).models == (names[1],)
        assert {model.name for model in models.models()} == {names[0], names[2]}
        (event,) = await objects.list_all(store, Event)
        assert "more than 2.4 KiB (modelDiskLimit of a NodePool)" in event.spec.message
        assert (await collector.collect_if_due()).is_empty
        await put(store, "mac", NodePoolSpec(nodes=("mac-1",), model_disk_limit="1"))
        await put(store, "other", NodePoolSpec(nodes=("mac-1",), model_disk_limit="1500"))
        await until(lambda: collector.policy.limit_bytes == 1, what="the lowest limit")
        assert models.pin(names[2])
        assert (await collector.collect_if_due()).models == (names[0],)
        await store.commit([], [Delete(key=keys.spec_key("NodePool", "mac"))])
        await store.commit([], [Delete(key=keys.spec_key("NodePool", "other"))])
        await until(lambda: collector.policy.limit_bytes is None, what="no limit")


async def test_one_pool_that_forbids_wiring_is_enough_and_a_deployment_overrides_it() -> None:
    store = MemoryTransport(CLOCK)
    await put(store, "all", NodePoolSpec(nodes=("mac-1",), memory=EngineMemory(wired="Auto")))
    async with limits(store) as found:
        async with asyncio.timeout(60):
            await found.is_applied.wait()
        assert found.wiring.wired(None) == "Auto"
        await put(store, "own", NodePoolSpec(nodes=("mac-1",), memory=EngineMemory(wired="Off")))
        await until(lambda: found.wiring.wired(None) == "Off", what="the pool")
        assert found.wiring.wired(EngineMemory(wired="Auto")) == "Auto"
