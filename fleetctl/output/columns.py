"""The table columns of every kind. Pure; works on trees, and imports no type of a kind."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, TypeAlias

from fleetctl.objects.table_context import TableContext
from schemas import chips, sizes
from store import object_trees
from store.object_trees import Tree, field_at

UNKNOWN = "<unknown>"


Cell: TypeAlias = Callable[[Tree, TableContext], str]


class Column(NamedTuple):
    """One column; wide columns are shown with `-o wide` only."""

    title: str
    cell: Cell
    is_wide: bool = False
    is_timeless: bool = True
    """True if the cell stays the same when only time passes."""
    wide_cell: Cell | None = None
    """The cell for `-o wide`, if it differs."""


Columns: TypeAlias = tuple[Column, ...]

_LONGEST_WHY = 120
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"))


def age(then: datetime | None, now: datetime) -> str:
    """Return an age as kubectl writes it: 45s, 12m, 3h, 2d."""
    if then is None:
        return UNKNOWN
    seconds = max(0, int((now - then).total_seconds()))
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def text(*path: str) -> Cell:
    """Return a cell with the value of a field; empty if it is missing."""

    def cell(tree: Tree, _: TableContext) -> str:
        found = field_at(tree, *path)
        return "" if found is None else str(found)

    return cell


def number(*path: str) -> Cell:
    """Return a cell with a count; 0 if it is missing, the default of every count."""
    return lambda tree, _: str(field_at(tree, *path) or 0)


def texts(*path: str) -> Cell:
    """Return a cell with a list, separated by commas."""
    return lambda tree, _: ",".join(map(str, field_at(tree, *path) or ()))


def since(*path: str) -> Cell:
    """Return a cell with the age of a time."""
    return lambda tree, context: age(object_trees.parse_time(field_at(tree, *path)), context.now)


def condition(type_: str) -> Cell:
    """Return a cell with the status of a condition."""

    def cell(tree: Tree, _: TableContext) -> str:
        found = object_trees.condition(tree, type_)
        return "Unknown" if found is None else str(found.get("status", "Unknown"))

    return cell


def reason(type_: str) -> Cell:
    """Return a cell with the reason why a condition is not true; empty if it is true."""

    def cell(tree: Tree, _: TableContext) -> str:
        found = object_trees.condition(tree, type_)
        if found is None or found.get("status") == "True":
            return ""
        return _reason_text(found)

    return cell


def _reason_text(found: Tree) -> str:
    """Return `REASON: MESSAGE` of a condition."""
    words = (str(found.get("reason", "")), str(found.get("message", "")))
    return ": ".join(word for word in words if word)


_available_reason = reason("Available")


def _deployment_why(deployment: Tree, context: TableContext) -> str:
    """Return why a deployment is not available, or else why its newest version does not serve everywhere."""
    why = _available_reason(deployment, context)
    rollout = object_trees.condition(deployment, "Progressing")
    if why or rollout is None:
        return why
    # A running canary is True, but only a share of the requests reaches the new version.
    is_waiting = rollout.get("reason") in ("CanaryRunning", "Paused")
    is_shown = is_waiting or rollout.get("status") == "False"
    return _reason_text(rollout) if is_shown else ""


NAME = Column("NAME", text("metadata", "name"))
AGE = Column("AGE", since("metadata", "creationTimestamp"), is_timeless=False)


_COMMIT_SHOWN = 12


def _ready(deployment: Tree, _: TableContext) -> str:
    status = deployment.get("status")
    desired = field_at(deployment, "spec", "replicas")
    if field_at(deployment, "spec", "autoscaling") is not None and status is not None:
        desired = status.get("desiredReplicas", 0)
    return f"{field_at(status, 'readyReplicas') or 0}/{1 if desired is None else desired}"


def _served_names(deployment: Tree, _: TableContext) -> str:
    names = (object_trees.name_of(deployment), *(field_at(deployment, "spec", "servedNames") or ()))
    return ",".join(dict.fromkeys(names))


def _size(group: Tree, _: TableContext) -> str:
    return str(field_at(group, "spec", "size") or len(field_at(group, "spec", "members") or ()))


def _members(group: Tree, _: TableContext) -> str:
    """Return the listed members of a group; with a selector, the number of nodes it matches."""
    members = field_at(group, "spec", "members")
    if members:
        return ",".join(member["node"] for member in members)
    status = group.get("status")
    return "?" if status is None else f"{status.get('members', 0)} selected"


def _replicas(group: Tree, _: TableContext) -> str:
    """Return the replicas on a group."""
    status = group.get("status")
    return "?" if status is None else ",".join(status.get("replicas") or ()) or "-"


def _taints(node: Tree, _: TableContext) -> str:
    """Return the taints as `fleetctl taint` takes them."""
    return ",".join(
        f"{one['key']}{'=' if one.get('value') else ''}{one.get('value') or ''}:{one['effect']}"
        for one in field_at(node, "spec", "taints") or ()
    )


def _reserved(pool: Tree, _: TableContext) -> str:
    """Return what is reserved for the owners of the Macs: `memory=8Gi`."""
    reserved = field_at(pool, "spec", "reserved") or {}
    return ",".join(f"{name}={value}" for name, value in reserved.items() if value) or "-"


def _nodes(pool: Tree, _: TableContext) -> str:
    status = pool.get("status")
    return "?" if status is None else str(status.get("nodes", 0))


def _shares(backends: Sequence[Tree]) -> str:
    named = (
        (backend.get("deployment") or f"external/{backend['external']}", backend)
        for backend in backends
    )
    return ",".join(f"{name}={one.get('weight', 1)}" for name, one in named)


def _rule(rule: Tree) -> str:
    """Return a rule as `x-team=research,x-beta -> qwen=1`."""
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
    """Return `main@0123456789ab`, with a shortened commit."""
    branch, at_sign, commit = (field_at(source, "status", "appliedRevision") or "").rpartition("@")
    return f"{branch}{at_sign}{commit[:_COMMIT_SHOWN]}"


def _refused(policy: Tree, _: TableContext) -> str:
    """Return the repositories that clients asked for in vain lately."""
    refusals = field_at(policy, "status", "refusals") or ()
    return ",".join(str(refusal.get("repo")) for refusal in refusals)


def _source_status(source: Tree, _: TableContext) -> str:
    """Return the reason of Ready, such as Applied or Refused; Suspended from the moment when the user says so."""
    if field_at(source, "spec", "suspend"):
        return "Suspended"
    ready = object_trees.condition(source, "Ready")
    return "" if ready is None else str(ready.get("reason", ""))


def _source_problem(source: Tree, context: TableContext) -> str:
    """Return the first line of the message of a source that a person or a commit must fix, cut to the table."""
    if not object_trees.is_true(source, "Stalled"):
        return ""
    first = _source_why(source, context).partition("\n")[0]
    return first if len(first) <= _LONGEST_WHY else f"{first[:_LONGEST_WHY]}..."


def _source_why(source: Tree, _: TableContext) -> str:
    """Return the message of Ready, unless the newest commit is applied."""
    ready = object_trees.condition(source, "Ready")
    is_well = ready is None or ready.get("reason") == "Applied"
    return "" if ready is None or is_well else str(ready.get("message", ""))


def _commit(source: Tree, _: TableContext) -> str:
    """Return `Anna: longer context`, of the applied commit."""
    commit = field_at(source, "status", "appliedCommit")
    parts = (field_at(commit, "author"), field_at(commit, "subject"))
    return ": ".join(str(part) for part in parts if part)


def _limit(field: str) -> Cell:
    return lambda key, _: str(field_at(key, "spec", field) or "-")


def _models(key: Tree, _: TableContext) -> str:
    return ",".join(field_at(key, "spec", "models") or ()) or "<all>"


def _expiry(key: Tree, context: TableContext) -> str:
    expires = object_trees.parse_time(field_at(key, "spec", "expires"))
    if expires is None:
        return "never"
    return "expired" if expires <= context.now else f"in {_remaining(context.now, expires)}"


def _earlier_secret(key: Tree, context: TableContext) -> str:
    """Return for how long an earlier secret of a rotated key is still valid."""
    ends = [
        object_trees.parse_time(one.get("expires"))
        for one in field_at(key, "spec", "previous") or ()
    ]
    moments = [end for end in ends if end is not None and end > context.now]
    return f"for {_remaining(context.now, max(moments))}" if moments else ""


def _model_limits(key: Tree, _: TableContext) -> str:
    return ",".join(sorted(field_at(key, "spec", "modelLimits") or ()))


def _remaining(now: datetime, then: datetime) -> str:
    """Return a time to go in the units of `age`, rounded: a key for 30 days has 30d a second later."""
    seconds = (then - now).total_seconds()
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{round(seconds / size)}{unit}"
    return f"{round(seconds)}s"


def _requests_at_once(deployment: Tree, _: TableContext) -> str:
    """Return how many requests a replica works on at once; the word Auto while no replica says it."""
    placed = field_at(deployment, "status", "concurrency")
    return str(placed or field_at(deployment, "spec", "concurrency") or "Auto")


DECLARED_COLUMNS: dict[str, Columns] = {
    "ModelDeployment": (
        NAME,
        Column("READY", _ready),
        Column("AVAILABLE", condition("Available")),
        AGE,
        Column("MODEL", text("spec", "model", "path"), is_wide=True),
        Column("CONCURRENCY", _requests_at_once, is_wide=True),
        Column("SERVED NAMES", _served_names, is_wide=True),
        Column("WHY", _deployment_why, is_wide=True),
    ),
    "NodePool": (
        NAME,
        Column("READY", condition("Ready")),
        Column("NODES", _nodes),
        AGE,
        Column("RESERVED", _reserved, is_wide=True),
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
    "ModelPolicy": (
        NAME,
        Column("OWNERS", texts("spec", "onDemand", "owners")),
        Column("MODELS", text("status", "models")),
        Column("REFUSED", _refused),
        AGE,
        Column("LICENSES", texts("spec", "onDemand", "licenses"), is_wide=True),
    ),
    "GitSource": (
        NAME,
        Column("READY", condition("Ready")),
        Column("SUSPENDED", lambda source, _: str(bool(field_at(source, "spec", "suspend")))),
        Column("STATUS", _source_status),
        Column("REVISION", _revision, wide_cell=text("status", "appliedRevision")),
        AGE,
        Column("COMMIT", _commit, is_wide=True),
        Column("REPOSITORY", text("spec", "repository"), is_wide=True),
        Column("PATH", text("spec", "path"), is_wide=True),
        Column("WHY", _source_problem, wide_cell=_source_why),
    ),
    "ApiKey": (
        NAME,
        Column("MODELS", _models),
        Column("REQUESTS/MIN", _limit("requestsPerMinute")),
        Column("TOKENS/MIN", _limit("tokensPerMinute")),
        Column("CONCURRENCY", _limit("concurrency")),
        Column("ROLE", text("spec", "role")),
        AGE,
        Column("EXPIRES", _expiry, is_timeless=False),
        Column("EARLIER SECRET", _earlier_secret, is_timeless=False),
        Column("MODEL LIMITS", _model_limits, is_wide=True),
    ),
}


_PROOF = (
    *("weightsBytes", "kvCacheBytes", "activationBytes", "overheadBytes"),
    *("prefixCacheBytes", "adapterBytes", "draftBytes"),
)


def _node_ready(node: Tree, context: TableContext) -> str:
    words = ["Ready" if object_trees.name_of(node) in context.ready_nodes else "NotReady"]
    if field_at(node, "spec", "unschedulable"):
        words.append("Cordoned")
    if field_at(node, "spec", "draining"):
        words.append("Draining")
    words += [
        str(one.get("type"))
        for one in object_trees.conditions_of(node)
        if one.get("status") == "True" and one.get("type") not in ("Ready", "FabricHealthy")
    ]
    return ",".join(words)


def _node_field(field: str) -> Cell:
    def cell(node: Tree, _: TableContext) -> str:
        return UNKNOWN if node.get("status") is None else str(field_at(node, "status", field))

    return cell


def _node_mlx_build(node: Tree, _: TableContext) -> str:
    """Return the oldest macOS that its MLX is built for, and what the build can do: "26.2,jaccl,nax"."""
    build = field_at(node, "status", "mlxBuild")
    if not build:
        return UNKNOWN
    words = [name for name in ("jaccl", "nax") if build.get(f"has{name.title()}")]
    return ",".join((str(build.get("minimumSystem") or build.get("tag") or "?"), *words))


def _node_tiers(node: Tree, _: TableContext) -> str:
    """Return the size tiers of models whose minimum the Mac has."""
    if node.get("status") is None:
        return UNKNOWN
    cores, memory = field_at(node, "status", "gpuCores"), field_at(node, "status", "memoryBytes")
    return ",".join(chips.supported_tiers(gpu_cores=cores, memory_bytes=memory)) or "-"


def _node_bytes(field: str) -> Cell:
    def cell(node: Tree, _: TableContext) -> str:
        status = node.get("status")
        return UNKNOWN if status is None else sizes.show(int(status[field]))

    return cell


def _node_for_models(node: Tree, context: TableContext) -> str:
    """Return the memory for models, without what pools reserve for the owner."""
    status = node.get("status")
    if status is None:
        return UNKNOWN
    pools = context.node_pools.get(object_trees.name_of(node))
    reserved = 0 if pools is None else pools.reserved_bytes
    return sizes.show(max(0, int(status["allocatableBytes"]) - reserved))


def _node_pools(node: Tree, context: TableContext) -> str:
    pools = context.node_pools.get(object_trees.name_of(node))
    return "-" if pools is None or not pools.names else ",".join(pools.names)


def _ranks(replica: Tree, _: TableContext) -> str:
    return ",".join(rank["node"] for rank in field_at(replica, "spec", "ranks") or ())


def _fetch(replica: Tree, _: TableContext) -> str:
    """Return the progress of the replica's fetches together: `25 % of 4.0 GiB`; "-" if none runs."""
    running = field_at(replica, "status", "fetches") or ()
    total = sum(one["totalBytes"] for one in running)
    if not total:
        return "-"
    present = sum(one["presentBytes"] for one in running)
    return f"{100 * present // total} % of {sizes.show(total)}"


