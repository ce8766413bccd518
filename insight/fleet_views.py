"""Rows of a fleet's views: Macs, models, replicas, groups, Git sources, processes, conditions, problems, events. Pure.

A row is a JSON object whose `name` is unique within its view. `affected` maps a changed key of the store to the rows
that it may change, so that a recorder computes those alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from insight import conditions, root_cause
from insight.conditions import ObjectCondition, Row, condition_row, names_text
from insight.fleet_caches import FleetCaches
from insight.mac_state import is_connected, mac_state, silent_since
from insight.memory_fills import fills_of
from reconciler.listers.caches import BY_DEPLOYMENT, BY_KIND, BY_NODE, REVISIONS
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentStatus,
    served_names,
)
from schemas.gitsource import GitCommit, GitSource, GitSourceStatus
from schemas.meta import Condition, ConditionStatus, ObjectMeta, Status, find_condition
from schemas.node import Node, NodeStatus, Taint, effective_labels
from schemas.pools import NodePool, in_pool
from schemas.quantity import requests_at_once
from schemas.replica import Replica, ReplicaStatus
from schemas.shardgroup import ShardGroup, ShardGroupStatus
from store import keys

ViewKey: TypeAlias = tuple[str, str]
"""A view and the name of one of its rows."""

VIEWS: Final = (
    "macs",
    "models",
    "replicas",
    "groups",
    "gitSources",
    "gateways",
    "reconcilers",
    "dashboards",
    "conditions",
    "problems",
    "events",
)
_VERSIONS: Final = ("agentVersion", "mlxVersion", "osVersion")
_VIEW_OF_KIND: Final = {
    "Node": "macs",
    "ModelDeployment": "models",
    "Replica": "replicas",
    "ShardGroup": "groups",
    "GitSource": "gitSources",
}
# Views whose rows are the keys below a prefix, and where those are.
_OWN_KEYS: Final[Mapping[str, tuple[str, Callable[[FleetCaches], Iterable[str]]]]] = {
    "gateways": (keys.GATEWAY_LEASE_PREFIX, lambda caches: caches.gateways.items),
    "reconcilers": (keys.RECONCILER_LEASE_PREFIX, lambda caches: caches.reconcilers.items),
    "dashboards": (keys.DASHBOARD_LEASE_PREFIX, lambda caches: caches.dashboards.items),
    "events": (keys.EVENT_PREFIX, lambda caches: caches.events.items),
}


def row(caches: FleetCaches, view: str, name: str) -> Row | None:
    """Return one row; None if there is no such thing (any more)."""
    found: Row | None = _MAKERS[view](caches, name)
    return found


def names(caches: FleetCaches, view: str) -> list[str]:
    """Return the names of all rows of a view, in order."""
    if view == "macs":
        return _node_names(caches)
    if view in _OWN_KEYS:
        prefix, keys_of = _OWN_KEYS[view]
        return sorted(key.removeprefix(prefix) for key in keys_of(caches))
    kind = next(kind for kind, of_view in _VIEW_OF_KIND.items() if of_view == view)
    specs = caches.objects.specs.by_index(BY_KIND, kind)
    return [keys.kind_and_name(key)[1] for key in specs]


def rows(caches: FleetCaches, view: str) -> list[Row]:
    """Return all rows of a view, in order of their names."""
    if view == "conditions":
        return [condition_row(found, caches) for found in conditions.all_conditions(caches)]
    if view == "problems":
        return problem_rows(caches)
    found = (row(caches, view, name) for name in names(caches, view))
    return [one for one in found if one is not None]


def affected(caches: FleetCaches, key: str) -> set[ViewKey]:
    """Return the rows that a change of a key may change; conditions are named by their object, `Kind/name`."""
    for own_view, (prefix, _) in _OWN_KEYS.items():
        if key.startswith(prefix):
            return {(own_view, key.removeprefix(prefix))}
    if key.startswith((keys.RANK_PREFIX, keys.ENDPOINT_PREFIX)):
        return _of_replica(caches, keys.replica_of(key))
    try:
        kind, name = keys.kind_and_name(key)
    except ValueError:
        # All problems are computed together.
        return {("problems", "")} if key.startswith(keys.ELECTION_RECONCILER) else set()
    if key == keys.spec_key("NodePool", name):
        return {("conditions", f"NodePool/{name}")} | {("macs", one) for one in _node_names(caches)}
    if kind == "Replica":
        return {*_of_replica(caches, name), ("conditions", f"Replica/{name}")}
    view = _VIEW_OF_KIND.get(kind)
    view_keys: set[ViewKey] = {("conditions", f"{kind}/{name}")}
    return view_keys if view is None else {*view_keys, (view, name)}


def _of_replica(caches: FleetCaches, name: str) -> set[ViewKey]:
    replica = caches.objects.specs.items.get(keys.spec_key("Replica", name))
    view_keys: set[ViewKey] = {("replicas", name)}
    if not isinstance(replica, Replica):
        # It is deleted: its deployment and its nodes are no longer known here.
        deployment = name.rpartition("-")[0]
        view_keys |= {("macs", node) for node in _node_names(caches)}
    else:
        deployment = replica.spec.deployment
        view_keys |= {("macs", rank.node) for rank in replica.spec.ranks}
        view_keys |= {("macs", leaving_rank.node) for leaving_rank in replica.spec.leaving}
    return {*view_keys, ("models", deployment)}


def _ids(items: Mapping[str, Any], prefix: str) -> list[str]:
    return [key.removeprefix(prefix) for key in items]


def _node_names(caches: FleetCaches) -> list[str]:
    objects = caches.objects
    prefix = keys.status_prefix("Node")
    found = {keys.kind_and_name(key)[1] for key in objects.specs.by_index(BY_KIND, "Node")}
    found |= {key.removeprefix(prefix) for key in objects.statuses.by_index(BY_KIND, "Node")}
    return sorted(found | set(_ids(objects.leases.items, keys.NODE_LEASE_PREFIX)))


def _mac(caches: FleetCaches, name: str) -> Row | None:
    objects = caches.objects
    spec = objects.specs.items.get(keys.spec_key("Node", name))
    status = objects.statuses.items.get(keys.status_key("Node", name))
    is_alive = keys.node_lease_key(name) in objects.leases.items
    life = _life(caches, name)
    if spec is None and status is None and not is_alive:
        return None
    node = spec if isinstance(spec, Node) else None
    report = status if isinstance(status, NodeStatus) else None
    replicas = [
        api_object
        for api_object in objects.specs.by_index(BY_NODE, name).values()
        if isinstance(api_object, Replica)
    ]
    proofs = [
        rank.memory for replica in replicas for rank in replica.spec.ranks if rank.node == name
    ]
    promised = sum(proof.total_bytes for proof in proofs) + sum(
        leaving_rank.memory_bytes
        for replica in replicas
        for leaving_rank in replica.spec.leaving
        if leaving_rank.node == name
    )
    state, why = mac_state(is_alive=is_alive, report=report, life=life)
    found: Row = {
        "name": name,
        "state": state,
        "reason": why,
        "silentSince": None if is_alive else silent_since(life),
        "isCordoned": node is not None and node.spec.unschedulable,
        "isDraining": node is not None and node.spec.draining,
        "taints": [] if node is None else [_taint_row(taint) for taint in node.spec.taints],
        "promisedBytes": promised,
        "weightsBytes": sum(proof.weights_bytes for proof in proofs),
        "kvBytes": sum(proof.kv_cache_bytes for proof in proofs),
        "fills": fills_of(caches, name, replicas),
        "models": sorted({replica.spec.deployment for replica in replicas}),
        "replicas": sorted(replica.name for replica in replicas),
    }
    pools = {"pools": _pools(caches, node or Node(metadata=ObjectMeta(name=name)), report)}
    return {**found, **_hardware(report), **_site(node, report), **pools}


def _pools(caches: FleetCaches, node: Node, report: NodeStatus | None) -> list[str]:
    """Return the names of the pools that a Mac belongs to."""
    reported = node.model_copy(update={"status": report})
    pools = caches.objects.specs.by_index(BY_KIND, "NodePool").values()
    return sorted(
        pool.name for pool in pools if isinstance(pool, NodePool) and in_pool(pool, reported)
    )


def _taint_row(taint: Taint) -> Row:
    return {"key": taint.key, "value": taint.value, "effect": taint.effect}


def _life(caches: FleetCaches, name: str) -> Status | None:
    return caches.objects.lives.items.get(keys.node_life_key(name))


def _conditions(status: Status | None) -> tuple[Condition, ...]:
    return () if status is None else status.conditions


def _hardware(report: NodeStatus | None) -> Row:
    """Return what the agent reported of its machine; nulls before it has."""
    return {
        "hostname": None if report is None else report.hostname,
        "address": None if report is None else report.address,
        "agentUrl": None if report is None else report.agent_url or None,
        "chip": None if report is None else report.chip,
        "cpuCores": None if report is None else report.cpu_cores,
        "gpuCores": None if report is None else report.gpu_cores,
        "memoryBytes": None if report is None else report.memory_bytes,
        "allocatableBytes": None if report is None else report.allocatable_bytes,
        "diskFreeBytes": None if report is None else report.disk_free_bytes or None,
        "modelsOnDisk": [] if report is None else _models_on_disk(report),
        "power": None if report is None else report.power,
        "osVersion": None if report is None else f"{report.os} {report.os_version}",
        "agentVersion": None if report is None else report.agent_version,
        "mlxVersion": None if report is None else report.mlx_version or None,
    }


def _models_on_disk(report: NodeStatus) -> list[Row]:
    """Return the deployed models that a Mac has, with the size of their weights, or what it lacks of them."""
    return [
        {
            "path": model.path,
            "bytes": None if model.geometry is None else model.geometry.weights_bytes,
            "missingBytes": model.missing_bytes,
            "problem": model.message or model.reason or model.fetch_problem,
        }
        for model in report.models
    ]


def _site(node: Node | None, report: NodeStatus | None) -> Row:
    if node is None:
        labels = {} if report is None else dict(report.labels)
    else:
        labels = effective_labels(node.model_copy(update={"status": report}))
    return {"site": labels.get("site"), "labels": labels}


def _model(caches: FleetCaches, name: str) -> Row | None:
    objects = caches.objects
    spec = objects.specs.items.get(keys.spec_key("ModelDeployment", name))
    if not isinstance(spec, ModelDeployment):
        return None
    item = objects.statuses.items.get(keys.status_key("ModelDeployment", name))
    status = item if isinstance(item, ModelDeploymentStatus) else ModelDeploymentStatus()
    placed = objects.specs.by_index(BY_DEPLOYMENT, name).values()
    replicas = [api_object for api_object in placed if isinstance(api_object, Replica)]
    available = find_condition(status.conditions, "Available")
    trouble = _trouble("ModelDeployment", name, status)
    loading = status.loading
    return {
        "name": name,
        "source": spec.spec.model.label,
        "servedNames": list(served_names(spec)),
        "desired": status.desired_replicas if item is not None else spec.spec.replicas,
        "placed": status.replicas,
        "ready": status.ready_replicas,
        "updated": status.updated_replicas,
        "revision": status.revision,
        "isAvailable": available is not None and available.status == ConditionStatus.TRUE,
        "reason": "" if trouble is None else f"{trouble.reason}: {trouble.message}",
        "loadsInSeconds": None if loading is None else loading.seconds,
        "loadsSince": None if loading is None else loading.since.isoformat(),
        "givesWay": [] if loading is None else list(loading.gives_way),
        "isAutoscaled": spec.spec.autoscaling is not None,
        "scaling": _scaling(spec, status),
        "canary": _canary(spec, status),
        "isPaused": spec.spec.rollout.paused,
        "canUndo": len(objects.specs.by_index(REVISIONS, name)) > 1,
        "hasCanary": status.canary is not None and status.canary.outcome == "Running",
        "contextLength": spec.spec.context_length,
        "concurrency": requests_at_once(spec.spec.concurrency, status.concurrency),
        "queueLimit": _queue_limit(spec),
        "kvBits": None if spec.spec.kv_cache is None else spec.spec.kv_cache.bits,
        "vision": _vision(spec),
        "macs": sorted({rank.node for replica in replicas for rank in replica.spec.ranks}),
        "replicas": sorted(replica.name for replica in replicas),
        "isDeleted": spec.metadata.deletion_timestamp is not None,
    }


def _vision(deployment: ModelDeployment) -> Row | None:
    """Return the limits of images in requests; None if the model reads text only."""
    vision = deployment.spec.model.vision
    return None if vision is None else vision.model_dump(mode="json", by_alias=True)


def _scaling(deployment: ModelDeployment, status: ModelDeploymentStatus) -> str:
    """Return why an autoscaled deployment has its number of replicas; empty for others."""
    bounds = deployment.spec.autoscaling
    if bounds is None:
        return ""
    condition = find_condition(status.conditions, "Scaling")
    why = "" if condition is None else f": {condition.message or condition.reason}"
    return f"between {bounds.min_replicas} and {bounds.max_replicas}{why}"


def _canary(deployment: ModelDeployment, status: ModelDeploymentStatus) -> Row | None:
    """Return the steps of a trial of a new version, the one in progress, and what was measured."""
    canary, canary_status = deployment.spec.rollout.canary, status.canary
    if canary is None or canary_status is None:
        return None
    return {
        "weights": [step.weight for step in canary.steps],
        "step": canary_status.step,
        "since": canary_status.since.isoformat(),
        "outcome": canary_status.outcome,
        "message": canary_status.message,
    }


def _queue_limit(deployment: ModelDeployment) -> int | None:
    """Return how many requests may wait at a gateway; None if their number at engines is not limited."""
    queueing = deployment.spec.routing.queueing
    return None if queueing is None or queueing.concurrency is None else queueing.depth


def _replica(caches: FleetCaches, name: str) -> Row | None:
    objects = caches.objects
    spec = objects.specs.items.get(keys.spec_key("Replica", name))
    if not isinstance(spec, Replica):
        return None
    item = objects.statuses.items.get(keys.status_key("Replica", name))
    status = item if isinstance(item, ReplicaStatus) else ReplicaStatus()
    ready = find_condition(status.conditions, "Ready")
    ranks = [
        objects.ranks.items.get(keys.rank_key(rank.node, name, number))
        for number, rank in enumerate(spec.spec.ranks)
    ]
    formation = spec.spec.formation
    created = spec.metadata.creation_timestamp
    first = spec.spec.ranks[0].node
    return {
        "name": name,
        "deployment": spec.spec.deployment,
        "macs": [rank.node for rank in spec.spec.ranks],
        "group": None if formation is None else formation.group,
        "epoch": None if formation is None else formation.epoch,
        "template": spec.spec.template,
        "created": None if created is None else created.isoformat(),
        "isReady": ready is not None and ready.status == ConditionStatus.TRUE,
        "reason": "" if ready is None else ready.reason,
        "message": "" if ready is None else ready.message,
        "fetches": [fetch_status.text for fetch_status in status.fetches],
        "restarts": sum(rank_status.restarts for rank_status in ranks if rank_status is not None),
        "memoryBytes": sum(rank.memory.total_bytes for rank in spec.spec.ranks),
        "hasEndpoint": keys.endpoint_key(first, name) in objects.endpoints.items,
    }


def _group(caches: FleetCaches, name: str) -> Row | None:
    objects = caches.objects
    spec = objects.specs.items.get(keys.spec_key("ShardGroup", name))
    if not isinstance(spec, ShardGroup):
        return None
    item = objects.statuses.items.get(keys.status_key("ShardGroup", name))
    status = item if isinstance(item, ShardGroupStatus) else ShardGroupStatus()
    checked = status.fabric_checks[-1] if status.fabric_checks else None
    trouble = _trouble("ShardGroup", name, status)
    return {
        "name": name,
        "backend": spec.spec.backend,
        "parallelism": spec.spec.parallelism,
        "size": spec.spec.wanted_size,
        "listed": [member.node for member in spec.spec.members],
        "members": status.members,
        "readyMembers": status.ready_members,
        "replicas": list(status.replicas),
        "lastCheck": None if checked is None else checked.outcome,
        "gbPerSecond": None if checked is None else checked.gb_per_second,
        "reason": "" if trouble is None else f"{trouble.reason}: {trouble.message}",
    }


def _git_source(caches: FleetCaches, name: str) -> Row | None:
    source = caches.objects.specs.items.get(keys.spec_key("GitSource", name))
    if not isinstance(source, GitSource):
        return None
    item = caches.objects.statuses.items.get(keys.status_key("GitSource", name))
    status = item if isinstance(item, GitSourceStatus) else GitSourceStatus()
    newest, applied = status.observed_commit or GitCommit(), status.applied_commit or GitCommit()
    ready = find_condition(status.conditions, "Ready")
    return {
        "name": name,
        "repository": source.spec.repository,
        "path": source.spec.path,
        "isSuspended": source.spec.suspend,
        "isReady": ready is not None and ready.status is ConditionStatus.TRUE,
        "reason": "" if ready is None else ready.reason,
        "observedRevision": status.observed_revision,
        "observedSubject": newest.subject,
        "appliedRevision": status.applied_revision,
        "appliedSubject": applied.subject,
        "appliedAt": None if status.applied_at is None else status.applied_at.isoformat(),
        "objects": [f"{entry.kind}/{entry.name}" for entry in status.inventory],
        "drift": [drift.model_dump(mode="json", by_alias=True) for drift in status.drift],
    }


def _gateway(caches: FleetCaches, id_: str) -> Row | None:
    lease = caches.gateways.items.get(keys.named(keys.GATEWAY_LEASE_PREFIX, id_))
    if lease is None:
        return None
    return {
        "name": id_,
        "url": lease.url,
        "version": lease.version,
        "asksForKeys": lease.asks_for_keys,
        "isTls": lease.url.startswith("https:"),
        "insecureFlags": list(lease.insecure_flags),
    }


def _reconciler(caches: FleetCaches, id_: str) -> Row | None:
    lease = caches.reconcilers.items.get(keys.named(keys.RECONCILER_LEASE_PREFIX, id_))
    if lease is None:
        return None
    return {
        "name": id_,
        "identity": lease.identity,
        "version": lease.identity.rpartition(" ")[2],
        "url": lease.url,
        "isTls": lease.url.startswith("https:"),
    }


def _dashboard(caches: FleetCaches, id_: str) -> Row | None:
    lease = caches.dashboards.items.get(keys.named(keys.DASHBOARD_LEASE_PREFIX, id_))
    if lease is None:
        return None
    return {"name": id_, "url": lease.url, "version": lease.version}


def _event(caches: FleetCaches, name: str) -> Row | None:
    item = caches.events.items.get(f"{keys.EVENT_PREFIX}{name}")
    if item is None:
        return None
    spec = item.spec
    return {
        "name": name,
        "kind": spec.about.kind,
        "object": spec.about.name,
        "type": spec.type,
        "reason": spec.reason,
        "message": spec.message,
        "source": spec.source,
        "count": spec.count,
        "firstSeen": spec.first_seen.isoformat(),
        "lastSeen": spec.last_seen.isoformat(),
    }


def _trouble(kind: str, name: str, status: Status) -> Condition | None:
    """Return the first condition of an object that is a problem."""
    found = (one for one in status.conditions if ObjectCondition(kind, name, one).is_problem)
    return next(found, None)


def conditions_of(caches: FleetCaches, kind: str, name: str) -> list[Row]:
    """Return the rows of all conditions of one object."""
    return [condition_row(found, caches) for found in conditions.conditions_of(caches, kind, name)]


def problem_rows(caches: FleetCaches, measured: Iterable[ObjectCondition] = ()) -> list[Row]:
    """Return the rows of all problems, those first for which clients are refused; see `root_cause.find_problems`."""
    return [problem.row for problem in root_cause.find_problems(caches, measured)]


_MAKERS: Final[Mapping[str, Any]] = {
    "macs": _mac,
    "models": _model,
    "replicas": _replica,
    "groups": _group,
    "gitSources": _git_source,
    "gateways": _gateway,
    "reconcilers": _reconciler,
    "dashboards": _dashboard,
    "events": _event,
}


def columns(found: Sequence[Row]) -> list[str]:
    """Return the columns of rows, in the order of the first one."""
    return list(found[0]) if found else []


def summary(caches: FleetCaches) -> Row:
    """Return the counts of a fleet and its health in one sentence."""
    found = {view: rows(caches, view) for view in ("macs", "models", "problems")}
    return summary_of(caches, found)


def summary_of(
    caches: FleetCaches,
    found: Mapping[str, Sequence[Row]],
    silent_gateways: Mapping[str, str] = MappingProxyType({}),
) -> Row:
    """Return the summary of rows of the views macs, models and problems that are known already.

    `silent_gateways` has the name of each gateway that does not answer, and why.
    """
    macs, models = found["macs"], found["models"]
    counts = dict.fromkeys(("online", "degraded", "asleep", "offline"), 0)
    for one in macs:
        counts[str(one["state"])] += 1
    leader = next(iter(caches.leader.items.values()), "")
    wanted = [model for model in models if int(str(model["desired"])) > 0]
    return {
        "sentence": sentence(caches, macs, models, silent_gateways),
        "macs": {"total": len(macs), **counts},
        "models": {"total": len(models), "available": sum(bool(m["isAvailable"]) for m in wanted)},
        "replicas": {
            "desired": sum(int(str(model["desired"])) for model in models),
            "ready": sum(int(str(model["ready"])) for model in models),
        },
        "problems": len(found["problems"]),
        "versions": {name: _commonest(macs, name) for name in _VERSIONS},
        "gateways": len(caches.gateways.items),
        "gatewaysSilent": dict(silent_gateways),
        "reconcilers": len(caches.reconcilers.items),
        "leader": leader or None,
    }


def _commonest(macs: Sequence[Row], column: str) -> object:
    """Return the value that most Macs have; None if none is known."""
    known = Counter(str(mac[column]) for mac in macs if mac[column] is not None)
    return known.most_common(1)[0][0] if known else None


def sentence(
    caches: FleetCaches,
    macs: Sequence[Row],
    models: Sequence[Row],
    silent_gateways: Collection[str],
) -> str:
    """Return the headline, such as `3 of 3 Macs online. 2 of 3 models do not answer: nomodel, tiny`."""
    if not macs and not models:
        return "The fleet is empty: no Mac has joined, and nothing is deployed."
    online = sum(is_connected(mac) for mac in macs)
    others = any(mac["osVersion"] and not str(mac["osVersion"]).startswith("macOS") for mac in macs)
    asleep = sum(mac["state"] == "asleep" for mac in macs)
    rest = f", {asleep} asleep" if asleep else ""
    parts = [f"{online} of {len(macs)} {'nodes' if others else 'Macs'} online{rest}."]
    count = len(caches.gateways.items)
    is_reachable = len(silent_gateways) < count
    parts.append(_models_sentence(models, is_reachable=is_reachable))
    if models and not is_reachable:
        parts.append("No gateway answers." if count else "No gateway runs.")
    elif models and silent_gateways:
        verb = "does" if len(silent_gateways) == 1 else "do"
        names = names_text(sorted(silent_gateways), 3)
        parts.append(f"{len(silent_gateways)} of {count} gateways {verb} not answer: {names}.")
    if not caches.leader.items:
        parts.append("No reconciler leads.")
    return " ".join(filter(None, parts))


def _models_sentence(models: Sequence[Row], *, is_reachable: bool) -> str:
    """Return the worst that is true of any model, with the names of those models.

    If no gateway answers clients and nothing else is wrong, the text is empty.
    """
    wanted = [model for model in models if int(str(model["desired"])) > 0]
    if not wanted:
        return "All models are scaled to zero." if models else "Nothing is deployed."
    states: dict[str, list[str]] = {}
    for model in wanted:
        ready, desired = int(str(model["ready"])), int(str(model["desired"]))
        silent = "do not answer" if model["reason"] else "are starting"
        state = silent if not ready else "lack replicas" if ready < desired else ""
        states.setdefault(state, []).append(str(model["name"]))
    verb = next((verb for verb in _VERBS if verb in states), None)
    if verb is None and not is_reachable:
        return ""
    if verb is None:
        return f"All {len(wanted)} models answer." if len(wanted) > 1 else "The model answers."
    named = states[verb]
    shown = _VERBS[verb] if len(named) == 1 else verb
    if len(wanted) == 1:
        return f"{named[0]} {shown}."
    return f"{len(named)} of {len(wanted)} models {shown}: {names_text(named, 3)}."


# What may be true of models, the worst first, for several and for one.
_VERBS: Final = {
    "do not answer": "does not answer",
    "are starting": "is starting",
    "lack replicas": "lacks replicas",
}
