"""GitSources from end to end: real repositories on disk, the real fetch process, a real etcd, a leader.

Drift, suspension, dependencies and health checks.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from insight.edits import with_spec
from manifests.delete import delete
from manifests.ownership import record_update
from schemas.deployment import ModelDeployment
from schemas.gitsource import Drift, DriftedField, GitSource, GitSourceStatus
from schemas.meta import APPLY_SET
from schemas.pools import NodePool
from schemas.route import ModelRoute
from store import codec, keys, objects
from store.mutate import mutate
from store.port import Transport
from tests.support import world
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


async def becomes(store: Transport, name: str, number: int) -> None:
    async def look() -> bool:
        return await priority(store, name) == number

    await until_async(look, limit_s=40.0, what=f"priority {number} of {name}")


class Site:
    """A repository, and the source of the same name that follows it."""

    def __init__(self, store: Transport, folder: Path, name: str) -> None:
        self.store, self.name = store, name
        self.repo = Repository(folder / f"{name}.git")

    async def declare(self, spec: str = "", name: str = "") -> None:
        await applied(self.store, source(name or self.name, self.repo.url, spec))

    async def follow(self, files: dict[str, str], spec: str = "") -> str:
        """Commit files, declare the source, and wait until they are applied."""
        commit = self.repo.commit(files)
        await self.declare(spec)
        await ready(self.store, self.name, commit)
        return commit

    async def push(self, changes: Mapping[str, str | None], **how: Any) -> str:
        """Commit changes, and wait until they are applied."""
        commit = self.repo.commit(changes, **how)
        await ready(self.store, self.name, commit)
        return commit

    async def stalls(self, changes: Mapping[str, str | None], reason: str) -> str:
        """Commit changes that cannot be applied; return the message."""
        return await self.says("Stalled", reason, self.repo.commit(changes))

    async def says(self, type_: str, reason: str, commit: str = "", name: str = "") -> str:
        name = name or self.name
        return (await said(self.store, name, type_, reason=reason, commit=commit)).message

    async def answered(self) -> GitSourceStatus:
        """Request a sync, and wait for its answer."""
        request = await synced(self.store, self.name)

        async def look() -> GitSourceStatus | None:
            now = await status(self.store, self.name)
            return now if now is not None and now.last_sync == request else None

        return await until_async(look, limit_s=20.0, what=f"the sync of {self.name}")

    async def suspend(self, suspend: bool) -> None:
        change = partial(with_spec, suspend=suspend)
        await mutate(self.store, CLOCK, GitSource, self.name, change)

    async def scale_without_field_management(self, pool: str, number: int) -> None:
        def change(obj: NodePool) -> NodePool:
            metadata = {"generation": obj.metadata.generation + 1}
            return world.with_spec(world.with_metadata(obj, **metadata), priority=number)

        await mutate(self.store, CLOCK, NodePool, pool, change)

    async def scale(self, pool: str, number: int) -> None:
        """Set a pool's priority as a person would, recorded as hers."""

        def change(obj: NodePool) -> NodePool | None:
            after = with_spec(obj, priority=number)
            return after and record_update(obj, after, "fleetctl-edit", CLOCK.now())

        await mutate(self.store, CLOCK, NodePool, pool, change)


async def test_a_commit_converges_without_further_writes(store: Transport, folder: Path) -> None:
    site = Site(store, folder, "a")
    both = pool("a1") + "---\n" + deployment("a-qwen")
    files = {"sites/a.yaml": both, "README.md": "x", ".ci/x.yaml": "no: manifest"}
    first = await site.follow(files, "  path: sites\n")
    now = await ready(store, "a", first)
    assert now.applied_revision == now.observed_revision == f"main@{first}"
    members = [("ModelDeployment", "a-qwen"), ("NodePool", "a1")]
    assert [(entry.kind, entry.name) for entry in now.inventory] == members
    assert await site.says("Ready", "Applied", first) == f"main@{first} is applied: 2 objects"
    made = await objects.get(store, ModelDeployment, "a-qwen")
    assert made is not None
    assert made.metadata.annotations[APPLY_SET] == "gitsource.a"
    await site.push({"sites/a.yaml": pool("a1") + "---\n" + deployment("a-qwen", replicas=3)})
    before = [await store.get(keys.spec_key(*member)) for member in members]
    assert before[0] is not None
    assert codec.decode_object(ModelDeployment, before[0]).spec.replicas == 3
    await site.push({"README.md": "nothing of ours"})
    assert [await store.get(keys.spec_key(*member)) for member in members] == before


