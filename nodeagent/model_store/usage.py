"""The users of the models in a node's store: deployments, their history, replicas, fallbacks and running engines.

The objects are read when they are needed, and all of them: what is not known to be unused counts as used.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from models import inspection
from nodeagent.engines.engine_processes import find_engines
from schemas.deployment import ModelDeployment, ModelSource, Revision
from schemas.meta import ApiObject
from schemas.model_snapshot import ModelSnapshot, PreloadAssignment
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup
from store import codec, keys
from store.port import Transport

Obj = TypeVar("Obj", bound=ApiObject)

_ANY_COMMIT = "@*"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObjects:
    """The objects of the store that can name a model."""

    deployments: tuple[ModelDeployment, ...] = ()
    revisions: tuple[Revision, ...] = ()
    replicas: tuple[Replica, ...] = ()
    groups: tuple[ShardGroup, ...] = ()
    snapshots: tuple[ModelSnapshot, ...] = ()
    preloads: tuple[PreloadAssignment, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelUsers:
    """The users of models by the name of the folder."""

    by_folder: Mapping[str, frozenset[str]]
    """Users such as `modeldeployment/qwen`, by case-folded folder: a Mac's disk ignores case."""

    def of(self, folder: str) -> tuple[str, ...]:
        """Return the users of a model's folder, sorted."""
        name = folder.casefold()
        any_commit = name.partition("@")[0] + _ANY_COMMIT
        empty: frozenset[str] = frozenset()
        return tuple(
            sorted(self.by_folder.get(name, empty) | self.by_folder.get(any_commit, empty))
        )

    def used(self, folders: Iterable[str]) -> frozenset[str]:
        """Return those of the folders that something uses."""
        return frozenset(folder for folder in folders if self.of(folder))


def find_users(
    objects: FleetObjects, engine_words: Mapping[str, Iterable[str]], models_dir: Path
) -> ModelUsers:
    """Return the users of models. Pure.

    `engine_words` are the command lines of the running engines, by replica. A deployment whose branch is not resolved
    uses every commit of its repository.
    """
    found: dict[str, set[str]] = {}
    for user, path in (
        *_named_by_objects(objects),
        *(
            (f"engine/{replica}", word)
            for replica, words in engine_words.items()
            for word in words
            if word.startswith(f"{models_dir}/")
        ),
    ):
        folder = _top_folder(path, models_dir)
        if folder:
            found.setdefault(folder.casefold(), set()).add(user)
    return ModelUsers({folder: frozenset(users) for folder, users in found.items()})


def _named_by_objects(objects: FleetObjects) -> Iterator[tuple[str, str]]:
    """Yield each user with a path that it names."""
    for deployment in objects.deployments:
        user = f"modeldeployment/{deployment.name}"
        yield from ((user, path) for path in _paths(deployment.spec.model))
    for group in objects.groups:
        for fallback in group.spec.fallbacks:
            if fallback.model is not None:
                yield f"shardgroup/{group.name}", fallback.model
    for snapshot in objects.snapshots:
        yield f"modeldeployment/{snapshot.deployment}", snapshot.folder
    for preload in objects.preloads:
        yield f"preload/{preload.deployment}", preload.source.folder
    for revision in objects.revisions:
        user = f"revision/{revision.name}"
        yield from ((user, path) for path in _paths(revision.spec.content.model))
    for replica in objects.replicas:
        user = f"replica/{replica.name}"
        yield from ((user, path) for path in _paths(replica.spec.model))


def _paths(model: ModelSource) -> Iterator[str]:
    draft = model.draft.path if model.draft is not None else None
    yield from filter(None, (model.path, *model.adapter_paths, draft))
    if model.hub is not None:
        yield model.hub.folder or model.hub.repo.replace("/", "--") + _ANY_COMMIT


def _top_folder(path: str, models_dir: Path) -> str:
    """Return the folder directly below the models folder that a path leads into; "" for a path outside."""
    full = inspection.resolve_path(path, models_dir)
    try:
        parts = full.relative_to(models_dir).parts
    except ValueError:
        try:  # the models folder may have been reached through a link
            parts = full.resolve().relative_to(models_dir.resolve()).parts
        except (ValueError, OSError):
            return ""
    return parts[0] if parts else ""


async def read_users(
    transport: Transport,
    models_dir: Path,
    engines: Path | None,
    preloads: tuple[PreloadAssignment, ...] = (),
) -> ModelUsers:
    """Return the users of models now.

    Args:
        transport: the store of the fleet.
        models_dir: the agent's models folder.
        engines: the folder of the agent's engines; None where none run.
        preloads: those of the agent's node.

    Raises:
        StoreError: the store does not answer, so that nothing counts as unused.
        UndecodableError: an object is of a newer release.

    """
    snapshots = (await transport.list(keys.SNAPSHOT_PREFIX)).items
    objects = FleetObjects(
        deployments=await _list(transport, ModelDeployment),
        revisions=await _list(transport, Revision),
        replicas=await _list(transport, Replica),
        groups=await _list(transport, ShardGroup),
        snapshots=tuple(codec.decode(ModelSnapshot, item) for item in snapshots),
        preloads=preloads,
    )
    # Engines last: one that started meanwhile has a replica that was read, or is seen here.
    running = [] if engines is None else await asyncio.to_thread(find_engines, engines)
    words = {process.replica: process.child.record.command for process in running}
    return find_users(objects, words, models_dir)


async def _list(transport: Transport, kind: type[Obj]) -> tuple[Obj, ...]:
    """Return all objects of a kind without their status, which an agent may not read."""
    items = (await transport.list(keys.spec_prefix(kind.__name__))).items
    return tuple(codec.decode_object(kind, item) for item in items)
