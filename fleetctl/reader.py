"""Reading objects for people: what was asked for, or a refusal that names what is there."""

import difflib
from collections.abc import Sequence

from fleetctl.errors import FleetctlError
from fleetctl.printers import Moment
from machinery.clock import Clock
from schemas.kinds import Kind
from schemas.meta import ApiObject, Condition, Truth, with_condition
from schemas.node import Node
from store import codec, keys, objects
from store.port import Transport


async def read(transport: Transport, kind: Kind, names: Sequence[str]) -> list[ApiObject]:
    """Return the named objects, or all of the kind; events by time.

    Raises:
        FleetctlError: one is not there; with the nearest name.

    """
    found = await _all(transport, kind)
    if kind.name == "Event":
        found.sort(key=lambda obj: getattr(obj, "spec").last_seen)  # noqa: B009 - mypy sees the base
    if not names:
        return found
    by_name = {obj.name: obj for obj in found}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise FleetctlError(not_found(kind, missing[0], list(by_name)))
    return [by_name[name] for name in names]


async def read_one(transport: Transport, kind: Kind, name: str) -> ApiObject | None:
    """Return one object; None if it is not there."""
    if kind.name == "Node":
        return next((node for node in await _nodes(transport) if node.name == name), None)
    return await objects.get(transport, kind.type, name)


def not_found(kind: Kind, name: str, known: Sequence[str]) -> str:
    """Return the refusal for a name that nobody has."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f'{kind.plural} "{name}" not found{hint}'


async def _all(transport: Transport, kind: Kind) -> list[ApiObject]:
    if kind.name != "Node":
        return list(await objects.list_all(transport, kind.type))
    return list(await _nodes(transport))


async def _nodes(transport: Transport) -> list[Node]:
    """Return the nodes, with the condition Ready made from their leases.

    The lease is the truth, and whoever wrote it down as a status would be behind it.
    """
    found = await objects.list_all(transport, Node)
    # A node that just joined has a status before the reconciler has written its spec.
    known = {obj.name for obj in found}
    for item in (await transport.list(keys.status_prefix("Node"))).items:
        _, name = keys.kind_and_name(item.key)
        if name not in known:
            bare = Node.model_validate_json(f'{{"metadata": {{"name": "{name}"}}}}')
            found.append(codec.with_status(bare, item))
    ready = await ready_nodes(transport)
    return sorted((_judged(node, ready) for node in found), key=lambda node: node.name)


def _judged(node: Node, ready: frozenset[str]) -> Node:
    if node.status is None:
        return node
    is_ready = node.name in ready
    condition = Condition(
        type="Ready",
        status=Truth.TRUE if is_ready else Truth.FALSE,
        reason="LeaseHeld" if is_ready else "LeaseLost",
        message="" if is_ready else "its agent does not renew its lease",
        observed_generation=node.metadata.generation,
    )
    status = node.status.model_copy(
        update={
            "conditions": with_condition(node.status.conditions, condition),
            "observed_generation": node.metadata.generation,
        }
    )
    return node.model_copy(update={"status": status})


async def ready_nodes(transport: Transport) -> frozenset[str]:
    """Return the nodes whose agents renew their leases."""
    leases = await transport.list(keys.NODE_LEASE_PREFIX)
    return frozenset(i.key.removeprefix(keys.NODE_LEASE_PREFIX) for i in leases.items)


async def moment(transport: Transport, clock: Clock, kind: Kind) -> Moment:
    """Return what tables need beside the objects."""
    ready = await ready_nodes(transport) if kind.name == "Node" else frozenset()
    return Moment(now=clock.now(), ready_nodes=ready)