@pytest.mark.ci
async def test_a_broken_commit_changes_nothing_and_names_the_line(
    store: Transport, folder: Path
) -> None:
    site = Site(store, folder, "b")
    good = await site.follow({"b.yaml": pool("b1", priority=1)})
    wrong = pool("b2").replace("priority", "prio")
    broken = {"b.yaml": pool("b1", priority=2), "more.yaml": wrong}
    assert await site.stalls(broken, "BrokenManifests") == (
        "more.yaml:8:3: NodePool/b2: spec.prio: unknown field. Did you mean priority? "
        f"main@{good} stays applied"
    )
    now = await status(store, "b")
    assert now is not None
    assert now.applied_revision == f"main@{good}"
    assert await priority(store, "b1") == 1
    # The applied revision is kept.
    await site.scale_without_field_management("b1", 7)
    await becomes(store, "b1", 1)
    message = await site.stalls({"more.yaml": "a: [b"}, "BrokenManifests")
    assert message.startswith("more.yaml:1:6: is not YAML: ")
    await site.push({"more.yaml": None})
    assert await priority(store, "b1") == 2


@pytest.mark.ci
async def test_force_pushes_pinned_commits_and_tags_are_followed(
    store: Transport, folder: Path
) -> None:
    site = Site(store, folder, "c")
    site.repo.commit({"c.yaml": pool("c1", priority=1)})
    await site.follow({"c.yaml": pool("c1", priority=2)})
    third = await site.push({"c.yaml": pool("c1", priority=3)}, parents=False, clock=5)
    assert await priority(store, "c1") == 3
    site.repo.tag("v1", third, annotated=True)
    fourth = await site.push({"c.yaml": pool("c1", priority=4)})
    await site.declare("  reference: {tag: v1}\n")
    assert (await ready(store, "c", third)).applied_revision == f"v1@{third}"
    await site.declare(f"  reference: {{commit: {fourth}}}\n")
    assert (await ready(store, "c", fourth)).applied_revision == fourth
    await site.declare("  reference: {branch: mian}\n")
    message = await site.says("Stalled", "ReferenceNotFound")
    assert f"{site.repo.url} has no branch mian. Did you mean main?" in message


@pytest.mark.ci
async def test_removed_objects_are_pruned_if_prune_is_set(store: Transport, folder: Path) -> None:
    site = Site(store, folder, "d")
    await site.follow({f"{name}.yaml": pool(name) for name in ("d1", "d2", "d3")})
    second = await site.push({"d2.yaml": None})
    now = await ready(store, "d", second)
    assert [entry.name for entry in now.inventory] == ["d1", "d3"]
    assert await priority(store, "d2") == 0
    await site.declare("  prune: true\n")
    await gone(store, NodePool, "d2")
    await site.push({"d3.yaml": None})
    assert await priority(store, "d3") is None
    assert await priority(store, "d1") == 0
    # A folder without manifests is a mistake, and prunes nothing.
    await site.stalls({"d1.yaml": None, "README.md": "x"}, "PathNotFound")
    assert await priority(store, "d1") == 0


