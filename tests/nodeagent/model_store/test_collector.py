"""The agent's collection: what uses a model, what goes when the disk is full, and what the store's absence means."""

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.hub.digests import BlobDigest
from models.hub.errors import InsufficientDiskError
from models.model_store.admission import reserve
from models.model_store.collection import CollectionPolicy
from models.model_store.store import ModelStore
from nodeagent.model_store.collector import ModelCollector
from nodeagent.model_store.usage import FleetObjects, ModelUsers, find_users, read_users
from schemas.deployment import (
    HubReference,
    ModelDeployment,
    ModelDeploymentSpec,
    ModelSource,
    Revision,
    RevisionSpec,
    RevisionTemplate,
)
from schemas.event import Event
from schemas.meta import ObjectMeta
from store import codec, objects
from store.errors import UnavailableError
from store.events import EventRecorder
from store.memory import MemoryTransport
from tests.support.model_store import ShiftedClock, add_model
from tests.support.values import present

HOUR = 3600.0
FULL = CollectionPolicy(start_percent=0.0, end_percent=0.0)
"""Any disk is full, and nothing that is unused stays."""


def commit_of(number: int) -> str:
    return f"{number:012x}" + "0" * 28


def deployment(name: str, model: ModelSource) -> ModelDeployment:
    return ModelDeployment(
        metadata=ObjectMeta(name=name, uid=name, generation=1),
        spec=ModelDeploymentSpec(model=model, replicas=1),
    )


def revision(name: str, model: ModelSource) -> Revision:
    content = RevisionTemplate(model=model, context_length=64, concurrency=1)
    return Revision(
        metadata=ObjectMeta(name=name, uid=name, generation=1),
        spec=RevisionSpec(deployment="qwen", template="t", revision=1, content=content),
    )


def hub(number: int, repo: str = "org/m") -> ModelSource:
    return ModelSource(hub=HubReference(repo=repo, revision=commit_of(number)))


class World:
    """A store of models on a disk, and the objects of a fleet."""

    def __init__(self, root: Path, policy: CollectionPolicy = FULL) -> None:
        self.clock = ShiftedClock()
        self.models = ModelStore(root / "models", self.clock)
        self.fleet = MemoryTransport(self.clock)
        self.is_reachable = True
        recorder = EventRecorder(self.fleet, self.clock, source="Node/mac-1")
        self.collector = ModelCollector(
            self.models, recorder, self.users, node="mac-1", policy=policy
        )

    async def users(self) -> ModelUsers:
        if not self.is_reachable:
            raise UnavailableError("the store is away", ambiguous=False)
        return await read_users(self.fleet, self.models.root, None)

    async def declare(self, one: ModelDeployment | Revision) -> None:
        await self.fleet.commit([], [codec.put_spec(one)])

    def add(self, number: int, size: int = 1000) -> str:
        files = {"model.safetensors": random.Random(number).randbytes(size)}
        return add_model(self.models, "org/m", commit_of(number), files).name

    def names(self) -> set[str]:
        return {model.name for model in self.models.models()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_only_what_nothing_names_goes_with_an_event_each(world: World) -> None:
    deployed, historic, by_path, pinned, unused = (world.add(number) for number in range(5))
    await world.declare(deployment("a", hub(0)))
    await world.declare(revision("a-1", hub(1)))
    await world.declare(deployment("b", ModelSource(path=by_path)))
    world.models.pin(pinned)
    world.clock.shift_s = 2 * HOUR
    plan = await world.collector.collect_if_due()
    assert plan.models == (unused,)
    assert world.names() == {deployed, historic, by_path, pinned}
    (event,) = await objects.list_all(world.fleet, Event)
    assert (event.spec.reason, event.spec.about.name) == ("ModelCollected", "mac-1")
    assert unused in event.spec.message


async def test_nothing_goes_while_the_store_is_away(world: World) -> None:
    name = world.add(1)
    world.clock.shift_s = 2 * HOUR
    world.is_reachable = False
    with pytest.raises(UnavailableError):
        await world.collector.collect_if_due()
    assert await world.collector.make_room(1) == 0
    assert world.names() == {name}


async def test_room_is_made_only_if_unused_models_have_enough(world: World) -> None:
    old, young = world.add(1, 1000), world.add(2, 1000)
    world.clock.shift_s = HOUR
    assert world.models.record_load(young)
    world.clock.shift_s = 3 * HOUR
    assert await world.collector.make_room(5000) == 2000
    assert world.names() == {old, young}
    assert await world.collector.make_room(800) == 1000
    assert world.names() == {young}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for little more than the margin of a fetch."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1300m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let tests mount a disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_full_disk_admits_a_fetch_after_an_unused_model_made_room(small_disk: Path) -> None:
    world = World(small_disk)
    used = world.add(1, 60 << 20)
    await world.declare(deployment("a", hub(1)))
    world.add(2, 150 << 20)
    world.clock.shift_s = 2 * HOUR
    wanted = {BlobDigest("sha256", "ab" * 32): 200 << 20}
    with pytest.raises(InsufficientDiskError) as refused:
        reserve(world.models, "org--n@0123456789ab", wanted)
    await world.collector.make_room(refused.value.missing_bytes)
    reservation = present(reserve(world.models, "org--n@0123456789ab", wanted))
    reservation.release()
    assert world.names() == {used}


def test_what_names_a_model_uses_it_in_a_thousand_random_histories() -> None:
    """Deployments, revisions and engines come and go; a folder is unused exactly while none of them names it."""
    chance = random.Random(17)
    models_dir = Path("/models")
    folders = [hub(number).folder for number in range(6)]
    for _ in range(1000):
        deployed: dict[str, int] = {}
        history: dict[str, int] = {}
        engines: dict[str, int] = {}
        for step in range(chance.randrange(1, 12)):
            live = chance.choice((deployed, history, engines))
            if live and chance.random() < 0.4:
                live.pop(chance.choice(sorted(live)))
            else:
                live[f"o{step}"] = chance.randrange(6)
        users = find_users(
            FleetObjects(
                deployments=tuple(deployment(name, hub(n)) for name, n in deployed.items()),
                revisions=tuple(revision(name, hub(n)) for name, n in history.items()),
            ),
            {
                name: ("python", "--model", f"{models_dir}/{folders[n]}")
                for name, n in engines.items()
            },
            models_dir,
        )
        named = {folders[n] for live in (deployed, history, engines) for n in live.values()}
        assert users.used(folders) == named


@pytest.mark.parametrize("model", [
    ModelSource(path="/models/org--m@000000000001"),
    ModelSource(path="ORG--M@000000000001"),
    ModelSource(path="base", adapter="org--m@000000000001/adapter"),
    ModelSource(hub=HubReference(repo="org/m", revision="main")),
], ids=["absolute", "other case", "adapter", "unresolved branch"])  # fmt: skip
def test_every_way_to_name_a_folder_counts(model: ModelSource) -> None:
    users = find_users(FleetObjects(deployments=(deployment("a", model),)), {}, Path("/models"))
    assert users.of("org--m@000000000001") == ("modeldeployment/a",)
    assert users.of("org--other@000000000001") == ()
