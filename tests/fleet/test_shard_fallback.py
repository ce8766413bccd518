"""A model on three Macs that lose one for good, and whose files are broken: what is tried, and when it ends."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.commands import run_module
from tests.support.fleet import Fleet, running_fleet
from tests.support.shards import Group, asking, group_of, nothing_runs

pytestmark = [pytest.mark.fleet, pytest.mark.mlx, pytest.mark.timeout(600)]

MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ShardGroup
metadata: {name: trio}
spec:
  members: [{node: node-1}, {node: node-2}, {node: node-3}]
  fallbacks: [{size: 2}]
---
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: big}
spec:
  model: {path: tiny}
  sharding: trio
  contextLength: 512
"""


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    root = tmp_path_factory.mktemp("fallback")
    # Six heads: 2 and 3 ranks can share them.
    words = ("--arch", "llama", "--heads", "6", "--kv-heads", "6", "--hidden", "96", "--endless")
    await run_module("tests.support.tiny_model", str(root / "models" / "tiny"), *words)
    async with running_fleet(root / "fleet", root / "models", nodes=3, grace_s=3.0) as found:
        yield found


async def test_a_trio_falls_back_and_gives_up(fleet: Fleet) -> None:
    await fleet.applied(MANIFEST)
    async with group_of(fleet, "big") as group:
        replica = await group.serving()
        assert [rank.node for rank in replica.spec.ranks] == ["node-1", "node-2", "node-3"]
        wanted = await answer(group)
        await mac_lost(group, wanted)
        tokenizer = fleet.models_dir / "tiny" / "tokenizer.json"
        whole = tokenizer.read_text()
        await files_broken(group, tokenizer)
        await files_mended(group, tokenizer, whole, wanted)
        done = await fleet.ctl("delete", "modeldeployment/big", "shardgroup/trio")
        assert done.code == 0, done.err
        await nothing_runs(fleet)


async def answer(group: Group) -> str | None:
    async with asking(group.fleet) as client:
        whole = await client.chat.completions.create(
            model=group.name,
            messages=[{"role": "user", "content": "we hold"}],
            max_tokens=16,
            temperature=0,
        )
    return whole.choices[0].message.content


async def mac_lost(group: Group, wanted: str | None) -> None:
    """No power on one Mac, and no spare: two go on as the fallback says, with the same answer."""
    epoch = await group.epoch()
    group.fleet.kill("node-2")
    assert group.fleet.kill_engines("node-2") == 1
    replica = await group.serving(after=epoch)
    assert replica.spec.formation is not None
    assert replica.spec.formation.fallback == 1
    assert [rank.node for rank in replica.spec.ranks] == ["node-1", "node-3"]
    assert await answer(group) == wanted


async def files_broken(group: Group, tokenizer: Path) -> None:
    """Every further start fails: three in a row are enough, and a person is told why."""
    tokenizer.write_text("{}")
    before = await group.epoch()
    os.kill(group.rank(1).pid, signal.SIGKILL)
    await group.tells("CrashLooping", "3 times in a row", "fleetctl rollout restart")
    await nothing_runs(group.fleet)
    assert await group.epoch() == before + 2


async def files_mended(group: Group, tokenizer: Path, whole: str, wanted: str | None) -> None:
    """A person mends it and says so."""
    tokenizer.write_text(whole)
    done = await group.fleet.ctl("rollout", "restart", "modeldeployment/big")
    assert done.code == 0, done.err
    await group.serving()
    assert await answer(group) == wanted