@pytest.mark.ci
async def test_two_sources_cannot_have_one_object(store: Transport, folder: Path) -> None:
    site, other = Site(store, folder, "e1"), Site(store, folder, "e2")
    await site.follow({"e.yaml": pool("e", priority=1)})
    second = other.repo.commit({"x.yaml": pool("e-other"), "e.yaml": pool("e", priority=2)})
    await other.declare("  force: true\n")
    message = await other.says("Stalled", "Refused", second)
    assert "e.yaml:4:9: NodePool/e: metadata.name: belongs to the apply set gitsource.e1" in message
    assert await priority(store, "e") == 1
    assert await priority(store, "e-other") is None  # all, or nothing
    # Nor does the refused one take it when it is deleted, however fast it is.
    await site.suspend(True)
    await site.says("Reconciling", "Suspended")
    await delete(store, "NodePool", "e", CLOCK)
    await other.answered()
    await other.says("Stalled", "Refused", second)
    assert await priority(store, "e") is None
    await site.suspend(False)
    await becomes(store, "e", 1)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("first", "old", "new"),
    [
        pytest.param("old", "  prune: true\n", "", id="the-old-source-sees-it-first"),
        pytest.param(
            "new", "  prune: true\n", "", id="the-new-source-sees-it-first", marks=pytest.mark.ci
        ),
        pytest.param("old", "", "", id="without-prune", marks=pytest.mark.ci),
        pytest.param(
            "old", "  prune: true\n", "  dependsOn: [NAME-old]\n", id="new-waits-for-old",
        ),
        pytest.param(
            "new", "  prune: true\n  dependsOn: [NAME-new]\n", "", id="old-waits-for-new", marks=pytest.mark.ci,
        ),
        pytest.param("old", "  prune: true\n  driftPolicy: Warn\n", "", id="warn", marks=pytest.mark.ci),
    ],
)  # fmt: skip
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
async def test_the_applied_commit_outlives_its_repository_and_its_branch(
    store: Transport, folder: Path
) -> None:
    site = Site(store, folder, "f")
    first = await site.follow({"f.yaml": pool("f", priority=1)})
    site.repo.path.rename(folder / "elsewhere")
    message = await site.says("Ready", "RepositoryNotFound")
    assert message.endswith(f"main@{first} stays applied")
    await site.scale_without_field_management("f", 7)
    await becomes(store, "f", 1)
    (folder / "elsewhere").rename(site.repo.path)
    second = await site.push({"f.yaml": pool("f", priority=2)})
    assert await priority(store, "f") == 2
    await site.declare("  reference: {branch: mian}\n")
    await site.says("Stalled", "ReferenceNotFound")
    # With a status about this spec, the applied commit is loaded.
    assert (await site.answered()).applied_revision == f"main@{second}"
    message = await site.says("Stalled", "ReferenceNotFound")
    assert message.endswith(f"main@{second} stays applied")


@pytest.mark.ci
async def test_a_site_is_an_overlay(store: Transport, folder: Path) -> None:
    site = Site(store, folder, "h")
    overlay = "apiVersion: fleet/v1alpha1\nkind: Overlay\nbase: [../../base]\n"
    head = "apiVersion: fleet/v1alpha1\nkind: NodePool\nmetadata:\n  name: h\n"
    patch = f"{head}spec:\n  priority: 9\n"
    files = {"base/h.yaml": pool("h"), "sites/berlin/overlay.yaml": overlay}
    await site.follow({**files, "sites/berlin/h.yaml": patch}, "  path: sites/berlin\n")
    assert await priority(store, "h") == 9
    bad = {"sites/berlin/h.yaml": patch.replace("9", "900")}
    message = await site.stalls(bad, "BrokenManifests")
    assert message.startswith("sites/berlin/h.yaml:6:13: NodePool/h: spec.priority: ")
    outside = {"sites/berlin/overlay.yaml": overlay.replace("../../", "../../../../")}
    message = await site.stalls(outside, "BrokenManifests")
    assert "lies outside of the repository" in message


@pytest.mark.ci
async def test_a_deleted_source_lets_go_of_its_objects(store: Transport, folder: Path) -> None:
    site = Site(store, folder, "j")
    first = await site.follow({"j.yaml": pool("j")}, "  prune: true\n")
    await delete(store, "GitSource", "j", CLOCK)

    async def released() -> bool:
        obj = await objects.get(store, NodePool, "j")
        assert obj is not None
        there = await store.get(keys.named(keys.APPLY_SET_PREFIX, "gitsource.j"))
        return there is None and APPLY_SET not in obj.metadata.annotations

    await until_async(released, limit_s=40.0, what="release")
    # So another may have it.
    await site.declare(name="j2")
    await ready(store, "j2", first)


async def test_drift_is_corrected_with_an_event(store: Transport, folder: Path) -> None:
    site = Site(store, folder, "k")
    first = await site.follow({"k.yaml": pool("k", priority=2)})
    await site.scale("k", 5)
    await becomes(store, "k", 2)

    async def recorded() -> list[str]:
        return [message for why, message in await events(store, "k") if why == "DriftCorrected"]

    [message] = await until_async(recorded, what="the event")
    corrected = f"corrected to main@{first[:7]}: nodepool/k spec.priority (fleetctl-edit)"
    assert message == corrected
    await delete(store, "NodePool", "k", CLOCK)
    await becomes(store, "k", 2)


