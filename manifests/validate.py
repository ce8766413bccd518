"""Checks across objects: references must resolve, and unique names must be unique. Pure; does not read the store.

A reference may resolve to an object in the store or in the manifests, so that both can be applied together. Two things
are allowed on purpose: nodes that do not exist yet (Macs join later), and a served name of several deployments (tiers
such as "fast").
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from manifests import suggestions
from manifests.errors import ManifestError
from manifests.load import LoadedObject
from manifests.trees import Path
from manifests.validation_errors import accepts
from schemas.deployment import HUB_REPO_PATTERN, HubReference, ModelDeployment
from schemas.modelpolicy import ModelPolicy
from schemas.pools import NodePool
from schemas.route import Backend, ModelRoute
from schemas.shardgroup import MOST_JACCL_RANKS, ShardGroup

# The limit of schemas.meta.ObjectName, and the suffix of a revision's name after the deployment's.
_MAX_NAME = 128
_TAIL = len("-0123456789ab")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreNames:
    """The names of objects in the store."""

    node_pools: frozenset[str] = frozenset()
    model_deployments: frozenset[str] = frozenset()
    model_routes: tuple[ModelRoute, ...] = ()
    shard_groups: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The names of objects after the apply."""

    node_pools: frozenset[str]
    shard_groups: frozenset[str]
    model_deployments: frozenset[str]
    declared_routes: Mapping[str, tuple[LoadedObject, ModelRoute]]
    """For every model, the first manifest of a route for it."""
    other_routes: tuple[ModelRoute, ...]
    """Routes in the store that are not in the manifests."""


def validate(loaded: Sequence[LoadedObject], known: StoreNames) -> list[ManifestError]:
    """Return the problems between the objects, at their fields."""
    world = _world(loaded, known)
    problems: list[ManifestError] = []
    for item in loaded:
        match item.obj:
            case ModelDeployment():
                problems.extend(_deployment(item, item.obj, world))
            case NodePool():
                problems.extend(_pool(item, item.obj))
            case ShardGroup():
                problems.extend(_group(item, item.obj))
            case ModelRoute():
                problems.extend(_route(item, item.obj, world))
            case ModelPolicy():
                problems.extend(_policy(item, item.obj, world))
            case _:  # other kinds refer to nothing
                continue
    return problems


def _world(loaded: Sequence[LoadedObject], known: StoreNames) -> _Names:
    pools = {item.obj.name for item in loaded if isinstance(item.obj, NodePool)}
    groups = {item.obj.name for item in loaded if isinstance(item.obj, ShardGroup)}
    deployments = {item.obj.name for item in loaded if isinstance(item.obj, ModelDeployment)}
    routes = [(item, item.obj) for item in loaded if isinstance(item.obj, ModelRoute)]
    named = {route.name for _, route in routes}
    return _Names(
        node_pools=known.node_pools | pools,
        shard_groups=known.shard_groups | groups,
        model_deployments=known.model_deployments | deployments,
        declared_routes={route.spec.model: (i, route) for i, route in reversed(routes)},
        other_routes=tuple(route for route in known.model_routes if route.name not in named),
    )


def _deployment(item: LoadedObject, obj: ModelDeployment, world: _Names) -> Iterator[ManifestError]:
    for index, pool in enumerate(obj.spec.placement.pools):
        if pool not in world.node_pools:
            path = ("spec", "placement", "pools", index)
            yield _absent(item, path, ("NodePool", pool), world.node_pools)
    for index, pool in enumerate(obj.spec.preload.pools if obj.spec.preload is not None else ()):
        if pool not in world.node_pools:
            path = ("spec", "preload", "pools", index)
            yield _absent(item, path, ("NodePool", pool), world.node_pools)
    yield from _hub_id_as_path(item, obj)
    sharding = obj.spec.sharding
    if sharding not in ("Never", "Auto") and sharding not in world.shard_groups:
        yield _absent(item, ("spec", "sharding"), ("ShardGroup", sharding), world.shard_groups)
    # Replicas and revisions contain its name; a revision's hash is the longer suffix.
    if len(obj.name) > _MAX_NAME - _TAIL:
        yield item.document.problem(
            ("metadata", "name"),
            f"has {len(obj.name)} characters, so the names of its revisions would have "
            f"{len(obj.name) + _TAIL}; at most {_MAX_NAME} are allowed",
            f"Use {_MAX_NAME - _TAIL} characters or fewer",
        )
    for route in world.other_routes:
        if _shadows(route, obj.name):
            yield item.document.problem(
                ("metadata", "name"),
                f'ModelRoute/{route.name} sends the model "{obj.name}" to other deployments',
                "Use another name, or add the deployment to the route's backends",
            )


