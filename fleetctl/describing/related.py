"""What belongs to one object: its replicas, nodes, backends, revisions, events. Reads the store, changes nothing."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar, cast

from fleetctl import printers, proofs, reader
from fleetctl.describing import sections
from fleetctl.kinds import kind_of
from machinery.clock import SystemClock
from manifests.tree import tree_of
from reconciler.nodes import peaks
from schemas import quantity
from schemas.deployment import ModelDeployment
from schemas.event import Event
from schemas.gitsource import GitSource
from schemas.meta import ApiObject, is_true
from schemas.node import Node
from schemas.pools import NodePool, in_pool, selects
from schemas.replica import Replica
from schemas.route import Backend, ModelRoute
from schemas.shardgroup import ShardGroup
from store.port import Transport

Obj = TypeVar("Obj", bound=ApiObject)
_SHORT_HASH = 12


async def of(transport: Transport, obj: ApiObject, now: datetime) -> list[str]:
    """Return the parts that the object's kind has beside what all have; what is empty is nothing. Raises StoreError."""
    parts: list[str] = []
    match obj:
        case ModelDeployment():
            replicas = await _replicas(transport, lambda one: one.spec.deployment == obj.name)
            parts = [_refusals(obj), replicas]
        case Replica():
            parts = [_proof(obj, await reader.peaks(transport, obj))]
        case Node():
            parts = await _node(transport, obj)
        case NodePool():
            found = [node for node in await _all(transport, Node) if in_pool(obj, node)]
            parts = [await _nodes(transport, "Nodes", found)]
        case ShardGroup():
            parts = await _group(transport, obj)
        case ModelRoute():
            parts = [await _backends(transport, obj)]
        case GitSource():
            parts = _source(obj, now)
        case _:
            pass
    return parts


async def _node(transport: Transport, node: Node) -> list[str]:
    told = cast("dict[str, Any]", tree_of(node).get("status") or {})
    shown = {key: value for key, value in told.items() if key != "conditions"}
    assigned = await _replicas(
        transport, lambda one: any(rank.node == node.name for rank in one.spec.ranks)
    )
    return [sections.document("Status", shown), await _pools(transport, node), assigned]


async def events(transport: Transport, obj: ApiObject, now: datetime) -> str:
    """Return what happened to the object. Raises StoreError."""
    rows = []
    for found in await _all(transport, Event):
        spec = found.spec
        # Not those of an earlier object of the name; events about nodes carry no uid.
        is_of_it = spec.about.uid in ("", obj.metadata.uid)
        if (spec.about.kind, spec.about.name) == (obj.kind, obj.name) and is_of_it:
            rows.append((printers.age(spec.last_seen, now), spec.type, spec.reason, spec.message))
    titles = ("LAST SEEN", "TYPE", "REASON", "MESSAGE")
    return sections.table("Events", titles, rows) or "Events: <none>"


async def _all(transport: Transport, type_: type[Obj]) -> list[Obj]:
    return cast("list[Obj]", await reader.read(transport, kind_of(type_.__name__), ()))


async def _replicas(transport: Transport, is_of_it: Callable[[Replica], bool]) -> str:
    found = [one for one in await _all(transport, Replica) if is_of_it(one)]
    moment = await reader.moment(transport, SystemClock(), kind_of("Replica"))
    return sections.below("Replicas", printers.table(found, moment, is_wide=True))


async def _nodes(transport: Transport, title: str, found: Sequence[Node]) -> str:
    moment = await reader.moment(transport, SystemClock(), kind_of("Node"))
    return sections.below(title, printers.table(found, moment, is_wide=False))


def _refusals(deployment: ModelDeployment) -> str:
    refusals = deployment.status.refusals if deployment.status is not None else ()
    rows = [(r.node, r.reason, r.message) for r in refusals]
    return sections.table("Nodes that cannot take a replica", ("NODE", "REASON", "MESSAGE"), rows)


async def _pools(transport: Transport, node: Node) -> str:
    found = [pool.name for pool in await _all(transport, NodePool) if in_pool(pool, node)]
    return f"Pools: {', '.join(sorted(found)) or '<none>'}"