@pytest.mark.ci
async def test_drift_is_only_reported_with_warn(store: Transport, folder: Path) -> None:
    site = Site(store, folder, "l")
    both = pool("l1", priority=2) + "---\n" + pool("l2")
    first = await site.follow({"l.yaml": both}, "  driftPolicy: Warn\n")
    await site.scale("l1", 5)
    await delete(store, "NodePool", "l2", CLOCK)
    field = DriftedField(path="spec.priority", wanted="2", actual="5")
    changed = Drift(
        kind="NodePool",
        name="l1",
        fields=(field.path,),
        managers=("fleetctl-edit",),
        values=(field,),
    )
    wanted = (changed, Drift(kind="NodePool", name="l2", fields=()))

    async def is_shown() -> bool:
        now = await status(store, "l")
        return now is not None and now.drift == wanted

    await until_async(is_shown, what="drift")
    assert await site.says("Ready", "Applied") == (
        f"main@{first} is applied: 2 objects; others changed "
        "nodepool/l1 spec.priority (fleetctl-edit); nodepool/l2, which was deleted"
    )
    assert await priority(store, "l1") == 5
    # Another commit does not take it either, unless it sets another value there.
    labelled = pool("l1", priority=2, labels="{a: b}") + "---\n" + pool("l2")
    await site.push({"l.yaml": labelled})
    assert await priority(store, "l1") == 5
    assert await priority(store, "l2") == 0


@pytest.mark.ci
async def test_a_conflict_names_the_other_manager_and_suspension_leaves_all_alone(
    store: Transport, folder: Path
) -> None:
    site = Site(store, folder, "m")
    first = site.repo.commit({"m.yaml": pool("m", priority=1)})
    await applied(store, pool("m", priority=3))
    await site.declare()
    message = await site.says("Stalled", "Refused", first)
    assert "m.yaml:8:13: NodePool/m: spec.priority: " in message
    assert "fleetctl" in message
    await site.declare("  force: true\n")
    await ready(store, "m", first)
    assert await priority(store, "m") == 1
    await site.suspend(True)
    await site.says("Reconciling", "Suspended")
    second = site.repo.commit({"m.yaml": pool("m", priority=2)})
    await site.scale("m", 9)
    await synced(store, "m")
    await site.says("Ready", "Suspended")
    assert await priority(store, "m") == 9
    await site.suspend(False)
    await ready(store, "m", second)


@pytest.mark.ci
async def test_sources_wait_for_others_and_for_health(store: Transport, folder: Path) -> None:
    site = Site(store, folder, "o1")
    route = (
        "apiVersion: fleet/v1alpha1\nkind: ModelRoute\nmetadata:\n  name: o-fast\n"
        "spec:\n  model: o-fast\n  backends:\n  - deployment: o-qwen\n"
    )
    first = site.repo.commit({"base/o.yaml": deployment("o-qwen"), "routes/o.yaml": route})
    checks = "  healthChecks: [{kind: ModelRoute, name: o-fast}]\n"
    await site.declare(f"  path: routes\n  dependsOn: [o1]\n{checks}", "o2")
    message = await site.says("Ready", "DependencyNotReady", name="o2")
    assert message == "waits for gitsource/o1, which does not exist"
    assert await objects.get(store, ModelRoute, "o-fast") is None
    await site.declare("  path: base\n")
    for name in ("o1", "o2"):
        await ready(store, name, first)
    # No Mac has the model: that deployment will never be Available.
    unwell = "  path: base\n  healthChecks: [{kind: ModelDeployment, name: o-qwen}]\n"
    await site.declare(unwell)
    await site.says("Reconciling", "WaitingForHealth")
    await site.declare(f"{unwell}  healthTimeout: 1s\n")
    message = await site.says("Stalled", "HealthCheckFailed")
    unwell = "after 1s (spec.healthTimeout): modeldeployment/o-qwen is not Available: "
    assert message.startswith(unwell)
    await site.declare("  path: base\n  dependsOn: [o2]\n")
    message = await site.says("Stalled", "DependencyCircle")
    assert "spec.dependsOn forms a cycle: o1 -> o2 -> o1" in message
