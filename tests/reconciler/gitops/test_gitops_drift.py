"""What others change, suspension, the order of sources and the health of what they say; with real repositories."""

from pathlib import Path

import pytest

from fleetctl.objects.targets import with_spec
from manifests.delete import delete
from manifests.ownership import record_update
from schemas.gitsource import Drift, GitSource
from schemas.pools import NodePool
from schemas.route import ModelRoute
from store import objects
from store.mutate import mutate
from store.port import Transport
from tests.support.gitrepo import Repository, deployment, pool
from tests.support.reconciler_gitops import (
    CLOCK,
    applied,
    events,
    ready,
    said,
    source,
    status,
    synced,
)
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.usefixtures("leader")]


async def scaled(store: Transport, name: str, number: int) -> None:
    """Set a pool's priority as a person would, recorded as hers."""

    def change(one: NodePool) -> NodePool | None:
        after = with_spec(one, priority=number)
        return None if after is None else record_update(one, after, "fleetctl-edit", CLOCK.now())

    await mutate(store, CLOCK, NodePool, name, change)


async def priority(store: Transport, name: str) -> int | None:
    found = await objects.get(store, NodePool, name)
    return None if found is None else found.spec.priority


async def recorded(store: Transport, name: str, reason: str) -> str:
    """Wait for an event about a source; return its message."""

    async def look() -> str | None:
        found = [message for why, message in await events(store, name) if why == reason]
        return found[0] if found else None

    return await until_async(look, what=f"event {reason} of {name}")


async def test_drift_is_put_back_and_told(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "k.git")
    first = repo.commit({"k.yaml": pool("k", priority=2)})
    await applied(store, source("k", repo.url))
    await ready(store, "k", first)
    await scaled(store, "k", 5)

    async def is_back() -> bool:
        return await priority(store, "k") == 2

    await until_async(is_back, what="2 again")
    told = await recorded(store, "k", "DriftCorrected")
    assert told == (f"put back as main@{first[:7]} says: nodepool/k spec.priority (fleetctl-edit)")
    await delete(store, "NodePool", "k", CLOCK)
    await until_async(is_back, what="it again")


async def test_drift_is_only_shown_if_asked(store: Transport, folder: Path) -> None:
    repo = Repository(folder / "l.git")
    first = repo.commit({"l.yaml": pool("l1", priority=2) + "---\n" + pool("l2")})
    await applied(store, source("l", repo.url, "  driftPolicy: Warn\n"))
    await ready(store, "l", first)
    await scaled(store, "l1", 5)
    await delete(store, "NodePool", "l2", CLOCK)
    wanted = (
        Drift(kind="NodePool", name="l1", fields=("spec.priority",), managers=("fleetctl-edit",)),
        Drift(kind="NodePool", name="l2", fields=()),
    )

    async def is_shown() -> bool:
        now = await status(store, "l")
        return now is not None and now.drift == wanted

    await until_async(is_shown, what="drift")
    shown = await said(store, "l", "Ready", reason="Applied")
    assert shown.message == (
        f"main@{first} is applied: 2 objects; others changed "
        "nodepool/l1 spec.priority (fleetctl-edit); nodepool/l2, which is gone"
    )
    assert await priority(store, "l1") == 5
    # Another commit does not take it either, unless it says something else there.
    second = repo.commit({"l.yaml": pool("l1", priority=2, labels="{a: b}") + "---\n" + pool("l2")})
    await ready(store, "l", second)
    assert await priority(store, "l1") == 5
    assert await priority(store, "l2") == 0


async def test_a_conflict_names_who_it_is_with(store: Transport, folder: Path) -> None:
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
    assert waits.message == "waits for gitsource/o1, which is not there"
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
    assert "spec.dependsOn is circular: o1 -> o2 -> o1" in stalled.message
