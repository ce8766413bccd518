"""Objects as tables. Pure: the time and who is alive arrive as arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias, cast

from tabulate import tabulate

from fleetctl import groupcells
from schemas import quantity
from schemas.deployment import ModelDeployment, served_names
from schemas.event import Event
from schemas.fabrictest import FabricTest
from schemas.gitsource import GitSource
from schemas.meta import ApiObject, Truth, find_condition
from schemas.node import Node
from schemas.pools import NodePool
from schemas.replica import Endpoint, Replica
from schemas.revision import Revision
from schemas.route import Backend, ModelRoute, RouteRule
from schemas.shardgroup import ShardGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a table needs to know beside the objects."""

    now: datetime
    ready_nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; wide ones are shown with `-o wide` only."""

    title: str
    cell: Callable[[ApiObject, Moment], str]
    is_wide: bool = False


Columns: TypeAlias = tuple[Column, ...]


def age(then: datetime | None, now: datetime) -> str:
    """Return how long ago, as kubectl writes it: 45s, 12m, 3h, 2d."""
    if then is None:
        return "<unknown>"
    seconds = max(0, int((now - then).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def table(
    objects: Sequence[ApiObject], moment: Moment, *, is_wide: bool, headers: bool = True
) -> str:
    """Return the objects, all of one kind, as a table."""
    if not objects:
        return ""
    columns = [c for c in COLUMNS[objects[0].kind] if is_wide or not c.is_wide]
    rows = [[column.cell(obj, moment) for column in columns] for obj in objects]
    titles = [column.title for column in columns] if headers else []
    return lined_up(rows, titles)


def timeless(obj: ApiObject, moment: Moment, *, is_wide: bool) -> str:
    """Return an object's row without what changes by itself."""
    columns = [c for c in COLUMNS[obj.kind] if is_wide or not c.is_wide]
    cells = [c.cell(obj, moment) for c in columns if c.title not in ("AGE", "LAST SEEN")]
    return "\0".join(cells)


def lined_up(rows: Sequence[Sequence[str]], titles: Sequence[str] = ()) -> str:
    """Return the rows in columns, as kubectl prints them; the one place where tabulate is used."""
    return tabulate(rows, headers=titles, tablefmt="plain", disable_numparse=True)


def _name(obj: ApiObject, _: Moment) -> str:
    return obj.name


def _age(obj: ApiObject, moment: Moment) -> str:
    return age(obj.metadata.creation_timestamp, moment.now)


def _condition(type_: str) -> Callable[[ApiObject, Moment], str]:
    def cell(obj: ApiObject, _: Moment) -> str:
        status = getattr(obj, "status", None)
        found = find_condition(status.conditions, type_) if status is not None else None
        return "Unknown" if found is None else str(found.status)

    return cell


def _reason(type_: str) -> Callable[[ApiObject, Moment], str]:
    def cell(obj: ApiObject, _: Moment) -> str:
        status = getattr(obj, "status", None)
        found = find_condition(status.conditions, type_) if status is not None else None
        if found is None or found.status is Truth.TRUE:
            return ""
        return f"{found.reason}: {found.message}" if found.message else found.reason

    return cell


def _ready(obj: ApiObject, _: Moment) -> str:
    deployment = cast("ModelDeployment", obj)
    ready = deployment.status.ready_replicas if deployment.status else 0
    wanted = deployment.spec.replicas
    if deployment.spec.autoscaling is not None and deployment.status is not None:
        wanted = deployment.status.desired_replicas
    return f"{ready}/{wanted}"


def _node_ready(obj: ApiObject, moment: Moment) -> str:
    node = cast("Node", obj)
    words = ["Ready" if node.name in moment.ready_nodes else "NotReady"]
    if node.spec.unschedulable:
        words.append("Cordoned")
    if node.spec.draining:
        words.append("Draining")
    conditions = node.status.conditions if node.status is not None else ()
    words += [c.type for c in conditions if c.status is Truth.TRUE and c.type != "Ready"]
    return ",".join(words)


def _of_node(field: Callable[[Node], str]) -> Callable[[ApiObject, Moment], str]:
    def cell(obj: ApiObject, _: Moment) -> str:
        node = cast("Node", obj)
        return field(node) if node.status is not None else "<unknown>"

    return cell


def _bytes_of(name: str) -> Callable[[ApiObject, Moment], str]:
    return _of_node(lambda node: quantity.show(getattr(node.status, name)))


def _text_of(name: str) -> Callable[[ApiObject, Moment], str]:
    return _of_node(lambda node: str(getattr(node.status, name)))


def _replica_memory(obj: ApiObject, _: Moment) -> str:
    return quantity.show(sum(r.memory.total_bytes for r in cast("Replica", obj).spec.ranks))


def _shares(backends: Sequence[Backend]) -> str:
    return ",".join(f"{b.deployment}={b.weight}" for b in backends)


def _rule(rule: RouteRule) -> str:
    """Return which headers lead where: `x-team=research,x-beta -> qwen=1`."""
    headers = (h.name if h.value is None else f"{h.name}={h.value}" for h in rule.headers)
    return f"{','.join(headers)} -> {_shares(rule.backends)}"


_NAME, _AGE = Column(title="NAME", cell=_name), Column(title="AGE", cell=_age)

