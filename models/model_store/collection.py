"""Collection of models that nothing uses: a pure plan, and its execution under the store's lock.

Pinned and used models stay, and so does every model for an hour after it was loaded or fetched.
"""

import shutil
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models.model_store.admission import FetchIntent, read_intents
from models.model_store.store import ModelStore

# A killed fetch keeps its partial files for a day, so that it can go on.
_ABANDONED_S: Final = 86_400.0
# Longer than the time from the first content of an import to its last.
_YOUNG_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPolicy:
    """Start and end of a collection."""

    start_percent: float = 85.0
    """Fullness of the disk at which it starts."""
    end_percent: float = 75.0
    """Fullness that it brings about, if it can."""
    protected_s: float = 3600.0
    """Time after a load or a fetch in which a model stays."""
    limit_bytes: int | None = None
    """Most bytes of the store; None for as many as the disk has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """One model, as the plan sees it."""

    name: str
    contents: frozenset[str]
    """SHA-256 of its files."""
    used_at: float
    """Seconds since 1970 of its last load or fetch."""
    is_kept: bool
    """True for what is pinned or used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """The store and its disk at one moment."""

    models: tuple[ModelUsage, ...]
    sizes: Mapping[str, int]
    """Sizes of all contents by SHA-256, those of no model included."""
    held: AbstractSet[str]
    """Contents that running fetches need."""
    leftovers: Mapping[str, int]
    """Sizes of partial files that no fetch will go on with, by file name."""
    disk_bytes: int
    free_bytes: int
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    """The objects that a collection removes."""

    models: tuple[str, ...] = ()
    """Names of models, the first to go first."""
    contents: frozenset[str] = frozenset()
    """Contents that no model has after that."""
    leftovers: tuple[str, ...] = ()
    freed_bytes: int = 0
    shortfall_bytes: int = 0
    """Bytes that are still missing for the aim."""

    @property
    def is_empty(self) -> bool:
        return not (self.models or self.contents or self.leftovers)


def excess_bytes(
    *, disk_bytes: int, free_bytes: int, store_bytes: int, policy: CollectionPolicy
) -> int:
    """Return the bytes to remove: those above the store's limit, and on a full disk those above the end; 0 for none."""
    used = disk_bytes - free_bytes
    above_limit = 0 if policy.limit_bytes is None else store_bytes - policy.limit_bytes
    is_full = used * 100 >= policy.start_percent * disk_bytes
    above_end = used - int(policy.end_percent * disk_bytes / 100) if is_full else 0
    return max(0, above_limit, above_end)


def plan_collection(usage: StoreUsage, policy: CollectionPolicy) -> CollectionPlan:
    """Return what to remove: the least recently used models, until `excess_bytes` are freed.

    Leftovers and contents of no model go first. A model is chosen only if its removal frees bytes.
    """
    excess = excess_bytes(
        disk_bytes=usage.disk_bytes,
        free_bytes=usage.free_bytes,
        store_bytes=sum(usage.sizes.values()),
        policy=policy,
    )
    if not excess:
        return CollectionPlan()
    return plan_removal(usage, excess, protected_s=policy.protected_s)


def plan_removal(usage: StoreUsage, wanted_bytes: int, *, protected_s: float) -> CollectionPlan:
    """Return what to remove to free so many bytes; as much as possible if they cannot be freed."""
    references = _count_references(usage.models)
    doomed = {
        content
        for content in usage.sizes
        if content not in references and content not in usage.held
    }
    freed = sum(usage.sizes[content] for content in doomed) + sum(usage.leftovers.values())
    candidates = sorted(
        (m for m in usage.models if not m.is_kept and usage.now - m.used_at >= protected_s),
        key=lambda model: (model.used_at, model.name),
    )
    chosen: list[str] = []
    for model in candidates:
        if freed >= wanted_bytes:
            break
        chosen.append(model.name)
        for content in model.contents:
            references[content] -= 1
            if references[content] == 0 and content not in usage.held:
                doomed.add(content)
                freed += usage.sizes.get(content, 0)
    return CollectionPlan(
        models=_without_useless(chosen, usage, doomed),
        contents=frozenset(doomed),
        leftovers=tuple(sorted(usage.leftovers)),
        freed_bytes=freed,
        shortfall_bytes=max(0, wanted_bytes - freed),
    )


def _count_references(models: Iterable[ModelUsage]) -> dict[str, int]:
    references: dict[str, int] = {}
    for model in models:
        for content in model.contents:
            references[content] = references.get(content, 0) + 1
    return references


def _without_useless(
    chosen: list[str], usage: StoreUsage, doomed: AbstractSet[str]
) -> tuple[str, ...]:
    """Leave out models all of whose contents stay, because others have them."""
    contents = {model.name: model.contents for model in usage.models}
    return tuple(name for name in chosen if not contents[name].isdisjoint(doomed))


