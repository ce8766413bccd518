"""`fleetctl models fit`: answers from the headers of a repository, a folder or a deployment, with the fleet's own proof."""

import json
from pathlib import Path
from typing import Any

from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec, NodeStatus
from store import codec
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.hub import REPO, StandInHub
from tests.support.hub_repositories import CONFIG, servable_files
from tests.support.model_folders import safetensors
from tests.support.modelscope import StandInModelScope
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.world import deployment

GROUP = (
    "apiVersion: fleet/v1alpha1\nkind: ShardGroup\nmetadata: {name: pair}\n"
    "spec: {members: [{node: mac-1}, {node: mac-2}], parallelism: Tensor}\n"
)


async def joined(fleet: MemoryFleet, name: str, *, is_cordoned: bool = False, **more: Any) -> None:
    address = f"169.254.0.{name[-1]}"
    status: NodeStatus = node_status(name, **more).model_copy(update={"address": address})
    node = Node(
        metadata=ObjectMeta(name=name, uid=f"uid-{name}", generation=1),
        spec=NodeSpec(unschedulable=is_cordoned),
    )
    await fleet.store.commit([], [codec.put_spec(node), put_node(name, status), put_lease(name)])


async def test_a_repository_is_judged_for_each_node_and_group_without_its_weights(
    fleet: MemoryFleet,
) -> None:
    await joined(fleet, "mac-1", memory_gib=2)
    await joined(fleet, "mac-2", memory_gib=2)
    await joined(fleet, "mac-3", memory_gib=0.5)
    await joined(fleet, "mac-4", memory_gib=8, is_cordoned=True)
    await fleet.applied(GROUP)
    before = (await fleet.store.status()).revision
    async with StandInHub(repos={REPO: servable_files()}).serve() as hub:
        words = ("models", "fit", REPO, "--hub-endpoint", hub.endpoint)
        done = await fleet.ctl(*words, "-o", "json")
        assert done.code == 0, done.err
        shown = await fleet.ctl(*words, "--context-length", "4096")
        wide = await fleet.ctl(*words, "-o", "wide")
        assert {
            request.path.rsplit("/", 1)[-1] for request in hub.requests("GET", "/resolve/")
        } == {
            "config.json",
            "model.safetensors",
        }
    assert (await fleet.store.status()).revision == before
    tree = json.loads(done.out)
    nodes = {one["node"]: one for one in tree["nodes"]}
    assert [one["fits"] for one in tree["nodes"]] == [True, True, False, False]
    assert nodes["mac-1"]["longestContext"] == CONFIG["max_position_embeddings"]
    assert nodes["mac-1"]["memory"]["totalBytes"] < 2 << 30
    assert nodes["mac-3"]["refusal"]["reason"] == "InsufficientMemory"
    assert (nodes["mac-3"]["longestContext"], nodes["mac-3"]["highestConcurrency"]) == (0, 0)
    assert nodes["mac-4"]["refusal"]["reason"] == "NodeCordoned"
    (group,) = tree["groups"]
    assert (group["fits"], group["nodes"], group["parallelism"]) == (
        True,
        ["mac-1", "mac-2"],
        "Tensor",
    )
    assert "pair" in shown.out
    assert "is estimated until an agent has inspected it" in shown.out
    assert "ACTIVATIONS" in wide.out


async def test_a_model_of_modelscope_is_judged_before_it_is_fetched() -> None:
    async with StandInModelScope(repos={REPO: servable_files()}).serve() as hub:
        where = ("--source", "modelscope", "--modelscope-endpoint", hub.endpoint)
        done = await run_fleetctl("models", "fit", REPO, *where, "--memory", "8Gi")
    assert done.code == 0, done.err
    read = {
        request.query["FilePath"]
        for request in hub.requests("GET", "/repo")
        if "FilePath" in request.query
    }
    assert read == {"config.json", "model.safetensors"}


async def test_the_limits_are_the_last_loads_that_fit(fleet: MemoryFleet) -> None:
    await joined(fleet, "mac-1", memory_gib=1)
    async with StandInHub(repos={REPO: servable_files()}).serve() as hub:
        words = ("models", "fit", REPO, "--hub-endpoint", hub.endpoint, "-o", "json")

        async def asked(concurrency: int) -> tuple[int, dict[str, Any]]:
            done = await fleet.ctl(*words, "--concurrency", str(concurrency))
            (node,) = json.loads(done.out)["nodes"]
            return done.code, node

        _, first = await asked(1)
        most = first["highestConcurrency"]
        assert 1 < most < 1024
        assert (await asked(most))[0] == 0
        code, beyond = await asked(most + 1)
    assert (code, beyond["fits"]) == (1, False)
    assert 0 < beyond["longestContext"] < CONFIG["max_position_embeddings"]


async def test_a_context_beyond_the_models_own_is_refused(fleet: MemoryFleet) -> None:
    await joined(fleet, "mac-1", memory_gib=8)
    async with StandInHub(repos={REPO: servable_files()}).serve() as hub:
        words = ("models", "fit", REPO, "--hub-endpoint", hub.endpoint)
        done = await fleet.ctl(*words, "--context-length", "8192")
    assert done.code == 1
    assert "ContextTooLong: " in done.out


