"""GitSources from end to end: real repositories on disk, the real fetch process, a real etcd, a leader.

Drift, suspension, dependencies and health checks.
"""

from pathlib import Path

import pytest

from insight.edits import with_spec
from manifests.delete import delete
from manifests.ownership import record_update
from schemas.deployment import ModelDeployment
from schemas.gitsource import Drift, DriftedField, GitSource, GitSourceStatus
from schemas.meta import APPLY_SET, find_condition
from schemas.pools import NodePool
from schemas.route import ModelRoute
from store import keys, objects
from store.mutate import mutate
from store.port import Transport
from tests.support.gitrepo import Repository, deployment, pool
from tests.support.reconciler_gitops import (
    CLOCK,
    applied,
    events,
    gone,
    ready,
    said,
    source,
    status,
    synced,
)
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.usefixtures("leader")]


async def priority(store: Transport, name: str) -> int | None:
    obj = await objects.get(store, NodePool, name)
    return None if obj is None else obj.spec.priority


async def test_a_commit_converges_without_further_writes(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "a.git")
    both = pool("a1") + "---\n" + deployment("a-qwen")
    first = repo.commit({"sites/a.yaml": both, "README.md": "x", ".ci/x.yaml": "no: manifest"})
    await applied(store, source("a", repo.url, "  path: sites\n"))
    git_source_status = await ready(store, "a", first)
    assert (
        git_source_status.applied_revision == git_source_status.observed_revision == f"main@{first}"
    )
    assert [(entry.kind, entry.name) for entry in git_source_status.inventory] == [
        ("ModelDeployment", "a-qwen"),
        ("NodePool", "a1"),
    ]
    condition = find_condition(git_source_status.conditions, "Ready")
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
    items = [await store.get(keys.spec_key(*kind)) for kind in kinds]
    return [item.mod_revision for item in items if item is not None]


