"""GitSources from end to end: real repositories on the disk, the real fetching process, a real etcd, a leader."""

from pathlib import Path

import pytest

from manifests.delete import delete
from schemas.deployment import ModelDeployment
from schemas.meta import APPLY_SET, find_condition
from schemas.pools import NodePool
from store import keys, objects
from store.mutate import mutate
from store.port import Transport
from tests.support.gitrepo import Repository, deployment, pool
from tests.support.reconciler_gitops import CLOCK, applied, gone, ready, said, source, status
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.usefixtures("leader")]


async def priority(store: Transport, name: str) -> int | None:
    found = await objects.get(store, NodePool, name)
    return None if found is None else found.spec.priority


async def test_a_commit_converges_and_then_nothing_is_written(
    store: Transport, folder: Path
) -> None:
    repo = Repository(folder / "a.git")
    both = pool("a1") + "---\n" + deployment("a-qwen")
    first = repo.commit({"sites/a.yaml": both, "README.md": "x", ".ci/x.yaml": "no: manifest"})
    await applied(store, source("a", repo.url, "  path: sites\n"))
    found = await ready(store, "a", first)
    assert found.applied_revision == found.observed_revision == f"main@{first}"
    assert [(one.kind, one.name) for one in found.inventory] == [
        ("ModelDeployment", "a-qwen"),
        ("NodePool", "a1"),
    ]
    condition = find_condition(found.conditions, "Ready")
    assert condition is not None
    assert condition.message == f"main@{first} is applied: 2 objects"
    made = await objects.get(store, ModelDeployment, "a-qwen")
    assert made is not None
    assert made.metadata.annotations[APPLY_SET] == "gitsource.a"
    second = repo.commit({"sites/a.yaml": pool("a1") + "---\n" + deployment("a-qwen", replicas=3)})
    await ready(store, "a", second)
    made = await objects.get(store, ModelDeployment, "a-qwen")
    assert made is not None
    assert made.spec.replicas == 3
    before = await _written(store)
    third = repo.commit({"README.md": "nothing of ours"})
    await ready(store, "a", third)
    assert await _written(store) == before


async def _written(store: Transport) -> list[int]:
    """Return the versions of what source a applied."""
    kinds = (("ModelDeployment", "a-qwen"), ("NodePool", "a1"))
    found = [await store.get(keys.spec_key(*one)) for one in kinds]
    return [item.mod_revision for item in found if item is not None]


async def test_a_broken_commit_changes_nothing_and_says_where(
    store: Transport, folder: Path
) -> None:
    repo = Repository(folder / "b.git")
    good = repo.commit({"b.yaml": pool("b1", priority=1)})
    await applied(store, source("b", repo.url))
    await ready(store, "b", good)
    broken = {"b.yaml": pool("b1", priority=2), "more.yaml": pool("b2").replace("priority", "prio")}
    bad = repo.commit(broken)
    stalled = await said(store, "b", "Stalled", reason="BrokenManifests", commit=bad)
    assert stalled.message == (
        "more.yaml:8:3: NodePool/b2: spec.prio: unknown field. Did you mean priority? "
        f"main@{good} stays applied"
    )
    now = await status(store, "b")
    assert now is not None
    assert now.applied_revision == f"main@{good}"
    assert await priority(store, "b1") == 1
    # What was applied before is kept meanwhile.
    await mutate(store, CLOCK, NodePool, "b1", lambda one: _with_priority(one, 7))
    await _becomes(store, "b1", 1)
    worse = repo.commit({"more.yaml": "a: [b"})
    stalled = await said(store, "b", "Stalled", reason="BrokenManifests", commit=worse)
    assert stalled.message.startswith("more.yaml:1:6: is not YAML: ")
    mended = repo.commit({"more.yaml": None})
    await ready(store, "b", mended)
    assert await priority(store, "b1") == 2


def _with_priority(one: NodePool, number: int) -> NodePool:
    """Return the pool as somebody who keeps no record would change it."""
    metadata = one.metadata.model_copy(update={"generation": one.metadata.generation + 1})
    spec = one.spec.model_copy(update={"priority": number})
    return one.model_copy(update={"spec": spec, "metadata": metadata})


async def _becomes(store: Transport, name: str, number: int) -> None:
    async def look() -> bool:
        return await priority(store, name) == number

    await until_async(look, limit_s=40.0, what=f"priority {number} of {name}")


async def test_a_force_push_is_followed(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "c.git")
    repo.commit({"c.yaml": pool("c1", priority=1)})
    first = repo.commit({"c.yaml": pool("c1", priority=2)})
    await applied(store, source("c", repo.url))
    await ready(store, "c", first)
    other = repo.commit({"c.yaml": pool("c1", priority=3)}, parents=False, clock=5)
    await ready(store, "c", other)
    assert await priority(store, "c1") == 3