async def test_a_folder_is_judged_for_macs_without_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    words = ("models", "fit", str(tmp_path), "--memory", "8Gi", "--memory", "64Gi", "-o", "json")
    done = await run_fleetctl(*words)
    assert done.code == 0, done.err
    nodes = json.loads(done.out)["nodes"]
    assert {node["node"]: node["roomBytes"] for node in nodes} == {
        "8Gi": 5 << 30,
        "64Gi": (64 << 30) * 81 // 100,
    }


async def test_a_deployment_is_judged_for_one_more_replica(fleet: MemoryFleet) -> None:
    await joined(fleet, "mac-1", memory_gib=8)
    owner = deployment(name="qwen")
    await fleet.store.commit([], [codec.put_spec(owner)])
    done = await fleet.ctl("models", "fit", "qwen", "-o", "yaml")
    assert done.code == 0, done.err
    assert f"contextLength: {owner.spec.context_length}\n" in done.out
    absent = await fleet.ctl("models", "fit", "qwem")
    assert absent.code == 1
    assert "ORGANISATION/NAME" in absent.err


async def test_a_model_of_the_list_is_judged_offline_in_the_order_asked() -> None:
    words = ("models", "fit", "mlx-community/Qwen3-8B-4bit", "--hub-endpoint", "http://127.0.0.1:1")
    done = await run_fleetctl(*words, "--memory", "16Gi", "--memory", "512Gi", "-o", "json")
    assert done.code == 0, done.err
    assert "The list of `fleetctl models search` answers" in done.err
    assert [load["node"] for load in json.loads(done.out)["nodes"]] == ["16Gi", "512Gi"]
    unlisted = await run_fleetctl("models", "fit", "a/B", *words[3:], "--memory", "16Gi")
    assert (unlisted.code, "SourceUnreachable" in unlisted.err) == (1, True)
    sold = await run_fleetctl(*words, "--memory", "16GB")
    assert "'16GB' is not a quantity; write 16G or 16Gi (a Mac sold with 16GB has 16Gi)" in sold.err


async def test_without_a_model_the_catalogue_is_listed_for_sizes_of_macs() -> None:
    words = ("models", "fit", "--memory", "16Gi", "--memory", "512Gi")
    done = await run_fleetctl(*words, "-o", "json")
    assert done.code == 0, done.err
    models = {model["name"]: model["macs"] for model in json.loads(done.out)["models"]}
    assert len(models) >= 60
    small, large = models["gpt-oss-120b"]
    assert (small["fits"], large["fits"]) == (False, True)
    assert small["refusal"]["reason"] == "InsufficientMemory"
    assert large["tokensPerSecond"][0] > 50
    shown = await run_fleetctl(*words, "-o", "wide")
    assert "REPOSITORY" in shown.out
    assert "mlx-community/gpt-oss-120b-MXFP4-Q8\n" in shown.out
    assert "BAAI/bge-m3 (convert)\n" in shown.out
    assert (await run_fleetctl("models", "fit", "--memory", "1Gi")).code == 1


async def test_the_catalogue_is_listed_for_the_kinds_of_macs_of_a_fleet(fleet: MemoryFleet) -> None:
    assert "no Mac has joined" in (await fleet.ctl("models", "fit")).err
    await joined(fleet, "mac-1", memory_gib=32)
    await joined(fleet, "mac-2", memory_gib=32)
    # Memory of a virtual machine, in the unit and the value of the page.
    status = node_status("vm-3", memory_gib=16)
    vm = status.model_copy(update={"memory_bytes": int(23.6 * 2**30)})
    await fleet.store.commit([], [put_node("vm-3", vm), put_lease("vm-3")])
    done = await fleet.ctl("models", "fit")
    assert done.code == 0, done.err
    assert "2 x " in done.out.splitlines()[2]
    assert done.out.splitlines()[2].endswith(" vm-3 24 GiB")
    assert "Qwen3-8B " in done.out


async def test_a_search_lists_what_fits_in_a_size_of_memory() -> None:
    async def sizes(*words: str) -> set[tuple[str, int]]:
        done = await run_fleetctl("models", "search", "qwen3.5", *words, "-o", "json")
        assert done.code == 0, done.err
        return {(model["repo"], model["bits"]) for model in json.loads(done.out)["models"]}

    small, all_models = await sizes("--memory", "24Gi"), await sizes()
    assert ("mlx-community/Qwen3.5-9B-8bit", 8) in small
    assert ("mlx-community/Qwen3.5-397B-A17B-4bit", 4) in all_models - small
    done = await run_fleetctl("models", "search", "--memory", "24")
    assert (done.code, "write a unit" in done.err) == (2, True)
    done = await run_fleetctl("models", "search", "405b", "--memory", "24Gi")
    assert "no model of the list has 405b and fits in 24Gi" in done.err
