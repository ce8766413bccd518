"""Reads typed objects for verbs; a missing object is an error that lists similar names.

Verbs that only print objects read the faster `store.object_trees`.
"""

import json
from collections.abc import Sequence

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.table_context import TableContext
from machinery.clock import Clock
from manifests.suggestions import not_found_message
from schemas.kinds import Kind
from schemas.meta import ApiObject
from schemas.replica import RankStatus, Replica
from store import codec, keys, object_trees, objects, versions
from store.object_trees import Tree, ready_nodes
from store.port import KeyValue, StoreReader, Transport

__all__ = ["read", "read_one", "read_peaks", "ready_nodes", "reconciler_problem", "table_context"]


async def read(transport: Transport, kind: Kind, names: Sequence[str]) -> list[ApiObject]:
    """Return the named objects, or all of the kind; events in chronological order.

    Raises:
        FleetctlError: an object does not exist; the message has the nearest name.

    """
    api_objects = await _all(transport, kind)
    if not names:
        return api_objects
    by_name = {obj.name: obj for obj in api_objects}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise FleetctlError(not_found_message(kind, missing[0], list(by_name)))
    return [by_name[name] for name in names]


async def reconciler_problem(store: StoreReader) -> str:
    """Return why a wait for the reconciler is in vain, and what to do; empty if one leads."""
    if await store.get(keys.ELECTION_RECONCILER) is not None:
        return ""
    return "no reconciler is running: start fleet-reconciler"


async def read_one(transport: Transport, kind: Kind, name: str) -> ApiObject | None:
    """Return one object; None if it does not exist."""
    if kind.name == "Node":
        tree = await object_trees.get(transport, kind.name, name)
        return None if tree is None else _typed(kind, tree)
    return await objects.get(transport, kind.type, name)


async def _all(transport: Transport, kind: Kind) -> list[ApiObject]:
    if kind.name == "Node":  # the condition Ready is derived from leases
        return [_typed(kind, tree) for tree in await object_trees.list_all(transport, kind.name)]
    api_objects = list(await objects.list_all(transport, kind.type))
    if kind.name == "Event":
        api_objects.sort(key=lambda obj: getattr(obj, "spec").last_seen)  # noqa: B009 - mypy sees the base
    return api_objects


def _typed(kind: Kind, tree: Tree) -> ApiObject:
    """Return the typed object of a tree.

    Raises:
        UndecodableError: the tree does not fit this version's type.

    """
    name, status = object_trees.name_of(tree), tree.get("status")
    spec = {part: value for part, value in tree.items() if part != "status"}
    obj = codec.decode(kind.type, _item(keys.spec_key(kind.name, name), spec, kind.name))
    if status is None:
        return obj
    there = _item(keys.status_key(kind.name, name), status, f"{kind.name}Status")
    return codec.with_status(obj, there)


def _item(key: str, tree: Tree, model: str) -> KeyValue:
    """Return a tree as a stored document."""
    raw = json.dumps(tree, separators=(",", ":")).encode()
    value = versions.stamp_version(raw, versions.version_of(model))
    return KeyValue(key=key, value=value, create_revision=0, mod_revision=0)


async def read_peaks(transport: Transport, replica: Replica) -> tuple[int, ...]:
    """Return the highest memory use in bytes that was measured for each rank; 0 if it was not measured."""
    peaks = []
    for number, rank in enumerate(replica.spec.ranks):
        item = await transport.get(keys.rank_key(rank.node, replica.name, number))
        report = None if item is None else codec.decode(RankStatus, item)
        is_of_it = report is not None and report.replica_uid == replica.metadata.uid
        peaks.append(report.peak_bytes if report is not None and is_of_it else 0)
    return tuple(peaks)


async def table_context(transport: StoreReader, clock: Clock, kind: Kind) -> TableContext:
    """Return what tables of this kind need in addition to the objects."""
    ready = await ready_nodes(transport) if kind.name == "Node" else frozenset()
    return TableContext(now=clock.now(), ready_nodes=ready)