async def test_what_is_removed_is_pruned_if_asked(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "d.git")
    first = repo.commit({"d1.yaml": pool("d1"), "d2.yaml": pool("d2"), "d3.yaml": pool("d3")})
    await applied(store, source("d", repo.url))
    await ready(store, "d", first)
    second = repo.commit({"d2.yaml": None})
    found = await ready(store, "d", second)
    assert [one.name for one in found.inventory] == ["d1", "d3"]
    assert await priority(store, "d2") == 0
    await applied(store, source("d", repo.url, "  prune: true\n"))
    await gone(store, NodePool, "d2")
    third = repo.commit({"d3.yaml": None})
    await ready(store, "d", third)
    assert await priority(store, "d3") is None
    assert await priority(store, "d1") == 0
    # A folder without manifests is a mistake, and prunes nothing.
    empty = repo.commit({"d1.yaml": None, "README.md": "x"})
    await said(store, "d", "Stalled", reason="PathNotFound", commit=empty)
    assert await priority(store, "d1") == 0


async def test_two_sources_cannot_have_one_object(store: Transport, folder: Path) -> None:
    one, two = Repository(folder / "e1.git"), Repository(folder / "e2.git")
    first = one.commit({"e.yaml": pool("e", priority=1)})
    second = two.commit({"x.yaml": pool("e-other"), "e.yaml": pool("e", priority=2)})
    await applied(store, source("e1", one.url))
    await ready(store, "e1", first)
    await applied(store, source("e2", two.url, "  force: true\n"))
    stalled = await said(store, "e2", "Stalled", reason="Refused", commit=second)
    assert "e.yaml:4:9: NodePool/e: metadata.name: belongs to the apply set gitsource.e1" in (
        stalled.message
    )
    assert await priority(store, "e") == 1
    assert await priority(store, "e-other") is None  # all, or nothing


async def test_a_source_that_is_away_for_a_while(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "f.git")
    first = repo.commit({"f.yaml": pool("f", priority=1)})
    await applied(store, source("f", repo.url))
    await ready(store, "f", first)
    repo.path.rename(folder / "elsewhere")
    away = await said(store, "f", "Ready", reason="RepositoryNotFound")
    assert away.message.endswith(f"main@{first} stays applied")
    # What was applied is kept meanwhile.
    await mutate(store, CLOCK, NodePool, "f", lambda one: _with_priority(one, 7))
    await _becomes(store, "f", 1)
    (folder / "elsewhere").rename(repo.path)
    second = repo.commit({"f.yaml": pool("f", priority=2)})
    await ready(store, "f", second)
    assert await priority(store, "f") == 2


async def test_pinned_commits_and_tags(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "g.git")
    first = repo.commit({"g.yaml": pool("g", priority=1)})
    repo.tag("v1", first, annotated=True)
    second = repo.commit({"g.yaml": pool("g", priority=2)})
    await applied(store, source("g", repo.url, "  reference: {tag: v1}\n"))
    found = await ready(store, "g", first)
    assert found.applied_revision == f"v1@{first}"
    await applied(store, source("g", repo.url, f"  reference: {{commit: {second}}}\n"))
    found = await ready(store, "g", second)
    assert found.applied_revision == second
    await applied(store, source("g", repo.url, "  reference: {branch: mian}\n"))
    missing = await said(store, "g", "Stalled", reason="ReferenceNotFound")
    assert f"{repo.url} has no branch mian. Did you mean main?" in missing.message


async def test_a_site_is_an_overlay(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "h.git")
    overlay = "apiVersion: fleet/v1alpha1\nkind: Overlay\nbase: [../../base]\n"
    patch = (
        "apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata:\n  name: h\nspec:\n  priority: 9\n"
    )
    files = {"base/h.yaml": pool("h"), "sites/berlin/overlay.yaml": overlay}
    first = repo.commit({**files, "sites/berlin/h.yaml": patch})
    await applied(store, source("h", repo.url, "  path: sites/berlin\n"))
    await ready(store, "h", first)
    assert await priority(store, "h") == 9
    bad = repo.commit({"sites/berlin/h.yaml": patch.replace("9", "900")})
    stalled = await said(store, "h", "Stalled", reason="BrokenManifests", commit=bad)
    assert stalled.message.startswith("sites/berlin/h.yaml:6:13: NodePool/h: spec.priority: ")
    out = repo.commit({"sites/berlin/overlay.yaml": overlay.replace("../../", "../../../../")})
    stalled = await said(store, "h", "Stalled", reason="BrokenManifests", commit=out)
    assert "lies outside of the repository" in stalled.message


async def test_a_deleted_source_lets_go_of_its_objects(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "j.git")
    first = repo.commit({"j.yaml": pool("j")})
    await applied(store, source("j", repo.url, "  prune: true\n"))
    await ready(store, "j", first)
    await delete(store, "GitSource", "j", CLOCK)

    async def released() -> bool:
        found = await objects.get(store, NodePool, "j")
        assert found is not None
        there = await store.get(keys.named(keys.APPLY_SET_PREFIX, "gitsource.j"))
        return there is None and APPLY_SET not in found.metadata.annotations

    await until_async(released, limit_s=40.0, what="release")
    # So another may have it.
    await applied(store, source("j2", repo.url))
    await ready(store, "j2", first)