def _fetch_sources(replica: Tree, _: TableContext) -> str:
    running = field_at(replica, "status", "fetches") or ()
    return ",".join(dict.fromkeys(one["source"] for one in running if one.get("source"))) or "-"


def _memory(replica: Tree, _: TableContext) -> str:
    return sizes.show(
        sum(_proven_bytes(rank["memory"]) for rank in field_at(replica, "spec", "ranks") or ())
    )


def _proven_bytes(proof: Tree) -> int:
    """Return the bytes of a rank, computed as in schemas.replica.MemoryProof.total_bytes."""
    return int(proof.get("overrideBytes") or sum([proof.get(part) or 0 for part in _PROOF]))


def _formation(replica: Tree, _: TableContext) -> str:
    """Return how the ranks of a replica are formed: `Tensor x2 ring, epoch 3, fallback 1`."""
    formation = field_at(replica, "spec", "formation")
    if formation is None:
        return "-"
    back = f", fallback {formation['fallback']}" if formation.get("fallback") else ""
    ranks = len(replica["spec"]["ranks"])
    return f"{formation['parallelism']} x{ranks} {formation['backend']}, epoch {formation['epoch']}{back}"


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
        Column("FOR MODELS", _node_for_models),
        AGE,
        Column("CPU", _node_field("cpuCores"), is_wide=True),
        Column("GPU", _node_field("gpuCores"), is_wide=True),
        Column("MODEL SIZES", _node_tiers, is_wide=True),
        Column("OS", _node_field("osVersion"), is_wide=True),
        Column("MLX BUILD", _node_mlx_build, is_wide=True),
        Column("ADDRESS", _node_field("address"), is_wide=True),
        Column("TAINTS", _taints, is_wide=True),
        Column("POOLS", _node_pools, is_wide=True),
        Column("FABRIC HEALTHY", condition("FabricHealthy"), is_wide=True),
        Column("VERSION", _node_field("agentVersion"), is_wide=True),
    ),
    "Replica": (
        NAME,
        Column("READY", condition("Ready")),
        Column("NODE", _ranks),
        Column("MEMORY", _memory),
        Column("DOWNLOAD", _fetch),
        Column("TEMPLATE", text("spec", "template")),
        AGE,
        Column("DOWNLOAD FROM", _fetch_sources, is_wide=True),
        Column("SHARDING", _formation, is_wide=True),
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