def collectable_bytes(
    store: ModelStore, in_use: AbstractSet[str], *, policy: CollectionPolicy | None = None
) -> int:
    """Return the bytes that a collection could free at most. `in_use` has names of models' folders."""
    with store.locked():
        usage = observe_usage(store, in_use)
    protected_s = (policy or CollectionPolicy()).protected_s
    return plan_removal(usage, 1 << 62, protected_s=protected_s).freed_bytes


def collect(
    store: ModelStore,
    in_use: AbstractSet[str],
    *,
    policy: CollectionPolicy | None = None,
    wanted_bytes: int | None = None,
    is_dry_run: bool = False,
) -> CollectionPlan:
    """Plan a collection and carry it out; return the plan.

    Args:
        store: the store.
        in_use: names of the folders of models that something uses; they stay.
        policy: when to start and end.
        wanted_bytes: bytes to free, however full the disk is; None to follow the policy.
        is_dry_run: True to remove nothing.

    Raises:
        OSError: the disk failed; what was removed so far is gone.

    """
    policy = policy or CollectionPolicy()
    with store.locked():
        usage = observe_usage(store, in_use)
        if wanted_bytes is None:
            plan = plan_collection(usage, policy)
        else:
            plan = plan_removal(usage, wanted_bytes, protected_s=policy.protected_s)
        if not is_dry_run:
            _execute(store, plan, usage)
    return plan


def _execute(store: ModelStore, plan: CollectionPlan, usage: StoreUsage) -> None:
    held = frozenset(usage.held)
    for name in plan.models:
        store.remove_locked(name, keep=held)
    for content in plan.contents:
        store.drop_blob(content)
    for name in plan.leftovers:
        _remove_leftover(store.incoming / name)
    for intent in read_intents(store):
        if not _is_wanted(intent, usage.now):
            (store.fetches / f"{intent.name}.json").unlink(missing_ok=True)
    for path in (store.blobs / "git-sha1").iterdir():
        # A link to a content that is gone; a young one may be a moment ahead of its content.
        if not path.exists() and usage.now - path.lstat().st_ctime >= _YOUNG_S:
            path.unlink(missing_ok=True)


def _remove_leftover(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def observe_usage(store: ModelStore, in_use: AbstractSet[str]) -> StoreUsage:
    """Return the store and its disk as they are now, within `locked()`."""
    now = store.clock.now().timestamp()
    wanted = [intent for intent in read_intents(store) if _is_wanted(intent, now)]
    whole = {model.name: model for model in store.models()}
    models = []
    for name in store.manifest_names():
        model = whole.get(name)
        models.append(
            ModelUsage(
                name=name,
                contents=frozenset(file.sha256 for file in store.manifest_files(name)),
                used_at=model.used_at.timestamp() if model else 0.0,
                is_kept=name in in_use or (model is not None and model.is_pinned),
            )
        )
    disk = shutil.disk_usage(store.root)
    return StoreUsage(
        models=tuple(models),
        sizes=content_sizes(store),
        held=_held_contents(store, wanted) | _young_contents(store, now),
        leftovers=_leftovers(store, wanted, now),
        disk_bytes=disk.used + disk.free,
        free_bytes=disk.free,
        now=now,
    )


def content_sizes(store: ModelStore) -> dict[str, int]:
    """Return the sizes of all contents by SHA-256."""
    return {path.name: path.stat().st_size for path in (store.blobs / "sha256").iterdir()}


def _is_wanted(intent: FetchIntent, now: float) -> bool:
    return intent.is_running or now - intent.started_at < _ABANDONED_S


def _held_contents(store: ModelStore, intents: Iterable[FetchIntent]) -> frozenset[str]:
    held_contents = set()
    for intent in intents:
        for digest in intent.sizes:
            try:
                held_contents.add(store.sha256_of(digest).hex)
            except OSError:
                continue  # not here yet
    return frozenset(held_contents)


def _young_contents(store: ModelStore, now: float) -> frozenset[str]:
    """Return the contents that came within the last hour: an import or a fetch may be about to publish them."""
    return frozenset(
        path.name
        for path in (store.blobs / "sha256").iterdir()
        if now - path.stat().st_ctime < _YOUNG_S
    )


def _leftovers(store: ModelStore, intents: Iterable[FetchIntent], now: float) -> Mapping[str, int]:
    """Return partial files that no fetch of the last day wants, and folders that a crash left half made."""
    wanted = {store.part_path(digest).stem for intent in intents for digest in intent.sizes}
    leftovers = {}
    for path in store.incoming.iterdir():
        state = path.lstat()
        if path.stem not in wanted and now - state.st_ctime >= _YOUNG_S:
            leftovers[path.name] = 0 if path.is_dir() else state.st_size
    return leftovers
