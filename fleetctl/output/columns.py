"""What columns are made of, whatever the kind: names, ages, conditions, fields. Pure.

Columns of what people declare: deployments, pools, groups, routes, sources; and of API keys. Pure.

Columns of what the fleet writes itself: nodes, replicas, endpoints, events. Pure.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from schemas import sizes
from store import object_trees
from store.object_trees import Tree

UNKNOWN = "<unknown>"


class TableContext(NamedTuple):
    """What a table needs to know beside the objects."""

    now: datetime
    ready_nodes: frozenset[str] = frozenset()


Cell: TypeAlias = Callable[[Tree, TableContext], str]


class Column(NamedTuple):
    """One column; wide ones are shown with `-o wide` only."""

    title: str
    cell: Cell
    is_wide: bool = False
    is_timeless: bool = True
    """Whether it stays as it is while nothing happens but time."""
    wide_cell: Cell | None = None
    """What `-o wide` shows instead."""


Columns: TypeAlias = tuple[Column, ...]


def age(then: datetime | None, now: datetime) -> str:
    """Return how long ago, as kubectl writes it: 45s, 12m, 3h, 2d."""
    if then is None:
        return UNKNOWN
    seconds = max(0, int((now - then).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def field_at(tree: Any, *path: str) -> Any:
    """Return what is there in a tree, None if it or what is above it is not."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def text(*path: str) -> Cell:
    """Return the cell that shows a field as it is; nothing if it is not there."""

    def cell(tree: Tree, _: TableContext) -> str:
        found = field_at(tree, *path)
        return "" if found is None else str(found)

    return cell


def number(*path: str) -> Cell:
    """Return the cell that shows a count; 0 if it is not there, for that is every count's default."""
    return lambda tree, _: str(field_at(tree, *path) or 0)


def texts(*path: str) -> Cell:
    """Return the cell that shows a list of texts, with commas."""
    return lambda tree, _: ",".join(map(str, field_at(tree, *path) or ()))


def since(*path: str) -> Cell:
    """Return the cell that shows how long ago a time was."""
    return lambda tree, moment: age(object_trees.parse_time(field_at(tree, *path)), moment.now)


def condition(type_: str) -> Cell:
    """Return the cell that shows whether a condition is true."""

    def cell(tree: Tree, _: TableContext) -> str:
        found = object_trees.condition(tree, type_)
        return "Unknown" if found is None else str(found.get("status", "Unknown"))

    return cell


def reason(type_: str) -> Cell:
    """Return the cell that shows why a condition is not true; nothing if it is."""

    def cell(tree: Tree, _: TableContext) -> str:
        found = object_trees.condition(tree, type_)
        if found is None or found.get("status") == "True":
            return ""
        words = [str(found.get("reason", "")), str(found.get("message", ""))]
        return ": ".join(word for word in words if word)

    return cell


NAME = Column("NAME", text("metadata", "name"))
AGE = Column("AGE", since("metadata", "creationTimestamp"), is_timeless=False)


_COMMIT_SHOWN = 12


def _ready(deployment: Tree, _: TableContext) -> str:
    status = deployment.get("status")
    wanted = field_at(deployment, "spec", "replicas")
    if field_at(deployment, "spec", "autoscaling") is not None and status is not None:
        wanted = status.get("desiredReplicas", 0)
    return f"{field_at(status, 'readyReplicas') or 0}/{1 if wanted is None else wanted}"


def _served_names(deployment: Tree, _: TableContext) -> str:
    names = (object_trees.name_of(deployment), *(field_at(deployment, "spec", "servedNames") or ()))
    return ",".join(dict.fromkeys(names))


def _size(group: Tree, _: TableContext) -> str:
    return str(field_at(group, "spec", "size") or len(field_at(group, "spec", "members") or ()))


def _members(group: Tree, _: TableContext) -> str:
    """Return who is listed in a group; of a selector how many it finds."""
    members = field_at(group, "spec", "members")
    if members:
        return ",".join(member["node"] for member in members)
    status = group.get("status")
    return "?" if status is None else f"{status.get('members', 0)} selected"


def _replicas(group: Tree, _: TableContext) -> str:
    """Return what runs on a group."""
    status = group.get("status")
    return "?" if status is None else ",".join(status.get("replicas") or ()) or "-"


