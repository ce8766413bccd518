"""`fleetctl models` on two Macs: agents' APIs on real sockets, with stores of models on the disk, a stand-in hub and mlx-lm's converter."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from machinery.clock import SystemClock
from machinery.http_server import AdminServer
from machinery.process_log import LogRing
from models.hub.fetcher import ModelFetcher
from models.hub.hub_settings import HubSettings
from models.model_store.store import ModelStore
from nodeagent.api.machine_metrics import AgentView
from nodeagent.api.server import make_app
from nodeagent.hub_grants import HubGrants
from nodeagent.model_store.collector import ModelCollector
from nodeagent.model_store.pulls import ModelPulls
from nodeagent.model_store.quantizations import Quantizations
from nodeagent.model_store.usage import ModelUsers, read_users
from schemas.deployment import (
    HubReference,
    ModelSource,
)
from schemas.meta import ObjectMeta
from schemas.node import Node
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from store import codec, keys
from store.events import EventRecorder
from store.port import Put
from store.tickets import TicketChecker
from tests.fleetctl.conftest import Golden
from tests.support.agent_api import STATUS, Replicas
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.hub import COMMIT, REPO, StandInHub, tiny_files
from tests.support.mlx_models import module
from tests.support.model_store import add_model
from tests.support.modelscope import StandInModelScope
from tests.support.waiting import until

CLOCK = SystemClock()
NAME = "mlx-community--Tiny-4bit@1f2e3d4c5b6a"
RESULT = "fleet/Tiny-4bit-1f2e3d4c5b6a-4bit-g64"
QUANTIZE = ("models", "quantize", REPO)
MACS = ("mac-1", "mac-2")


class Macs:
    """Two agents' APIs, and fleetctl."""

    def __init__(self, root: Path) -> None:
        self.fleet = MemoryFleet()
        self.root = root
        self.urls: dict[str, str] = {}
        self.jobs: dict[str, Quantizations] = {}
        self.memory = dict.fromkeys(MACS, 64 << 30)
        self.ctl = self.fleet.ctl

    def store(self, node: str) -> ModelStore:
        return ModelStore(self.root / node / "models", CLOCK)

    def add(self, node: str, *, repo: str = REPO) -> str:
        return add_model(self.store(node), repo, COMMIT, tiny_files()).name

    def names(self, node: str) -> list[str]:
        return [model.name for model in self.store(node).models()]

    async def serve(self, node: str, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        store, transport = self.store(node), self.fleet.store

        async def users() -> ModelUsers:
            return await read_users(transport, store.root, None)

        recorder = EventRecorder(transport, CLOCK, source=f"Node/{node}")
        collector = ModelCollector(store, recorder, users, node=node)
        hubs = HubSettings()
        grants = HubGrants(store=transport, node=node, hubs=hubs)
        pulls = ModelPulls(ModelFetcher(store, CLOCK), hubs, CLOCK, grants=grants)
        jobs = Quantizations(collector, CLOCK, available_bytes=lambda: self.memory[node])
        self.jobs[node] = jobs
        view = AgentView(
            name=node, status=STATUS, clock=CLOCK, started_at=0.0, engines={}, replicas=Replicas({}),
            has_lease=lambda: True, folder=self.root / node / "engines", ring=LogRing(),
            collector=collector, pulls=pulls, quantizations=jobs,
        )  # fmt: skip
        changed = asyncio.Event()
        app = make_app(view, TicketChecker(transport, CLOCK, f"Node/{node}"))
        server = AdminServer(app, CLOCK, ("127.0.0.1", 0), changed.set)
        tasks = [group.create_task(part.run()) for part in (server, pulls, jobs)]
        await changed.wait()
        await until(lambda: jobs.is_ready, what="the agent")
        self.urls[node] = server.url
        await self.register(node, server.url)
        return tasks

    async def register(self, node: str, url: str) -> None:
        status = STATUS.model_copy(update={"agent_url": url})
        spec = Node(metadata=ObjectMeta(name=node, uid=node, generation=1))
        put = Put(key=keys.status_key("Node", node), value=codec.encode(status))
        await self.fleet.store.commit([], [codec.put_spec(spec), put])

    async def use(self, *nodes: str, path: str | None = None) -> None:
        """Assign a replica to nodes: of the hub's model, or of the one in a folder."""
        hub = None if path else HubReference(repo=REPO, revision=COMMIT)
        proof = MemoryProof(weights_bytes=1, kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0)
        spec = ReplicaSpec(
            deployment="tiny", template="t", served_names=("tiny",), context_length=64, concurrency=1,
            model=ModelSource(hub=hub, path=path),
            ranks=tuple(RankAssignment(node=node, memory=proof) for node in nodes),
        )  # fmt: skip
        replica = Replica(metadata=ObjectMeta(name="tiny-0", uid="u", generation=1), spec=spec)
        await self.fleet.store.commit([], [codec.put_spec(replica)])


@pytest.fixture
async def macs(tmp_path: Path) -> AsyncIterator[Macs]:
    made = Macs(tmp_path)
    async with asyncio.TaskGroup() as group:
        running = [task for node in MACS for task in await made.serve(node, group)]
        yield made
        for task in running:
            task.cancel()


async def test_models_of_the_macs_are_pulled_listed_pinned_and_removed(
    macs: Macs, golden: Golden
) -> None:
    async with StandInHub(repos={REPO: tiny_files()}).serve() as hub:
        names = {
            "HUB": hub.endpoint,
            "HOST": hub.endpoint.partition("//")[2],
            "MACS": str(macs.root),
        }
        names["MAC1"] = macs.urls["mac-1"]
        await golden("worlds/models_fleet", macs.fleet, **names)
    assert (macs.names("mac-1"), macs.names("mac-2")) == ([NAME], [])


async def grants(macs: Macs) -> list[str]:
    return [item.key for item in (await macs.fleet.store.list(keys.HUB_GRANT_PREFIX)).items]


async def test_a_gated_repository_is_pulled_with_the_stored_token_which_only_the_fetching_mac_gets(
    macs: Macs,
) -> None:
    hub = StandInHub(repos={REPO: tiny_files(weights=2 << 20)}, token="hf_s3cret")
    hub.faults.bytes_per_s = 1 << 20
    async with hub.serve(), asyncio.TaskGroup() as group:
        where = ("--hub-endpoint", hub.endpoint)
        refused = await macs.ctl("models", "pull", REPO, "--all", *where)
        assert (refused.code, "Unauthorized" in refused.err) == (1, True)
        made = await macs.ctl(
            *("create", "hubtoken", "hub", "--endpoint", hub.endpoint, "--token-file", "-"),
            stdin=b"hf_s3cret",
        )
        assert made.code == 0, made.err
        pull = group.create_task(macs.ctl("models", "pull", REPO, "--nodes", "mac-2", *where))
        await until(lambda: hub.body_bytes > 100_000, what="bytes")
        assert await grants(macs) == [keys.hub_grant_key("mac-2", NAME)]
        hub.faults.bytes_per_s = None
        done = await pull
        assert (done.code, done.out) == (0, f"mac-2: {NAME} present\n"), done.err
        assert await grants(macs) == []
        assert "s3cret" not in done.err + refused.err


async def test_a_token_of_ones_own_is_taken_for_one_pull_and_is_stored_nowhere(
    macs: Macs, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("hf_0wn")
    token.chmod(0o600)
    async with StandInHub(repos={REPO: tiny_files()}, token="hf_0wn").serve() as hub:
        done = await macs.ctl(
            *("models", "pull", REPO, "--all", "--hub-endpoint", hub.endpoint),
            *("--hub-token-file", str(token)),
        )
    assert done.code == 0, done.err
    assert (macs.names("mac-1"), macs.names("mac-2")) == ([NAME], [NAME])
    assert await grants(macs) == []
    assert (await macs.fleet.store.list(keys.HUB_TOKEN_PREFIX)).items == ()


async def test_a_pull_from_modelscope_brings_the_same_contents_to_each_mac(macs: Macs) -> None:
    async with StandInModelScope(repos={REPO: tiny_files()}).serve() as hub:
        where = ("--source", "modelscope", "--modelscope-endpoint", hub.endpoint)
        done = await macs.ctl("models", "pull", REPO, "--all", *where)
        assert done.code == 0, done.err
        assert macs.names("mac-1") == macs.names("mac-2")
        (name,) = macs.names("mac-1")
        assert name.startswith("mlx-community--Tiny-4bit@")
        before = hub.body_bytes
        again = await macs.ctl("models", "pull", REPO, "--all", "--revision", "v1", *where)
        assert (again.code, hub.body_bytes) == (0, before), "the same contents have the same name"


async def test_the_check_finds_what_is_absent_or_damaged_where_it_is_needed(macs: Macs) -> None:
    macs.add("mac-1")
    await macs.use("mac-1", "mac-2")
    done = await macs.ctl("models", "check")
    assert done.code == 1
    assert done.out.splitlines() == [
        f"mac-1: {NAME}: whole",
        f"mac-2: {NAME}: Missing: it is not on this Mac",
    ]
    path = macs.store("mac-1").root / NAME / "config.json"
    content = path.read_bytes()
    path.resolve().chmod(0o644)
    path.resolve().write_bytes(b"x" * len(content))
    assert (await macs.ctl("models", "check", REPO)).code == 0
    done = await macs.ctl("models", "check", "--hash", "--nodes", "mac-1")
    assert (done.code, "config.json: WrongContent" in done.out) == (1, True)


@pytest.mark.parametrize("name", ["..", "%2e%2e%2fx", "org--m@..", "a--b@0123456789AB", "org/m@1"])
async def test_a_name_that_is_no_folder_of_the_store_is_refused(macs: Macs, name: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{macs.urls['mac-1']}/v1/models/{name}/check") as answer:
            assert answer.status in (400, 404)
        async with session.delete(f"{macs.urls['mac-1']}/v1/models/{NAME}") as answer:
            assert answer.status == 401


def add_source(macs: Macs, *nodes: str) -> None:
    """Put a 16-bit model that mlx-lm reads on these Macs."""
    folder = module("tests.support.tiny_model").make(macs.root / "plain", dtype="bfloat16")
    files = {one.name: one.read_bytes() for one in folder.iterdir()}
    for node in nodes:
        add_model(macs.store(node), REPO, COMMIT, files)


def results(store: ModelStore) -> list[str]:
    return [model.name for model in store.models() if model.repo == RESULT]


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.timeout(120)
async def test_the_mac_with_the_most_memory_makes_it_and_a_repeat_finds_it(macs: Macs) -> None:
    add_source(macs, *MACS)
    macs.memory["mac-2"] *= 2
    done = await macs.ctl(*QUANTIZE, "--bits", "4")
    assert done.code == 0, done.err
    (name,) = results(macs.store("mac-2"))
    assert done.out.startswith(f"mac-2: {name} present\nquality: perplexity ")
    assert (
        f"mac-2 was chosen: of 2 Macs with {NAME} the one with the most available memory"
        in done.err
    )
    assert f"Serve it with `fleetctl run {RESULT}`." in done.err
    assert results(macs.store("mac-1")) == []
    again = await macs.ctl(*QUANTIZE)
    assert (again.code, again.out) == (0, f"mac-2: {name} present\n")
    listed = await macs.ctl("models", "list", RESULT)
    assert listed.out.splitlines()[1].split()[:2] == ["mac-2", name]
    assert "yes" in listed.out  # pinned


@pytest.mark.mlx
@pytest.mark.timeout(120)
async def test_a_job_is_listed_found_again_and_cancelled(macs: Macs) -> None:
    add_source(macs, "mac-1")
    started = await macs.ctl(*QUANTIZE, "--no-wait", "-o", "json")
    assert started.code == 0, started.err
    state = json.loads(started.out)
    assert (state["node"], state["repo"], state["source"]) == ("mac-1", RESULT, NAME)
    assert (state["phase"], state["result"]) in (("Queued", None), ("Converting", None))
    assert "Repeat the command to wait for it; --cancel ends the job." in started.err
    listed = await macs.ctl("models", "list")
    assert f"mac-1: {RESULT} of {NAME}: " in listed.err
    cancelled = await macs.ctl(*QUANTIZE, "--cancel")
    assert (cancelled.code, cancelled.out) == (0, f"mac-1: {RESULT} cancelled\n"), cancelled.err
    none = await macs.ctl(*QUANTIZE, "--cancel")
    assert (none.code, "no Mac that answered makes" in none.err) == (1, True)
    done = await macs.ctl(*QUANTIZE)
    assert (done.code, len(results(macs.store("mac-1")))) == (0, 1), done.err
    again = await macs.ctl(*QUANTIZE, "-o", "json")
    (name,) = results(macs.store("mac-1"))
    state = json.loads(again.out)
    assert (again.code, state["phase"], state["result"]) == (0, "Present", name), again.err


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.timeout(120)
async def test_a_job_that_fails_is_told_with_its_reason(macs: Macs) -> None:
    header = b'{"w": {"dtype": "BF16", "shape": [64, 64], "data_offsets": [0, 8192]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(8192)
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": weights}
    add_model(macs.store("mac-1"), REPO, COMMIT, files)
    done = await macs.ctl(*QUANTIZE)
    assert (done.code, done.out) == (1, "")
    assert "node/mac-1: the converter ended with 2: " in done.err
    done = await macs.ctl(*QUANTIZE, "-o", "json")
    assert (done.code, json.loads(done.out)["phase"]) == (1, "Failed")


@pytest.mark.mlx
async def test_too_little_memory_is_refused_before_anything_is_written(macs: Macs) -> None:
    add_source(macs, "mac-1")
    macs.memory["mac-1"] = 1 << 20
    done = await macs.ctl(*QUANTIZE, "--node", "mac-1")
    assert done.code == 1
    assert "mac-1: InsufficientMemory: " in done.err
    assert list(macs.store("mac-1").fetches.iterdir()) == []
