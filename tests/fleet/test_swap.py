"""Five real models, room for two: every request is answered, memory stays within the proofs, and none is reloaded early."""

import asyncio
import json
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import aiohttp
import psutil
import pytest

from schemas.deployment import ModelDeploymentStatus
from schemas.meta import ENDED_BECAUSE, ConditionStatus, find_condition
from schemas.replica import Replica, ReplicaStatus
from store import codec, keys
from store.etcd.connect import connect
from store.port import Transport
from tests.support.fleet import Fleet, model_deployment
from tests.support.models import MODEL

pytestmark = [pytest.mark.fleet, pytest.mark.ci, pytest.mark.timeout(1500)]

NAMES = tuple(f"m{number}" for number in range(5))
MEMORY_BYTES = 3 << 30  # a copy is proven to need 1.3 GiB
SEED = 20261130


@asynccontextmanager
async def small_fleet(root: Path, smollm2: Path) -> AsyncIterator[Fleet]:
    """Run one Mac with room for two copies of the model, each in a folder of its own."""
    models = root / "models"
    for name in NAMES:
        shutil.copytree(smollm2 / MODEL, models / name, copy_function=os.link)
    fleet = Fleet(root / "fleet", models)
    try:
        await fleet.etcd.start()
        fleet.start_reconciler()
        fleet.start_agent("node-1", memory=str(MEMORY_BYTES))
        # Each waits for the minimum time of those that came before it.
        fleet.start_gateway("--hold-timeout", "1200")
        await fleet.joined(1)
        yield fleet
    finally:
        await fleet.stop()


@dataclass
class FleetObserver:
    """Observations of the replicas while requests run."""

    most_promised: int = 0
    most_resident: int = 0
    most_replicas: int = 0
    loads: int = 0
    forecasts: set[str] = field(default_factory=set)
    """Deployments that were expected to load once another one has given way."""
    served: dict[str, datetime] = field(default_factory=dict)
    """Since when each replica is ready, by uid."""
    gave_way: dict[str, timedelta] = field(default_factory=dict)
    """For how long each replica had been ready when it gave way, by uid."""

    async def look(self, store: Transport, fleet: Fleet) -> None:
        items = (await store.list(keys.spec_prefix("Replica"))).items
        replicas = [codec.decode_object(Replica, item) for item in items]
        promised = sum(rank.memory.total_bytes for r in replicas for rank in r.spec.ranks)
        self.most_promised = max(self.most_promised, promised)
        self.most_replicas = max(self.most_replicas, len(replicas))
        resident = 0
        for pid in fleet.engine_pids("node-1"):
            try:
                resident += psutil.Process(pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.most_resident = max(self.most_resident, resident)
        for replica in replicas:
            await self._note(store, replica)
        for item in (await store.list(keys.status_prefix("ModelDeployment"))).items:
            loading = codec.decode(ModelDeploymentStatus, item).loading
            if loading is not None and loading.gives_way:
                self.forecasts.add(item.key)

    async def _note(self, store: Transport, replica: Replica) -> None:
        uid, meta = replica.metadata.uid, replica.metadata
        item = await store.get(keys.status_key("Replica", replica.name))
        ready = (
            None
            if item is None
            else find_condition(codec.decode(ReplicaStatus, item).conditions, "Ready")
        )
        is_ready = ready is not None and ready.status is ConditionStatus.TRUE
        if is_ready and ready is not None and ready.last_transition_time and uid not in self.served:
            self.served[uid] = ready.last_transition_time
            self.loads += 1
        ended_because = meta.annotations.get(ENDED_BECAUSE, "")
        if meta.deletion_timestamp is not None and ended_because.startswith("GaveWay:"):
            since = self.served.get(uid)
            if since is not None:
                self.gave_way[uid] = meta.deletion_timestamp - since


async def ask(http: aiohttp.ClientSession, url: str, model: str) -> tuple[int, str]:
    """Send one chat; return the status and the text, or the error."""
    messages = [{"role": "user", "content": "Say one word."}]
    body = {"model": model, "messages": messages, "max_tokens": 4}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        text = await response.text()
        if response.status != 200:
            return response.status, text
        return 200, str(json.loads(text)["choices"][0]["message"]["content"])


async def test_five_models_share_the_room_of_two(tmp_path: Path, smollm2: Path) -> None:
    watch, answers = FleetObserver(), list[tuple[int, str]]()
    is_over = asyncio.Event()
    async with small_fleet(tmp_path, smollm2) as fleet, aiohttp.ClientSession() as http:
        scaling = {"minReplicas": 0, "maxReplicas": 1, "idleTime": "1h"}
        for name in NAMES:
            await fleet.applied(
                model_deployment(
                    name,
                    model={"path": name},
                    replicas=0,
                    contextLength=256,
                    concurrency=4,
                    autoscaling=scaling,
                )
            )
        store = connect(fleet.etcd.address)

        async def observe() -> None:
            while not is_over.is_set():
                await watch.look(store, fleet)
                await asyncio.sleep(0.5)  # between two looks at the memory

        async def client(number: int) -> None:
            draw = random.Random(SEED + number)
            for _ in range(3):
                answers.append(await ask(http, fleet.url, draw.choice(NAMES)))

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(observe())
                async with asyncio.TaskGroup() as clients:
                    # A burst for a model at zero, of more requests than it takes at once, and random ones.
                    burst = [clients.create_task(ask(http, fleet.url, "m0")) for _ in range(12)]
                    for number in range(2):
                        clients.create_task(client(number))
                is_over.set()
        finally:
            await store.close()
    answers += [task.result() for task in burst]
    assert [answer for answer in answers if answer[0] != 200] == []
    assert len(answers) == 12 + 6
    assert watch.most_replicas == 2
    assert watch.most_promised <= MEMORY_BYTES
    assert watch.most_resident <= watch.most_promised
    assert watch.loads > 2, "models took turns"
    assert watch.gave_way
    assert watch.forecasts, "the wait is told in advance"
    assert min(watch.gave_way.values()) >= timedelta(seconds=60)