async def _group(transport: Transport, group: ShardGroup) -> list[str]:
    """Return a group's Macs in rank order, those that are named and not there too, and what runs on them."""
    nodes = {node.name: node for node in await _all(transport, Node)}
    ready = await reader.ready_nodes(transport)
    named = [member.node for member in group.spec.members]
    if group.spec.selector is not None:
        named = sorted(n.name for n in nodes.values() if selects(group.spec.selector, n))
    addresses = {member.node: member.addresses for member in group.spec.members}
    rows = []
    for number, name in enumerate(named):
        status = nodes[name].status if name in nodes else None
        state = "Ready" if name in ready else "NotReady" if name in nodes else "not in the fleet"
        is_spare = group.spec.selector is None and number >= group.spec.wanted_size
        told = (
            ("-", "-") if status is None else (status.chip, quantity.show(status.allocatable_bytes))
        )
        own = ", ".join(map(str, addresses.get(name, ()))) or "as its agent reports"
        rows.append((name, state, *told, "spare" if is_spare else "member", own))
    titles = ("NODE", "STATUS", "CHIP", "FOR MODELS", "AS", "ADDRESSES")
    on_it = frozenset(group.status.replicas if group.status is not None else ())
    replicas = await _replicas(transport, lambda one: one.name in on_it)
    return [sections.table("Members", titles, rows), replicas]


async def _backends(transport: Transport, route: ModelRoute) -> str:
    """Return where a route leads, and whether somebody answers there."""
    there = {one.name: one for one in await _all(transport, ModelDeployment)}
    rows = [*_shares("backends", route.spec.backends, there)]
    for number, rule in enumerate(route.spec.rules, 1):
        rows += _shares(f"rule {number}", rule.backends, there)
    for number, name in enumerate(route.spec.fallbacks, 1):
        rows.append((f"fallback {number}", name, "-", *_state(there.get(name))))
    return sections.table("Leads to", ("FROM", "DEPLOYMENT", "SHARE", "READY", "AVAILABLE"), rows)


def _shares(
    label: str, backends: Sequence[Backend], there: dict[str, ModelDeployment]
) -> list[tuple[str, ...]]:
    total = sum(one.weight for one in backends) or 1
    return [
        (label, one.deployment, f"{one.weight / total:.0%}", *_state(there.get(one.deployment)))
        for one in backends
    ]


def _state(deployment: ModelDeployment | None) -> tuple[str, str]:
    if deployment is None:
        return "-", "there is no such deployment"
    if deployment.status is None:
        return "?", "Unknown"
    is_available = is_true(deployment.status.conditions, "Available")
    return str(deployment.status.ready_replicas), str(is_available)


def _source(source: GitSource, now: datetime) -> list[str]:
    """Return what became of a repository's manifests."""
    status = source.status
    if status is None:
        return ["Revisions: nobody has looked at the repository yet"]
    since = status.applied_at
    applied = "never" if since is None else f"{printers.age(since, now)} ago"
    rows = [
        ("Newest", status.observed_revision or "<none>", ""),
        ("Applied", status.applied_revision or "<none>", applied),
    ]
    drift = [
        (f"{one.kind.lower()}/{one.name}", ", ".join(one.fields), ", ".join(one.managers) or "?")
        for one in status.drift
    ]
    inventory = [(one.kind, one.name) for one in status.inventory]
    return [
        sections.table("Revisions", ("", "COMMIT", "SINCE"), rows),
        sections.table("Not as the repository says", ("OBJECT", "FIELDS", "CHANGED BY"), drift),
        sections.table("Inventory", ("KIND", "NAME"), inventory),
    ]


def _proof(replica: Replica, measured: Sequence[int]) -> str:
    show = quantity.show
    has_extras = any(rank.memory.extra_bytes for rank in replica.spec.ranks)
    rows = [
        (
            rank.node,
            *proofs.parts(rank.memory),
            *([proofs.extras(rank.memory)] if has_extras else ()),
            # Where spec.resources.memory counts instead, the parts do not add up to it.
            show(rank.memory.sum_bytes),
            show(rank.memory.override_bytes) if rank.memory.overridden else "-",
            show(peak) if peak else "-",
            peaks.comparison(rank.memory, peak),
        )
        for rank, peak in zip(replica.spec.ranks, measured, strict=True)
    ]
    more = ("EXTRAS",) if has_extras else ()
    titles = ("NODE", *proofs.TITLES, *more, "SUM", "OVERRIDE", "MEASURED", "")
    return sections.table("Memory proof", titles, rows)
