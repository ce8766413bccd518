"""Reading objects for people: what was asked for, or a refusal that names what is there."""

import difflib
from collections.abc import Sequence

from fleetctl.errors import FleetctlError
from fleetctl.printers import Moment
from machinery.clock import Clock
from schemas.kinds import Kind
from schemas.meta import ApiObject
from schemas.node import Node, effective_labels, matches
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


def not_found(kind: Kind, name: str, known: Sequence[str]) -> str:
    """Return the refusal for a name that nobody has."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f'{kind.plural} "{name}" not found{hint}'


async def _all(transport: Transport, kind: Kind) -> list[ApiObject]:
    found: list[ApiObject] = list(await objects.list_all(transport, kind.type))
    if kind.name != "Node":
        return found
    # A node that just joined has a status before the reconciler has written its spec.
    known = {obj.name for obj in found}
    for item in (await transport.list(keys.status_prefix("Node"))).items:
        _, name = keys.kind_and_name(item.key)
        if name not in known:
            bare = Node.model_validate_json(f'{{"metadata": {{"name": "{name}"}}}}')
            found.append(codec.with_status(bare, item))
    return sorted(found, key=lambda obj: obj.name)


async def moment(transport: Transport, clock: Clock, kind: Kind) -> Moment:
    """Return what tables need beside the objects."""
    ready: frozenset[str] = frozenset()
    if kind.name == "Node":
        leases = await transport.list(keys.NODE_LEASE_PREFIX)
        ready = frozenset(i.key.removeprefix(keys.NODE_LEASE_PREFIX) for i in leases.items)
    return Moment(now=clock.now(), ready_nodes=ready)


def select(found: Sequence[ApiObject], selector: dict[str, str]) -> list[ApiObject]:
    """Return the objects that carry all labels of the selector."""
    return [obj for obj in found if matches(_labels(obj), selector)]


def _labels(obj: ApiObject) -> dict[str, str]:
    return effective_labels(obj) if isinstance(obj, Node) else obj.metadata.labels


def parse_selector(text: str) -> dict[str, str]:
    """Return the labels that `-l key=value,key=value` asks for.

    Raises:
        FleetctlError: it is not of that form.

    """
    wanted = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.replace("==", "=").partition("=")
        if not equals or not key:
            raise FleetctlError(f"-l {text}: write key=value, with commas between several")
        wanted[key.strip()] = value.strip()
    return wanted
