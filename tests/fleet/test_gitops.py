"""Real reconcilers follow a repository: one is killed in the middle of an apply, and the next one goes on."""

from pathlib import Path

import pytest

from manifests import apply_sets
from schemas.meta import APPLY_SET
from schemas.pools import NodePool
from store import keys, objects
from store.etcd.connect import connect
from store.port import Transport
from tests.support.fleet import Fleet
from tests.support.gitrepo import Repository, pool
from tests.support.reconciler_gitops import ready, source
from tests.support.waiting import until_async

pytestmark = [pytest.mark.full, pytest.mark.etcd]

# Six transactions: between the first and the last there is time to die.
_POOLS = 600


def reconciler(fleet: Fleet, name: str) -> None:
    """Start a reconciler with folders of its own, as on another Mac."""
    folders = ("--git-dir", str(fleet.root / name / "git"))
    fleet.start(name, "reconciler", *folders, "--git-credentials", str(fleet.root / name))


async def test_a_leader_is_killed_in_the_middle_of_an_apply(tmp_path: Path) -> None:
    repo = Repository(tmp_path / "r.git")
    text = "---\n".join(pool(f"p{number}") for number in range(_POOLS))
    first = repo.commit({"pools.yaml": text})
    fleet = Fleet(tmp_path / "fleet", tmp_path / "models")
    await fleet.etcd.start()
    store = connect(fleet.etcd.address)
    try:
        reconciler(fleet, "one")
        await until_async(lambda: _leads(store), what="a leader")
        reconciler(fleet, "two")
        await fleet.applied(source("fleet", repo.url, "  prune: true\n"))
        await until_async(lambda: _begun(store), what="the first objects", every_s=0.005)
        fleet.kill("one")
        await fleet.ended("one")
        status = await ready(store, "fleet", first)
        assert len(status.inventory) == _POOLS
        assert len(await _applied(store)) == _POOLS
        # What the killed one had begun is remembered by the set: nothing of it is missed by a prune.
        second = repo.commit({"pools.yaml": pool("p0")})
        done = await fleet.ctl("sync", "fleet")
        assert done.code == 0, done.err + fleet.words()
        await ready(store, "fleet", second)
        assert await _applied(store) == ["p0"]
        held = await apply_sets.read_set(store, "gitsource.fleet")
        assert [key.name for key in held.members] == ["p0"]
    finally:
        await store.close()
        await fleet.stop()


async def _leads(store: Transport) -> bool:
    return await store.get(keys.ELECTION_RECONCILER) is not None


async def _begun(store: Transport) -> bool:
    return bool((await store.list(keys.spec_prefix("NodePool"))).items)


async def _applied(store: Transport) -> list[str]:
    """Return the pools of the source."""
    node_pools = await objects.list_all(store, NodePool)
    return [
        o.name for o in node_pools if o.metadata.annotations.get(APPLY_SET) == "gitsource.fleet"
    ]