def _nodes(pool: Tree, _: TableContext) -> str:
    status = pool.get("status")
    return "?" if status is None else str(status.get("nodes", 0))


def _shares(backends: Sequence[Tree]) -> str:
    return ",".join(f"{one['deployment']}={one.get('weight', 1)}" for one in backends)


def _rule(rule: Tree) -> str:
    """Return which headers lead where: `x-team=research,x-beta -> qwen=1`."""
    headers = (
        h["name"] if h.get("value") is None else f"{h['name']}={h['value']}"
        for h in rule["headers"]
    )
    return f"{','.join(headers)} -> {_shares(rule['backends'])}"


def _backends(route: Tree, _: TableContext) -> str:
    return _shares(field_at(route, "spec", "backends") or ())


def _rules(route: Tree, _: TableContext) -> str:
    return "; ".join(_rule(rule) for rule in field_at(route, "spec", "rules") or ())


def _revision(source: Tree, _: TableContext) -> str:
    """Return `main@0123456789ab`: as much of a commit as tells it from others."""
    branch, at_sign, commit = (field_at(source, "status", "appliedRevision") or "").rpartition("@")
    return f"{branch}{at_sign}{commit[:_COMMIT_SHOWN]}"


def _limit(field: str) -> Cell:
    return lambda key, _: str(field_at(key, "spec", field) or "-")


def _models(key: Tree, _: TableContext) -> str:
    return ",".join(field_at(key, "spec", "models") or ()) or "<all>"


def _expiry(key: Tree, moment: TableContext) -> str:
    expires = object_trees.parse_time(field_at(key, "spec", "expires"))
    if expires is None:
        return "never"
    # As an age, but of what is still to come.
    return "expired" if expires <= moment.now else f"in {age(moment.now, expires)}"


DECLARED_COLUMNS: dict[str, Columns] = {
    "ModelDeployment": (
        NAME,
        Column("READY", _ready),
        Column("AVAILABLE", condition("Available")),
        AGE,
        Column("MODEL", text("spec", "model", "path"), is_wide=True),
        Column("SERVED NAMES", _served_names, is_wide=True),
        Column("WHY", reason("Available"), is_wide=True),
    ),
    "NodePool": (
        NAME,
        Column("READY", condition("Ready")),
        Column("NODES", _nodes),
        AGE,
    ),
    "ShardGroup": (
        NAME,
        Column("READY", condition("Ready")),
        Column("SIZE", _size),
        Column("MEMBERS", _members),
        Column("BACKEND", text("spec", "backend")),
        Column("REPLICAS", _replicas),
        AGE,
        Column("PARALLELISM", text("spec", "parallelism"), is_wide=True),
        Column("RESERVATION", text("spec", "reservation"), is_wide=True),
        Column("WHY", reason("Ready"), is_wide=True),
    ),
    "ModelRoute": (
        NAME,
        Column("MODEL", text("spec", "model")),
        Column("ACCEPTED", condition("Accepted")),
        Column("BACKENDS", _backends),
        Column("FALLBACKS", texts("spec", "fallbacks")),
        AGE,
        Column("RULES", _rules, is_wide=True),
        Column("WHY", reason("Accepted"), is_wide=True),
    ),
    "GitSource": (
        NAME,
        Column("READY", condition("Ready")),
        Column("REVISION", _revision, wide_cell=text("status", "appliedRevision")),
        AGE,
        Column("REPOSITORY", text("spec", "repository"), is_wide=True),
        Column("PATH", text("spec", "path"), is_wide=True),
        Column("WHY", reason("Ready"), is_wide=True),
    ),
    "ApiKey": (
        NAME,
        Column("MODELS", _models),
        Column("REQUESTS/MIN", _limit("requestsPerMinute")),
        Column("TOKENS/MIN", _limit("tokensPerMinute")),
        Column("AT ONCE", _limit("concurrency")),
        Column("ADMIN", lambda key, _: "yes" if field_at(key, "spec", "isAdmin") else ""),
        AGE,
        Column("EXPIRES", _expiry, is_timeless=False),
    ),
}


_PROOF = (
    *("weightsBytes", "kvCacheBytes", "activationBytes", "overheadBytes"),
    *("prefixCacheBytes", "adapterBytes", "draftBytes"),
)