def _policy(item: LoadedObject, obj: ModelPolicy, world: _Names) -> Iterator[ManifestError]:
    for index, pool in enumerate(obj.spec.on_demand.pools):
        if pool not in world.node_pools:
            path = ("spec", "onDemand", "pools", index)
            yield _absent(item, path, ("NodePool", pool), world.node_pools)


def _hub_id_as_path(item: LoadedObject, obj: ModelDeployment) -> Iterator[ManifestError]:
    """Yield a path that has the form of a repository: ORGANISATION/NAME."""
    path = obj.spec.model.path
    # Repositories have capitals nearly always, folders that people make nearly never.
    if path is None or path.lower() == path:
        return
    if re.fullmatch(HUB_REPO_PATTERN, path) and accepts(HubReference, ("repo",), f"repo: {path}"):
        yield item.document.problem(
            ("spec", "model", "path"),
            f"{path} looks like a repository of a model hub, and a path is a folder on the Macs",
            f"Write hub: {{repo: {path}}} in place of path; or path: ./{path} for a folder below the models folder",
        )


def _pool(item: LoadedObject, obj: NodePool) -> Iterator[ManifestError]:
    if not obj.spec.nodes and obj.spec.selector is None:
        yield item.document.problem(
            ("spec",),
            "names no nodes and has no selector, so no Mac would be in the pool",
            "Write: nodes: [name-of-a-mac], or a selector ({} takes every Mac)",
        )
    yield from _repeats(item, ("spec", "nodes"), "", obj.spec.nodes)


def _group(item: LoadedObject, obj: ShardGroup) -> Iterator[ManifestError]:
    members = [member.node for member in obj.spec.members]
    yield from _repeats(item, ("spec", "members"), "node", members)
    yield from _devices(item, obj, frozenset(members))
    yield from _fallbacks(item, obj)


def _fallbacks(item: LoadedObject, obj: ShardGroup) -> Iterator[ManifestError]:
    """Yield fallbacks that are impossible, or equal to a variant that has failed by then."""
    members, own = obj.spec.members, obj.spec.parallelism
    before: list[tuple[str, int, str | None]] = [(own, obj.spec.wanted_size, None)]
    for index, fallback in enumerate(obj.spec.fallbacks):
        path: Path = ("spec", "fallbacks", index)
        if fallback.size is not None and members and fallback.size > len(members):
            yield item.document.problem(
                (*path, "size"),
                f"is {fallback.size}, and the group has {len(members)} members",
                "Write a smaller size: a fallback uses fewer Macs",
            )
        elif (
            fallback.size is not None
            and obj.spec.backend != "ring"
            and fallback.size > MOST_JACCL_RANKS
        ):
            yield item.document.problem(
                (*path, "size"),
                f"is {fallback.size}, and JACCL connects {MOST_JACCL_RANKS} at most",
                f"Use {MOST_JACCL_RANKS} or fewer",
            )
        variant = (
            fallback.parallelism or obj.spec.parallelism,
            fallback.size or obj.spec.wanted_size,
            fallback.model,
        )
        if variant in before:
            what = "the group itself" if before.index(variant) == 0 else "an earlier fallback"
            yield item.document.problem(
                path,
                f"is the same as {what}, which has failed by then",
                "Change its parallelism, size or model, or remove it",
            )
        before.append(variant)