COLUMNS: dict[str, Columns] = {
    "ModelDeployment": (
        _NAME,
        Column(title="READY", cell=_ready),
        Column(title="AVAILABLE", cell=_condition("Available")),
        _AGE,
        Column(
            title="MODEL",
            cell=lambda o, _: cast("ModelDeployment", o).spec.model.path,
            is_wide=True,
        ),
        Column(
            title="SERVED NAMES",
            cell=lambda o, _: ",".join(served_names(cast("ModelDeployment", o))),
            is_wide=True,
        ),
        Column(title="WHY", cell=_reason("Available"), is_wide=True),
    ),
    "NodePool": (
        _NAME,
        Column(title="READY", cell=_condition("Ready")),
        Column(
            title="NODES",
            cell=lambda o, _: str(s.nodes) if (s := cast("NodePool", o).status) else "?",
        ),
        _AGE,
    ),
    "ShardGroup": (
        _NAME,
        Column(title="READY", cell=_condition("Ready")),
        Column(title="SIZE", cell=lambda o, _: str(cast("ShardGroup", o).spec.wanted_size)),
        Column(title="MEMBERS", cell=groupcells.members),
        Column(title="BACKEND", cell=lambda o, _: cast("ShardGroup", o).spec.backend),
        Column(title="REPLICAS", cell=groupcells.replicas),
        _AGE,
        Column(
            title="PARALLELISM",
            cell=lambda o, _: cast("ShardGroup", o).spec.parallelism,
            is_wide=True,
        ),
        Column(
            title="RESERVATION",
            cell=lambda o, _: cast("ShardGroup", o).spec.reservation,
            is_wide=True,
        ),
        Column(title="WHY", cell=_reason("Ready"), is_wide=True),
    ),
    "ModelRoute": (
        _NAME,
        Column(title="MODEL", cell=lambda o, _: cast("ModelRoute", o).spec.model),
        Column(title="ACCEPTED", cell=_condition("Accepted")),
        Column(
            title="BACKENDS",
            cell=lambda o, _: _shares(cast("ModelRoute", o).spec.backends),
        ),
        Column(title="FALLBACKS", cell=lambda o, _: ",".join(cast("ModelRoute", o).spec.fallbacks)),
        _AGE,
        Column(
            title="RULES",
            cell=lambda o, _: "; ".join(map(_rule, cast("ModelRoute", o).spec.rules)),
            is_wide=True,
        ),
        Column(title="WHY", cell=_reason("Accepted"), is_wide=True),
    ),
    "GitSource": (
        _NAME,
        Column(title="READY", cell=_condition("Ready")),
        Column(
            title="REVISION",
            cell=lambda o, _: s.applied_revision if (s := cast("GitSource", o).status) else "",
        ),
        _AGE,
        Column(
            title="REPOSITORY",
            cell=lambda o, _: cast("GitSource", o).spec.repository,
            is_wide=True,
        ),
        Column(title="PATH", cell=lambda o, _: cast("GitSource", o).spec.path, is_wide=True),
        Column(title="WHY", cell=_reason("Ready"), is_wide=True),
    ),
    "Node": (
        _NAME,
        Column(title="STATUS", cell=_node_ready),
        Column(title="CHIP", cell=_text_of("chip")),
        Column(title="MEMORY", cell=_bytes_of("memory_bytes")),
        Column(title="FOR MODELS", cell=_bytes_of("allocatable_bytes")),
        _AGE,
        Column(title="CPU", cell=_text_of("cpu_cores"), is_wide=True),
        Column(title="GPU", cell=_text_of("gpu_cores"), is_wide=True),
        Column(title="OS", cell=_text_of("os_version"), is_wide=True),
        Column(title="ADDRESS", cell=_text_of("address"), is_wide=True),
        Column(title="VERSION", cell=_text_of("agent_version"), is_wide=True),
    ),
    "Replica": (
        _NAME,
        Column(title="READY", cell=_condition("Ready")),
        Column(
            title="NODE",
            cell=lambda o, _: ",".join(rank.node for rank in cast("Replica", o).spec.ranks),
        ),
        Column(title="MEMORY", cell=_replica_memory),
        _AGE,
        Column(title="TOGETHER", cell=groupcells.together, is_wide=True),
        Column(title="WHY", cell=_reason("Ready"), is_wide=True),
    ),
    "Endpoint": (
        _NAME,
        Column(title="NODE", cell=lambda o, _: cast("Endpoint", o).spec.node),
        Column(title="URL", cell=lambda o, _: cast("Endpoint", o).spec.url),
        Column(
            title="SERVED NAMES", cell=lambda o, _: ",".join(cast("Endpoint", o).spec.served_names)
        ),
    ),
    "Revision": (
        _NAME,
        Column(title="DEPLOYMENT", cell=lambda o, _: cast("Revision", o).spec.deployment),
        Column(title="REVISION", cell=lambda o, _: str(cast("Revision", o).spec.revision)),
        _AGE,
    ),
    "Event": (
        Column(title="LAST SEEN", cell=lambda o, m: age(cast("Event", o).spec.last_seen, m.now)),
        Column(title="TYPE", cell=lambda o, _: cast("Event", o).spec.type),
        Column(title="REASON", cell=lambda o, _: cast("Event", o).spec.reason),
        Column(
            title="OBJECT",
            cell=lambda o,
            _: f"{cast('Event', o).spec.about.kind}/{cast('Event', o).spec.about.name}",
        ),
        Column(title="COUNT", cell=lambda o, _: str(cast("Event", o).spec.count), is_wide=True),
        Column(title="SOURCE", cell=lambda o, _: cast("Event", o).spec.source, is_wide=True),
        Column(title="MESSAGE", cell=lambda o, _: cast("Event", o).spec.message),
    ),
    "FabricTest": (
        _NAME,
        Column(title="BACKEND", cell=lambda o, _: cast("FabricTest", o).spec.formation.backend),
        Column(
            title="NODES",
            cell=lambda o, _: ",".join(seat.node for seat in cast("FabricTest", o).spec.seats),
        ),
        _AGE,
    ),
}
