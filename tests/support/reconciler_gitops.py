"""A leading controller on a real etcd, and a source that it reconciles."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

from machinery.clock import SystemClock
from manifests import apply
from manifests.documents import Document
from manifests.load import read_objects
from manifests.yaml.parser import parse
from reconciler.services.gitops.credentials import GitSettings
from schemas.event import Event
from schemas.gitsource import GitSource, GitSourceStatus, with_sync_request
from schemas.meta import ApiObject, Condition, find_condition, is_true
from store import objects
from store.mutate import mutate
from store.port import Transport
from tests.support import reconciler_world
from tests.support.waiting import until_async

CLOCK = SystemClock()
T = TypeVar("T")


def places(root: Path) -> GitSettings:
    return GitSettings(cache=root / "git", credentials=root / "credentials")


@asynccontextmanager
async def leading(
    store: Transport, root: Path, git: GitSettings | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """Run a controller for the length of a block."""
    async with reconciler_world.leading(store, git=git or places(root)) as tasks:
        yield tasks["controller"]


def source(name: str, repository: str, spec: str = "") -> str:
    """Return the manifest of a source that fetches on `synced`, and otherwise once a day."""
    return (
        "apiVersion: fleet/v1alpha1\nkind: GitSource\n"
        f"metadata:\n  name: {name}\nspec:\n  repository: {repository}\n  interval: 24h\n{spec}"
    )


async def applied(store: Transport, text: str, manager: str = "fleetctl") -> None:
    """Apply manifests as a person would."""
    nodes = parse(text, "test.yaml").documents
    loaded = read_objects([Document(source="test.yaml", root=root) for root in nodes])
    await apply.apply(store, loaded, CLOCK, apply.ApplyOptions(manager=manager, force=True))


async def status(store: Transport, name: str) -> GitSourceStatus | None:
    obj = await objects.get(store, GitSource, name)
    return None if obj is None else obj.status


_syncs = count(1)


async def synced(store: Transport, name: str) -> str:
    """Request a fetch, as `fleetctl sync` does; return the token of the request."""
    word = f"sync-{next(_syncs)}"

    await mutate(store, CLOCK, GitSource, name, lambda one: with_sync_request(one, word))
    return word


async def _requeue(store: Transport, name: str, commit: str) -> None:
    """Queue a source again, in case its last reconcile came too early."""
    now = await status(store, name)
    if (
        now is not None
        and now.observed_generation
        and not (commit and commit in now.observed_revision)
    ):
        await synced(store, name)


async def _until(
    store: Transport, name: str, holds: Callable[[GitSourceStatus], T | None], limit_s: float
) -> T:
    async def look() -> T | None:
        now = await status(store, name)
        return None if now is None else holds(now)

    try:
        return await until_async(look, limit_s=limit_s, what=name)
    except AssertionError:
        raise AssertionError(f"{name}: {await status(store, name)}") from None


async def said(
    store: Transport, name: str, type_: str, *, reason: str, commit: str = "", limit_s: float = 20.0
) -> Condition:
    """Wait until a source's condition has a reason (and the commit was seen); return it."""
    await _requeue(store, name, commit)

    def holds(now: GitSourceStatus) -> Condition | None:
        match = find_condition(now.conditions, type_)
        is_it = now.observed_revision.endswith(commit) and match is not None
        return match if is_it and match is not None and match.reason == reason else None

    return await _until(store, name, holds, limit_s)


async def ready(store: Transport, name: str, commit: str) -> GitSourceStatus:
    """Wait until a commit is applied, and the source Ready."""
    await _requeue(store, name, commit)

    def holds(now: GitSourceStatus) -> GitSourceStatus | None:
        is_it = now.applied_revision.endswith(commit) and is_true(now.conditions, "Ready")
        return now if is_it else None

    return await _until(store, name, holds, 20.0)


async def gone(store: Transport, kind: type[ApiObject], name: str) -> None:
    async def look() -> bool:
        return await objects.get(store, kind, name) is None

    await until_async(look, limit_s=20.0, what=f"the end of {kind.__name__}/{name}")


async def events(store: Transport, name: str) -> list[tuple[str, str]]:
    """Return reasons and messages of the events of a source."""
    found = await objects.list_all(store, Event)
    return [(e.spec.reason, e.spec.message) for e in found if e.spec.about.name == name]
