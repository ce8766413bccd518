"""Models of a hub that move on a fleet of real processes: the files come first, then the replica, then its requests."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from identity.names import Role
from schemas.trust import TlsMode
from tests.support.fleet import Fleet, model_deployment
from tests.support.fleet_load import hub_fleet, replicas, under_load
from tests.support.hub import COMMIT, StandInHub
from tests.support.identities import TestAuthority
from tests.support.waiting import until

pytestmark = [pytest.mark.fleet, pytest.mark.full, pytest.mark.timeout(300)]

REPO = "mlx-community/Tiny-Test-4bit"
MIB = 1 << 20
# Nothing reads it; it makes the download long enough to look at the fleet meanwhile.
BALLAST = "ballast.txt"
DEPLOYMENT: dict[str, object] = {
    "model": {"hub": {"repo": REPO}},
    "contextLength": 256,
    "concurrency": 2,
}


@asynccontextmanager
async def macs(
    root: Path, model: Path, *names: str, trusted: bool = False
) -> AsyncIterator[tuple[Fleet, StandInHub]]:
    """Run a fleet whose Macs have disks of their own, and a hub; if `trusted`, agents have identities."""
    authority = TestAuthority(root / "ids")
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    hub = StandInHub(repos={REPO: files | {BALLAST: random.Random(1).randbytes(16 * MIB)}})
    agents = {name: ["--models-dir", str(root / name)] for name in names}
    for name in names:
        (root / name).mkdir()
        if trusted:
            identity = authority.issue(Role.NODE, name)
            identity.write_trust(authority.snapshot(mode=TlsMode.PERMISSIVE))
            agents[name] += ["--identity-dir", str(identity.path)]
    async with hub_fleet(root, hub, agents) as fleet:
        yield fleet, hub


def folder(root: Path, node: str, commit: str = COMMIT) -> Path:
    """Return the folder that appears when all files are on the node's disk."""
    return root / node / f"mlx-community--Tiny-Test-4bit@{commit[:12]}"


async def endpoint_gaps(fleet: Fleet, until_exists: Path) -> int:
    """Return how often no engine was published, until the folder exists."""
    looks, gaps = 0, 0
    while not await asyncio.to_thread(until_exists.exists):
        gaps += not await fleet.endpoints()
        looks += 1
        await asyncio.sleep(0.1)
    assert looks > 10, "the fetch was over at once, so that nothing was shown"
    return gaps


async def nodes_of(fleet: Fleet) -> list[str]:
    return sorted((await replicas(fleet)).values())


async def test_a_drain_switches_requests_only_when_the_new_replica_has_fetched_and_loaded(
    tmp_path: Path, models_dir: Path
) -> None:
    async with macs(tmp_path, models_dir / "tiny", "node-1", "node-2") as (fleet, hub):
        await fleet.applied(model_deployment(**DEPLOYMENT))
        await fleet.available("tiny", limit_s=120)
        (first,) = await nodes_of(fleet)
        other = "node-2" if first == "node-1" else "node-1"
        assert not folder(tmp_path, other).exists()
        await fleet.routed("tiny", 1)
        hub.faults.bytes_per_s = 2 * MIB
        async with under_load(fleet) as asked, asyncio.TaskGroup() as group:
            gaps = group.create_task(endpoint_gaps(fleet, folder(tmp_path, other)))
            early = await fleet.ctl("drain", first, "--timeout=2s")
            assert (
                f"its replacement is not ready yet: 1 of 1 replicas of modeldeployment/tiny are ready; tiny-1 on {other}: "
                in early.err
            )
            drained = await fleet.ctl("drain", first, "--timeout=120s", limit_s=150)
            assert drained.code == 0, drained.err + fleet.words()
            assert await gaps == 0, "the old replica serves until the new one can"
            assert await nodes_of(fleet) == [other]
            answered = len(asked)
            await until(lambda: len(asked) > answered + 8, what="answers of the new replica")


async def cached_tokens(fleet: Fleet, prompt: str) -> int:
    """Ask for one token, and return how much of the prompt was in the engine's cache."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{fleet.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


async def test_the_first_request_of_a_moved_replica_finds_its_prompt_in_the_cache(
    tmp_path: Path, models_dir: Path
) -> None:
    prompt = "the code of the safe is 7 4 1 9 2 5 " * 8
    async with macs(tmp_path, models_dir / "tiny", "node-1", "node-2", trusted=True) as (fleet, _):
        await fleet.applied(model_deployment(**DEPLOYMENT | {"contextLength": 1024}))
        await fleet.available("tiny", limit_s=120)
        (first,) = await nodes_of(fleet)
        await fleet.routed("tiny", 1)
        assert await cached_tokens(fleet, prompt) == 0
        drained = await fleet.ctl("drain", first, "--timeout=120s", limit_s=150)
        assert drained.code == 0, drained.err + fleet.words()
        assert first not in await nodes_of(fleet)
        await fleet.routed("tiny", 1)
        assert await cached_tokens(fleet, prompt) >= 64, fleet.words()


async def test_preloaded_files_wait_without_an_engine_and_make_a_drain_independent_of_the_hub(
    tmp_path: Path, models_dir: Path
) -> None:
    async with macs(tmp_path, models_dir / "tiny", "node-1", "node-2") as (fleet, hub):
        await fleet.applied(model_deployment(**DEPLOYMENT, preload={"nodes": 2}))
        await fleet.available("tiny", limit_s=120)
        (first,) = await nodes_of(fleet)
        other = "node-2" if first == "node-1" else "node-1"
        done = await fleet.ctl(
            "wait", "--for=condition=Preloaded", "md/tiny", "--timeout=90s", limit_s=100
        )
        described = await fleet.ctl("describe", "md/tiny")
        assert done.code == 0, done.err + described.out + fleet.words()
        assert "2 of 2 nodes have the files" in described.out
        assert folder(tmp_path, other).is_dir()
        assert fleet.engine_pids(other) == set()
        listed = await fleet.ctl("models", "list")
        assert listed.out.count("preload/tiny") == 2, listed.out + listed.err

        hub.faults.status, hub.faults.failures = 503, 1_000_000
        await fleet.routed("tiny", 1)
        async with under_load(fleet):
            drained = await fleet.ctl("drain", first, "--timeout=60s", limit_s=90)
            assert drained.code == 0, drained.err + fleet.words()
            assert await nodes_of(fleet) == [other]