def _node_ready(node: Tree, moment: TableContext) -> str:
    words = ["Ready" if object_trees.name_of(node) in moment.ready_nodes else "NotReady"]
    if field_at(node, "spec", "unschedulable"):
        words.append("Cordoned")
    if field_at(node, "spec", "draining"):
        words.append("Draining")
    words += [
        str(one.get("type"))
        for one in object_trees.conditions_of(node)
        if one.get("status") == "True" and one.get("type") != "Ready"
    ]
    return ",".join(words)


def _node_field(field: str) -> Cell:
    def cell(node: Tree, _: TableContext) -> str:
        return UNKNOWN if node.get("status") is None else str(field_at(node, "status", field))

    return cell


def _node_bytes(field: str) -> Cell:
    def cell(node: Tree, _: TableContext) -> str:
        status = node.get("status")
        return UNKNOWN if status is None else sizes.show(int(status[field]))

    return cell


def _ranks(replica: Tree, _: TableContext) -> str:
    return ",".join(rank["node"] for rank in field_at(replica, "spec", "ranks") or ())


def _memory(replica: Tree, _: TableContext) -> str:
    return sizes.show(
        sum(_proven_bytes(rank["memory"]) for rank in field_at(replica, "spec", "ranks") or ())
    )


def _proven_bytes(proof: Tree) -> int:
    """Return a rank's bytes, as schemas.replica.MemoryProof.total_bytes."""
    return int(proof.get("overrideBytes") or sum(proof.get(part) or 0 for part in _PROOF))


def _formation(replica: Tree, _: TableContext) -> str:
    """Return how a replica's ranks work together: `Tensor x2 ring, epoch 3, fallback 1`."""
    made = field_at(replica, "spec", "formation")
    if made is None:
        return "-"
    back = f", fallback {made['fallback']}" if made.get("fallback") else ""
    ranks = len(replica["spec"]["ranks"])
    return f"{made['parallelism']} x{ranks} {made['backend']}, epoch {made['epoch']}{back}"


def _test_nodes(test: Tree, _: TableContext) -> str:
    return ",".join(seat["node"] for seat in field_at(test, "spec", "seats") or ())


def _involved_object(event: Tree, _: TableContext) -> str:
    return f"{field_at(event, 'spec', 'about', 'kind')}/{field_at(event, 'spec', 'about', 'name')}"


OBSERVED_COLUMNS: dict[str, Columns] = {
    "Node": (
        NAME,
        Column("STATUS", _node_ready),
        Column("CHIP", _node_field("chip")),
        Column("MEMORY", _node_bytes("memoryBytes")),
        Column("FOR MODELS", _node_bytes("allocatableBytes")),
        AGE,
        Column("CPU", _node_field("cpuCores"), is_wide=True),
        Column("GPU", _node_field("gpuCores"), is_wide=True),
        Column("OS", _node_field("osVersion"), is_wide=True),
        Column("ADDRESS", _node_field("address"), is_wide=True),
        Column("VERSION", _node_field("agentVersion"), is_wide=True),
    ),
    "Replica": (
        NAME,
        Column("READY", condition("Ready")),
        Column("NODE", _ranks),
        Column("MEMORY", _memory),
        AGE,
        Column("TOGETHER", _formation, is_wide=True),
        Column("WHY", reason("Ready"), is_wide=True),
    ),
    "Endpoint": (
        NAME,
        Column("NODE", text("spec", "node")),
        Column("URL", text("spec", "url")),
        Column("SERVED NAMES", texts("spec", "servedNames")),
    ),
    "Revision": (
        NAME,
        Column("DEPLOYMENT", text("spec", "deployment")),
        Column("REVISION", text("spec", "revision")),
        AGE,
    ),
    "Event": (
        Column("LAST SEEN", since("spec", "lastSeen"), is_timeless=False),
        Column("TYPE", text("spec", "type")),
        Column("REASON", text("spec", "reason")),
        Column("OBJECT", _involved_object),
        Column("COUNT", number("spec", "count"), is_wide=True),
        Column("SOURCE", text("spec", "source"), is_wide=True),
        Column("MESSAGE", text("spec", "message")),
    ),
    "FabricTest": (
        NAME,
        Column("BACKEND", text("spec", "formation", "backend")),
        Column("NODES", _test_nodes),
        AGE,
    ),
}
