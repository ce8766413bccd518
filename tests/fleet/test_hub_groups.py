"""Models of a hub on a group of real agents and ranks: each Mac fetches what its rank needs, and the ranks wait for each other."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from models.model_files import PARTIAL_MARK
from schemas.meta import find_condition
from tests.seeds import literals
from tests.support.commands import run_module
from tests.support.fleet import Fleet, model_deployment
from tests.support.fleet_load import hub_fleet
from tests.support.hub import COMMIT, StandInHub
from tests.support.shards import Group, ask, group_of, ranks_of
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.fleet, pytest.mark.full, pytest.mark.mlx, pytest.mark.timeout(400)]

REPO = "mlx-community/Several-Files"
FOLDER = f"mlx-community--Several-Files@{COMMIT[:12]}"
NODES = ("node-1", "node-2")
MIB = 1 << 20
GROUP = """
apiVersion: fleet/v1alpha1
kind: ShardGroup
metadata: {{name: pair}}
spec:
  members: [{{node: node-1}}, {{node: node-2}}]
  parallelism: {parallelism}
---
"""
SIZE: dict[str, object] = {"contextLength": 512, "concurrency": 2}
SHARDED = model_deployment("big", model={"hub": {"repo": REPO}}, sharding="pair", **SIZE)


def chat(model: str) -> dict[str, object]:
    """Return a question whose answer is always the same."""
    messages = [{"role": "user", "content": "we hold these truths"}]
    return {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of six layers in seven weight files."""
    folder = tmp_path_factory.mktemp("models") / "several"
    flags = ("--arch", "qwen2", "--layers", "6", "--files", "7", "--endless")
    await run_module("tests.support.tiny_model", str(folder), *flags)
    return folder


def models_of(root: Path, node: str) -> Path:
    return root / f"models-{node}"


