"""A model that nobody declared, on a fleet of real processes: asked for by name, fetched from a hub, loaded, answered, unloaded."""

import json
from pathlib import Path

import aiohttp
import pytest

from schemas.modelpolicy import on_demand_name
from tests.support.fleet_load import hub_fleet
from tests.support.hub import StandInHub
from tests.support.waiting import until_async

pytestmark = [pytest.mark.fleet, pytest.mark.ci, pytest.mark.timeout(400)]

CHAT_REPO, PULL_REPO = "mlx-community/Tiny-Chat-4bit", "mlx-community/Tiny-Pull-4bit"
CARD = b"---\nlicense: mit\n---\n# Tiny\n"
POLICY = json.dumps(
    {
        "apiVersion": "fleet/v1alpha1",
        "kind": "ModelPolicy",
        "metadata": {"name": "community"},
        "spec": {
            "onDemand": {
                "owners": ["mlx-community"],
                "licenses": ["mit"],
                "maxSize": "1Gi",
                "maxTotalSize": "4Gi",
                "contextLength": 256,
            }
        },
    }
)


async def test_a_model_is_asked_for_by_name_and_unloaded(tmp_path: Path, models_dir: Path) -> None:
    tiny = {p.name: p.read_bytes() for p in (models_dir / "tiny").iterdir() if p.is_file()}
    files = {**tiny, "README.md": CARD}
    hub = StandInHub(repos={CHAT_REPO: files, PULL_REPO: files})
    folder = tmp_path / "node-1"
    folder.mkdir()
    agents = {"node-1": ("--models-dir", str(folder))}
    async with hub_fleet(tmp_path, hub, agents) as fleet, aiohttp.ClientSession() as http:
        await fleet.applied(POLICY)

        async def chat() -> int:
            messages = [{"role": "user", "content": "hello"}]
            body = {"model": CHAT_REPO, "messages": messages, "max_tokens": 4}
            async with http.post(f"{fleet.url}/v1/chat/completions", json=body) as response:
                return response.status

        async def is_served() -> bool:
            return await chat() == 200  # the gateway may not have read the policy yet

        await until_async(is_served, limit_s=150, what="an answer of the model")
        name = on_demand_name(CHAT_REPO)
        shown = await fleet.ctl("get", "md", name, "-o", "json")
        assert json.loads(shown.out)["metadata"]["labels"] == {"fleet/on-demand": "community"}

        async with http.post(f"{fleet.url}/api/pull", json={"model": f"hf.co/{PULL_REPO}"}) as pull:
            lines = [json.loads(line) for line in (await pull.text()).splitlines()]
        assert lines[0]["status"] == f"pulling {PULL_REPO}"
        assert lines[-1] == {"status": "success"}, lines

        async with http.get(f"{fleet.url}/running") as response:
            running = {model["model"] for model in (await response.json())["running"]}
        assert {CHAT_REPO, PULL_REPO} <= running
        async with http.post(
            f"{fleet.url}/api/v1/models/unload", json={"instance_id": CHAT_REPO}
        ) as response:
            assert (response.status, await response.json()) == (200, {"instance_id": CHAT_REPO})

        async def is_unloaded() -> bool:
            return f"{name}-0" not in await fleet.endpoints()

        await until_async(is_unloaded, limit_s=60, what="the end of the replica")
        async with http.post(f"{fleet.url}/api/pull", json={"model": "nobody/model"}) as refused:
            assert refused.status == 404
            assert "Allowed owners are mlx-community" in (await refused.json())["error"]
        gone = {"model": "mlx-community/Gone"}
        async with http.post(f"{fleet.url}/api/pull", json=gone) as refused:
            assert "ModelPolicy community" in await refused.text()
        shown = await fleet.ctl("describe", "mp", "community")
        assert "mlx-community/Gone" in shown.out.partition("Refused")[2], shown.out
        shown = await fleet.ctl("get", "modelpolicies")
        assert shown.out.splitlines()[1].split()[:4] == [
            *("community", "mlx-community", "2", "mlx-community/Gone")
        ]