async def test_a_broken_commit_changes_nothing_and_names_the_line(
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
    # The applied revision is kept.
    await mutate(store, CLOCK, NodePool, "b1", lambda one: _with_priority(one, 7))
    await _becomes(store, "b1", 1)
    worse = repo.commit({"more.yaml": "a: [b"})
    stalled = await said(store, "b", "Stalled", reason="BrokenManifests", commit=worse)
    assert stalled.message.startswith("more.yaml:1:6: is not YAML: ")
    mended = repo.commit({"more.yaml": None})
    await ready(store, "b", mended)
    assert await priority(store, "b1") == 2


def _with_priority(one: NodePool, number: int) -> NodePool:
    """Return the pool as a client without field management would change it."""
    metadata = one.metadata.model_copy(update={"generation": one.metadata.generation + 1})
    spec = one.spec.model_copy(update={"priority": number})
    return one.model_copy(update={"spec": spec, "metadata": metadata})


async def _becomes(store: Transport, name: str, number: int) -> None:
    async def look() -> bool:
        return await priority(store, name) == number

    await until_async(look, limit_s=40.0, what=f"priority {number} of {name}")


@pytest.mark.ci
async def test_a_force_push_is_followed(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "c.git")
    repo.commit({"c.yaml": pool("c1", priority=1)})
    first = repo.commit({"c.yaml": pool("c1", priority=2)})
    await applied(store, source("c", repo.url))
    await ready(store, "c", first)
    other = repo.commit({"c.yaml": pool("c1", priority=3)}, parents=False, clock=5)
    await ready(store, "c", other)
    assert await priority(store, "c1") == 3


@pytest.mark.ci
async def test_removed_objects_are_pruned_if_prune_is_set(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "d.git")
    first = repo.commit({"d1.yaml": pool("d1"), "d2.yaml": pool("d2"), "d3.yaml": pool("d3")})
    await applied(store, source("d", repo.url))
    await ready(store, "d", first)
    second = repo.commit({"d2.yaml": None})
    git_source_status = await ready(store, "d", second)
    assert [entry.name for entry in git_source_status.inventory] == ["d1", "d3"]
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


@pytest.mark.ci
async def test_two_sources_cannot_have_one_object(store: Transport, folder: Path) -> None:
    repository, two = Repository(folder / "e1.git"), Repository(folder / "e2.git")
    first = repository.commit({"e.yaml": pool("e", priority=1)})
    second = two.commit({"x.yaml": pool("e-other"), "e.yaml": pool("e", priority=2)})
    await applied(store, source("e1", repository.url))
    await ready(store, "e1", first)
    await applied(store, source("e2", two.url, "  force: true\n"))
    stalled = await said(store, "e2", "Stalled", reason="Refused", commit=second)
    assert "e.yaml:4:9: NodePool/e: metadata.name: belongs to the apply set gitsource.e1" in (
        stalled.message
    )
    assert await priority(store, "e") == 1
    assert await priority(store, "e-other") is None  # all, or nothing
    # Nor does the refused one take it when it is deleted, however fast it is.
    await mutate(store, CLOCK, GitSource, "e1", lambda item: with_spec(item, suspend=True))
    await said(store, "e1", "Reconciling", reason="Suspended")
    await delete(store, "NodePool", "e", CLOCK)
    request = await synced(store, "e2")

    async def answered() -> bool:
        now = await status(store, "e2")
        return now is not None and now.last_sync == request

    await until_async(answered, what="the sync of e2")
    await said(store, "e2", "Stalled", reason="Refused", commit=second)
    assert await priority(store, "e") is None
    await mutate(store, CLOCK, GitSource, "e1", lambda item: with_spec(item, suspend=False))
    await _becomes(store, "e", 1)


@pytest.mark.parametrize(
    ("first", "old", "new"),
    [
        pytest.param("old", "  prune: true\n", "", id="the-old-source-sees-it-first"),
        pytest.param("new", "  prune: true\n", "", id="the-new-source-sees-it-first"),
        pytest.param("old", "", "", id="without-prune"),
        pytest.param("old", "  prune: true\n", "  dependsOn: [NAME-old]\n", id="new-waits-for-old"),
        pytest.param("new", "  prune: true\n  dependsOn: [NAME-new]\n", "", id="old-waits-for-new"),
        pytest.param("old", "  prune: true\n  driftPolicy: Warn\n", "", id="warn"),
    ],
)
async def test_an_object_moves_between_sources_of_a_repository_as_it_is(
    store: Transport, folder: Path, request: pytest.FixtureRequest, first: str, old: str, new: str
) -> None:
    name = f"mv{request.node.callspec.indices['first']}"
    repo = Repository(folder / f"{name}.git")
    moved = pool(name, priority=3)
    files = {"old/stays.yaml": pool(f"{name}-stays"), "new/there.yaml": pool(f"{name}-there")}
    before = repo.commit({**files, "old/x.yaml": moved, "old/y.yaml": pool(f"{name}-y")})
    for side, spec in (("old", old), ("new", new)):
        text = f"  path: {side}\n{spec.replace('NAME', name)}"
        await applied(store, source(f"{name}-{side}", repo.url, text))
    for side in ("old", "new"):
        await ready(store, f"{name}-{side}", before)
    there = await objects.get(store, NodePool, name)
    assert there is not None
    changes = {"old/x.yaml": None, "old/y.yaml": None, "new/x.yaml": moved}
    after = repo.commit(changes)
    await synced(store, f"{name}-{first}")
    for side in ("old", "new"):
        await ready(store, f"{name}-{side}", after)

    async def handed_over() -> bool:
        now = await objects.get(store, NodePool, name)
        assert now is not None
        assert now.metadata.uid == there.metadata.uid
        return now.metadata.annotations[APPLY_SET] == f"gitsource.{name}-new"

    await until_async(handed_over, what="the hand-over")
    assert {e.manager for e in there.metadata.managed_fields} == {f"gitsource/{name}-old"}
    now = await objects.get(store, NodePool, name)
    assert now is not None
    assert {e.manager for e in now.metadata.managed_fields} == {f"gitsource/{name}-new"}
    if old:  # what no source has any more is pruned
        await gone(store, NodePool, f"{name}-y")
    # The new source owns it: it prunes it.
    last = repo.commit({"new/x.yaml": None})
    await applied(store, source(f"{name}-new", repo.url, "  path: new\n  prune: true\n"))
    await ready(store, f"{name}-new", last)
    await gone(store, NodePool, name)


@pytest.mark.ci
async def test_pruning_waits_for_a_source_whose_manifests_cannot_be_read(
    store: Transport, folder: Path
) -> None:
    repo = Repository(folder / "p.git")
    before = repo.commit({"a/p.yaml": pool("p1") + "---\n" + pool("p2"), "b/p.yaml": pool("p3")})
    for side in ("a", "b"):
        await applied(store, source(f"p-{side}", repo.url, f"  path: {side}\n  prune: true\n"))
        await ready(store, f"p-{side}", before)
    broken = repo.commit({"a/p.yaml": pool("p1"), "b/p.yaml": "a: [b"})
    await ready(store, "p-a", broken)
    waits = await said(store, "p-a", "Ready", reason="Applied", commit=broken)
    assert waits.message.endswith(
        "; pruning waits until the same repository is read for gitsource/p-b"
    )
    assert await priority(store, "p2") == 0
    mended = repo.commit({"b/p.yaml": pool("p3") + "---\n" + pool("p2")})
    await ready(store, "p-b", mended)
    now = await objects.get(store, NodePool, "p2")
    assert now is not None
    assert now.metadata.annotations[APPLY_SET] == "gitsource.p-b"


@pytest.mark.ci
async def test_a_repository_that_is_away_for_a_while(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "f.git")
    first = repo.commit({"f.yaml": pool("f", priority=1)})
    await applied(store, source("f", repo.url))
    await ready(store, "f", first)
    repo.path.rename(folder / "elsewhere")
    away = await said(store, "f", "Ready", reason="RepositoryNotFound")
    assert away.message.endswith(f"main@{first} stays applied")
    # The applied revision is kept.
    await mutate(store, CLOCK, NodePool, "f", lambda one: _with_priority(one, 7))
    await _becomes(store, "f", 1)
    (folder / "elsewhere").rename(repo.path)
    second = repo.commit({"f.yaml": pool("f", priority=2)})
    await ready(store, "f", second)
    assert await priority(store, "f") == 2


@pytest.mark.ci
async def test_pinned_commits_and_tags(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "g.git")
    first = repo.commit({"g.yaml": pool("g", priority=1)})
    repo.tag("v1", first, annotated=True)
    second = repo.commit({"g.yaml": pool("g", priority=2)})
    await applied(store, source("g", repo.url, "  reference: {tag: v1}\n"))
    git_source_status = await ready(store, "g", first)
    assert git_source_status.applied_revision == f"v1@{first}"
    await applied(store, source("g", repo.url, f"  reference: {{commit: {second}}}\n"))
    git_source_status = await ready(store, "g", second)
    assert git_source_status.applied_revision == second
    await applied(store, source("g", repo.url, "  reference: {branch: mian}\n"))
    missing = await said(store, "g", "Stalled", reason="ReferenceNotFound")
    assert f"{repo.url} has no branch mian. Did you mean main?" in missing.message


@pytest.mark.ci
async def test_the_applied_commit_keeps_the_branch_under_which_it_was_found(
    store: Transport, folder: Path
) -> None:
    repo = Repository(folder / "r.git")
    first = repo.commit({"r.yaml": pool("r", priority=1)})
    await applied(store, source("r", repo.url))
    await ready(store, "r", first)
    await applied(store, source("r", repo.url, "  reference: {branch: mian}\n"))
    await said(store, "r", "Stalled", reason="ReferenceNotFound")
    request = await synced(
        store, "r"
    )  # with a status about this spec, the applied commit is loaded

    async def answered() -> GitSourceStatus | None:
        now = await status(store, "r")
        return now if now is not None and now.last_sync == request else None

    git_source_status = await until_async(
        answered, limit_s=20.0, what="the answer to the sync of r"
    )
    assert git_source_status.applied_revision == f"main@{first}"
    stalled = await said(store, "r", "Stalled", reason="ReferenceNotFound")
    assert stalled.message.endswith(f"main@{first} stays applied")


@pytest.mark.ci
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


@pytest.mark.ci
async def test_a_deleted_source_lets_go_of_its_objects(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "j.git")
    first = repo.commit({"j.yaml": pool("j")})
    await applied(store, source("j", repo.url, "  prune: true\n"))
    await ready(store, "j", first)
    await delete(store, "GitSource", "j", CLOCK)

    async def released() -> bool:
        obj = await objects.get(store, NodePool, "j")
        assert obj is not None
        there = await store.get(keys.named(keys.APPLY_SET_PREFIX, "gitsource.j"))
        return there is None and APPLY_SET not in obj.metadata.annotations

    await until_async(released, limit_s=40.0, what="release")
    # So another may have it.
    await applied(store, source("j2", repo.url))
    await ready(store, "j2", first)


async def scaled(store: Transport, name: str, number: int) -> None:
    """Set a pool's priority as a person would, recorded as hers."""

    def change(one: NodePool) -> NodePool | None:
        after = with_spec(one, priority=number)
        return None if after is None else record_update(one, after, "fleetctl-edit", CLOCK.now())

    await mutate(store, CLOCK, NodePool, name, change)


async def recorded(store: Transport, name: str, reason: str) -> str:
    """Wait for an event about a source; return its message."""

    async def look() -> str | None:
        found = [message for why, message in await events(store, name) if why == reason]
        return found[0] if found else None

    return await until_async(look, what=f"event {reason} of {name}")


async def test_drift_is_corrected_with_an_event(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "k.git")
    first = repo.commit({"k.yaml": pool("k", priority=2)})
    await applied(store, source("k", repo.url))
    await ready(store, "k", first)
    await scaled(store, "k", 5)

    async def is_back() -> bool:
        return await priority(store, "k") == 2

    await until_async(is_back, what="2 again")
    told = await recorded(store, "k", "DriftCorrected")
    assert told == (f"corrected to main@{first[:7]}: nodepool/k spec.priority (fleetctl-edit)")
    await delete(store, "NodePool", "k", CLOCK)
    await until_async(is_back, what="it again")


@pytest.mark.ci
async def test_drift_is_only_reported_with_warn(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "l.git")
    first = repo.commit({"l.yaml": pool("l1", priority=2) + "---\n" + pool("l2")})
    await applied(store, source("l", repo.url, "  driftPolicy: Warn\n"))
    await ready(store, "l", first)
    await scaled(store, "l1", 5)
    await delete(store, "NodePool", "l2", CLOCK)
    values = (DriftedField(path="spec.priority", wanted="2", actual="5"),)
    managers = ("fleetctl-edit",)
    wanted = (
        Drift(
            kind="NodePool",
            name="l1",
            fields=("spec.priority",),
            managers=managers,
            values=values,
        ),
        Drift(kind="NodePool", name="l2", fields=()),
    )

    async def is_shown() -> bool:
        now = await status(store, "l")
        return now is not None and now.drift == wanted

    await until_async(is_shown, what="drift")
    shown = await said(store, "l", "Ready", reason="Applied")
    assert shown.message == (
        f"main@{first} is applied: 2 objects; others changed "
        "nodepool/l1 spec.priority (fleetctl-edit); nodepool/l2, which was deleted"
    )
    assert await priority(store, "l1") == 5
    # Another commit does not take it either, unless it sets another value there.
    second = repo.commit({"l.yaml": pool("l1", priority=2, labels="{a: b}") + "---\n" + pool("l2")})
    await ready(store, "l", second)
    assert await priority(store, "l1") == 5
    assert await priority(store, "l2") == 0


@pytest.mark.ci
async def test_a_conflict_names_the_other_manager(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "m.git")
    first = repo.commit({"m.yaml": pool("m", priority=1)})
    await applied(store, pool("m", priority=3))
    await applied(store, source("m", repo.url))
    stalled = await said(store, "m", "Stalled", reason="Refused", commit=first)
    assert "m.yaml:8:13: NodePool/m: spec.priority: " in stalled.message
    assert "fleetctl" in stalled.message
    await applied(store, source("m", repo.url, "  force: true\n"))
    await ready(store, "m", first)
    assert await priority(store, "m") == 1


@pytest.mark.ci
async def test_a_suspended_source_leaves_everything_alone(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "n.git")
    first = repo.commit({"n.yaml": pool("n", priority=1)})
    await applied(store, source("n", repo.url))
    await ready(store, "n", first)
    await applied(store, source("n", repo.url, "  suspend: true\n"))
    await said(store, "n", "Reconciling", reason="Suspended")
    second = repo.commit({"n.yaml": pool("n", priority=2)})
    await scaled(store, "n", 9)
    await synced(store, "n")
    await said(store, "n", "Ready", reason="Suspended")
    assert await priority(store, "n") == 9
    await mutate(store, CLOCK, GitSource, "n", lambda one: with_spec(one, suspend=False))
    await ready(store, "n", second)


@pytest.mark.ci
async def test_sources_wait_for_others_and_for_health(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "o.git")
    route = (
        "apiVersion: fleet/v1alpha1\nkind: ModelRoute\nmetadata:\n  name: o-fast\n"
        "spec:\n  model: o-fast\n  backends:\n  - deployment: o-qwen\n"
    )
    files = {"base/o.yaml": deployment("o-qwen"), "routes/o.yaml": route}
    first = repo.commit(files)
    checks = "  healthChecks: [{kind: ModelRoute, name: o-fast}]\n"
    later = source("o2", repo.url, f"  path: routes\n  dependsOn: [o1]\n{checks}")
    await applied(store, later)
    waits = await said(store, "o2", "Ready", reason="DependencyNotReady")
    assert waits.message == "waits for gitsource/o1, which does not exist"
    assert await objects.get(store, ModelRoute, "o-fast") is None
    await applied(store, source("o1", repo.url, "  path: base\n"))
    await ready(store, "o1", first)
    await ready(store, "o2", first)
    # No Mac has the model: that deployment will never be Available.
    unwell = "  path: base\n  healthChecks: [{kind: ModelDeployment, name: o-qwen}]\n"
    await applied(store, source("o1", repo.url, unwell))
    waits = await said(store, "o1", "Reconciling", reason="WaitingForHealth")
    await applied(store, source("o1", repo.url, f"{unwell}  healthTimeout: 1s\n"))
    late = await said(store, "o1", "Stalled", reason="HealthCheckFailed")
    assert late.message.startswith(
        "after 1s (spec.healthTimeout): modeldeployment/o-qwen is not Available: "
    )
    circle = source("o1", repo.url, "  path: base\n  dependsOn: [o2]\n")
    await applied(store, circle)
    stalled = await said(store, "o1", "Stalled", reason="DependencyCircle")
    assert "spec.dependsOn forms a cycle: o1 -> o2 -> o1" in stalled.message