@asynccontextmanager
async def two_agents(
    root: Path,
    model: Path,
    *,
    repo: str = REPO,
    ballast: int = 0,
    flags: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> AsyncIterator[tuple[Fleet, StandInHub]]:
    """Run two agents, each with a disk of its own, and a hub that has the model; `flags` are those of a node."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    if ballast:
        files["ballast.txt"] = bytes(ballast)
    hub = StandInHub(repos={repo: files})
    agents = {
        node: ("--models-dir", str(models_of(root, node)), *flags.get(node, ())) for node in NODES
    }
    async with hub_fleet(root, hub, agents) as fleet:
        yield fleet, hub


def weights(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("model*.safetensors")}


async def reasons(group: Group) -> list[str]:
    """Return the reason of Ready of each rank, in any order."""
    conditions = [find_condition(report.conditions, "Ready") for report in await group.reports()]
    return sorted(condition.reason for condition in conditions if condition is not None)


async def test_each_rank_of_a_pipeline_fetches_its_layers_and_answers_as_the_whole(
    tmp_path: Path, model: Path
) -> None:
    async with two_agents(tmp_path, model) as (fleet, hub):
        (models_of(tmp_path, "node-1")).mkdir(exist_ok=True)
        (models_of(tmp_path, "node-1") / "whole").symlink_to(model)
        await fleet.applied(model_deployment("alone", model={"path": "whole"}, **SIZE))
        await fleet.available("alone", limit_s=120)
        await fleet.routed("alone", 1)
        wanted = await ask(fleet, [chat("alone")])
        await fleet.ctl("delete", "modeldeployment/alone")

        await fleet.applied(GROUP.format(parallelism="Pipeline") + SHARDED)
        async with group_of(fleet, "big") as group:
            replica = await group.serving()
            assert await ask(fleet, [chat("big")]) == wanted
            held = [weights(models_of(tmp_path, rank.node) / FOLDER) for rank in replica.spec.ranks]
        every = weights(model)
        assert all(one < every for one in held), held
        assert held[0] | held[1] == every
        # What both ranks need: the tensors outside of layers, and a file with parts of two layers.
        assert len(held[0] & held[1]) <= 2, held
        asked = [Path(request.path).name for request in hub.requests("GET", "/model-")]
        assert Counter(asked) == Counter(every) + Counter(held[0]) + Counter(held[1])
        for node in NODES:
            assert (models_of(tmp_path, node) / FOLDER / PARTIAL_MARK).is_file()
        listed = await fleet.ctl("models", "list")
        assert listed.out.count(" KiB of ") == 2, listed.out
        checked = await fleet.ctl("models", "check", "--hash")
        assert checked.code == 0, checked.out + checked.err
        assert checked.out.count("sound, without") == 2, checked.out

        # Another deployment needs all of it: only the rest is fetched.
        hub.seen.clear()
        await fleet.applied(model_deployment("alone", model={"hub": {"repo": REPO}}, **SIZE))
        await fleet.available("alone", limit_s=120)
        await fleet.routed("alone", 1)
        assert await ask(fleet, [chat("alone")]) == wanted
        (whole,) = (n for n in NODES if weights(models_of(tmp_path, n) / FOLDER) == every)
        rest = every - held[[rank.node for rank in replica.spec.ranks].index(whole)]
        # The leader reads the header of each file for the deployment's memory proof.
        asked = [Path(request.path).name for request in hub.requests("GET", "/model-")]
        assert Counter(asked) == Counter(every) + Counter(rest)
        assert not (models_of(tmp_path, whole) / FOLDER / PARTIAL_MARK).exists()


async def test_ranks_wait_for_each_others_files_over_kills_of_their_agents(
    tmp_path: Path, model: Path
) -> None:
    ballast = 24 * MIB
    async with two_agents(tmp_path, model, ballast=ballast) as (fleet, hub):
        first = models_of(tmp_path, "node-1")
        pulled = await fleet.ctl(
            *("models", "pull", REPO, "--to", "local", "--models-dir", str(first)),
            *("--hub-endpoint", hub.endpoint),
            limit_s=60,
        )
        assert pulled.code == 0, pulled.err
        hub.faults.bytes_per_s = 4 * MIB
        await fleet.applied(GROUP.format(parallelism="Tensor") + SHARDED)
        async with group_of(fleet, "big") as group:

            async def is_waiting() -> bool:
                return await reasons(group) == ["Downloading", "WaitingForFiles"]

            await until_async(is_waiting, limit_s=90, what="one rank that waits for the other")
            replica = await group.replica()
            assert replica is not None
            assert replica.spec.formation is not None
            assert replica.spec.formation.awaits_files
            told = await group.told()
            assert "node-2" in told.partition("Model fetches")[2], told
            before = hub.body_bytes
            await until(lambda: hub.body_bytes > before + 8 * MIB, limit_s=60, what="bytes")
            assert ranks_of(fleet) == []
            for node in NODES:
                fleet.kill(node)
                await fleet.ended(node)
            hub.faults.bytes_per_s = None
            for node in NODES:
                fleet.restart(node)
            served = await group.serving()
            assert served.spec.formation is not None
            assert not served.spec.formation.awaits_files
            assert served.spec.formation.failures == 0
            assert len((await ask(fleet, [chat("big")]))[0]) > 0
            assert weights(models_of(tmp_path, "node-2") / FOLDER) == weights(model)
            assert not (first / FOLDER / PARTIAL_MARK).exists()


async def test_the_ring_of_localais_page_answers_after_its_import(tmp_path: Path) -> None:
    """The literal files, with addresses of this machine for those of the page; a llama, which has no pipeline."""
    model = tmp_path / "llama"
    await run_module("tests.support.tiny_model", str(model), "--arch", "llama", "--endless")
    addresses = {"node-1": "127.0.0.1", "node-2": "127.0.0.2"}
    repo = "mlx-community/Llama-3.2-1B-Instruct-4bit"
    hosts = literals.LOCALAI_RING_HOSTS.text
    for page, ours in zip(("192.168.1.10", "192.168.1.11"), addresses.values(), strict=True):
        hosts = hosts.replace(page, ours)
    (tmp_path / "hosts.json").write_text(hosts)
    (tmp_path / "ring.yaml").write_text(literals.LOCALAI_RING.text)
    (tmp_path / "quick.yaml").write_text(literals.LOCALAI_QUICK_START.text)
    flags = {node: ("--address", address) for node, address in addresses.items()}
    async with two_agents(tmp_path, model, repo=repo, flags=flags) as (fleet, _):
        for name, words in (("quick", ()), ("ring", ("--hostfile", str(tmp_path / "hosts.json")))):
            done = await fleet.ctl("import", "localai", str(tmp_path / f"{name}.yaml"), *words)
            assert done.code == 0, done.err
            await fleet.applied(done.out)
            if name == "ring":
                async with group_of(fleet, "llama-distributed") as group:
                    replica = await group.serving()
                assert [rank.node for rank in replica.spec.ranks] == list(addresses)
            await fleet.available("llama-distributed", limit_s=120)
            await fleet.routed("llama-distributed", 1)
            assert len((await ask(fleet, [chat("llama-distributed")]))[0]) > 0