def _devices(
    item: LoadedObject, obj: ShardGroup, members: frozenset[str]
) -> Iterator[ManifestError]:
    """Yield RDMA devices towards a node outside the group, or towards the member itself."""
    for index, member in enumerate(obj.spec.members):
        for towards in member.rdma:
            if towards in members and towards != member.node:
                continue
            what = (
                "is the member itself" if towards == member.node else "is not a member of the group"
            )
            yield item.document.problem(
                ("spec", "members", index, "rdma", towards),
                f"{towards} {what}",
                "List the devices towards each of the other members",
            )


def _route(item: LoadedObject, obj: ModelRoute, world: _Names) -> Iterator[ManifestError]:
    for path, name in obj.spec.deployments().items():
        if name not in world.model_deployments:
            there = world.model_deployments
            yield _absent(item, ("spec", *path), ("ModelDeployment", name), there)
    lists: dict[Path, Sequence[Backend]] = {
        ("spec", "backends"): obj.spec.backends,
        **{("spec", "rules", n, "backends"): r.backends for n, r in enumerate(obj.spec.rules)},
    }
    for path, backends in lists.items():
        for field, names in (
            ("deployment", [b.deployment for b in backends]),
            ("external", [b.external for b in backends]),
        ):
            yield from _repeats(item, path, field, names)
        if not any(backend.weight for backend in backends):
            message = "every weight is 0, so no backend would get a request"
            yield item.document.problem(path, message, "Give one of them a weight")
    for number, external in enumerate(obj.spec.external):
        if external.name in world.model_deployments and external.name in obj.spec.fallbacks:
            message = f"ModelDeployment/{external.name} has this name, too: the fallback {external.name} could be either"
            path = ("spec", "external", number, "name")
            yield item.document.problem(path, message, "Give the external endpoint another name")
    if obj.spec.model in world.model_deployments and _shadows(obj, obj.spec.model):
        yield item.document.problem(
            ("spec", "model"),
            f"ModelDeployment/{obj.spec.model} serves this name itself, and is not among the backends",
            f"Add it to the backends or fallbacks, or route another name than {obj.spec.model}",
        )
    yield from _rivals(item, obj, world)


def _rivals(item: LoadedObject, obj: ModelRoute, world: _Names) -> Iterator[ManifestError]:
    """Yield other routes for the same model; of two manifests, the later one is reported."""
    first, declared = world.declared_routes[obj.spec.model]
    rivals = [r.name for r in world.other_routes if r.spec.model == obj.spec.model]
    if first is not item:
        rivals.append(f"{declared.name} at {first.source}:{first.line}")
    for rival in rivals:
        yield item.document.problem(
            ("spec", "model"),
            f'ModelRoute/{rival} already routes "{obj.spec.model}"',
            "Put all backends into one route",
        )


def _shadows(route: ModelRoute, deployment: str) -> bool:
    """Return whether the route takes the deployment's own name away from it."""
    return route.spec.model == deployment and deployment not in route.spec.deployments().values()


def _repeats(
    item: LoadedObject, path: Path, field: str, found: Sequence[str | None]
) -> Iterator[ManifestError]:
    """Yield every name that is in the list more than once."""
    counts: Counter[str] = Counter()
    for index, name in enumerate(found):
        if name is None:
            continue
        counts[name] += 1
        if counts[name] == 2:
            where = (*path, index, field) if field else (*path, index)
            yield item.document.problem(where, f"{name} is named twice", "Remove one of them")


def _absent(
    item: LoadedObject, path: Path, named: tuple[str, str], there: frozenset[str]
) -> ManifestError:
    """Return the problem of an unresolved reference."""
    kind, name = named
    close = suggestions.nearest(name, sorted(there))
    guess = f"Did you mean {close}? " if close is not None else ""
    return item.document.problem(
        path,
        f"there is no {kind} {name}",
        f"{guess}Create it first, or apply its manifest together with this one",
    )
