"""Importer of mlx-serving's cluster.yaml: NodePools, Nodes, and a ModelDeployment per --model, in its size tier. Pure.

Reads both forms: `cluster:` in snake_case (PRD of 2025-11-09), and config/cluster.yaml of release 1.2.0 in camelCase.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from compat.importers.drafts import (
    ManifestDraft,
    NodeFinder,
    Place,
    Routing,
    draft_deployments,
    header,
    join_manifests,
    resolve_nodes,
    routing_comment,
)
from compat.importers.source import Source, read_documents
from manifests.trees import Tree
from schemas import duration
from schemas.chips import CHIPS
from schemas.meta import object_name

_STRATEGIES = {
    "round_robin": "RoundRobin",
    "least_loaded": "LeastLoaded",
    "hardware_aware": "HardwareAware",
    "smart": "HardwareAware",
}
_TIER = re.compile(r"(<?)(\d+(?:\.\d+)?)(?:b?-\d+(?:\.\d+)?)?b?\+?", re.IGNORECASE)
# As in Qwen3-30B-A3B, of which 3 billion are active, and Mixtral-8x7B.
_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)
_CACHE_LIMIT = ("models", "cache_coordination", "max_cache_gb_per_worker")
_JOIN = "agents join by themselves: a lease of 4 s shows that a Mac is alive; etcd's passwords control who may join"
_API = "the gateway is the API: fleet-gateway --host, --port, --cors-origin; below /api/dashboard/ is the dashboard's data"
_LIMITS = (
    "API keys have limits: fleetctl create apikey NAME --requests-per-minute; requests without a key have those of "
    "fleet-gateway --anonymous-requests-per-minute, by address"
)
_LOGS = "every process logs JSON lines: fleetctl logs"
_WORKERS = "gateways learn addresses and ports from the agents"
_REASONS: Final[Mapping[str, str]] = {
    "mode": "any Mac may run an agent, a gateway, a reconciler, or all of them",
    "controller": _API,
    "controller.api.rate_limit": _LIMITS,
    "nats": "etcd replaces it, with leases and watches",
    "worker": "agents choose the ports of engines, and detect the hardware",
    "workers": _WORKERS,
    "discovery": _JOIN,
    "load_balancing.prefer_model_loaded": "gateways use only endpoints that have the model loaded",
    "load_balancing.avoid_overloaded": "full engines refuse requests; spec.routing.queueing limits the queue",
    "models.tier_preferences": "no model of this size; --model PATH deploys one with the preferences of its tier",
    "models.cache_coordination": "Macs get model files from each other, once from a hub",
    "monitoring": "all processes answer GET /metrics for Prometheus, on their own ports",
    **dict.fromkeys(("monitoring.logging", "logging"), _LOGS),
    "dashboard": "fleetctl dashboard opens the page; fleet-dashboard --port, --state-dir, --history-time",
}


class _Tier(NamedTuple):
    """The preferences for models from `least` up to `below` billions of parameters, at a place in the file."""

    least: float
    below: float
    path: tuple[str, ...]


class _Workers(NamedTuple):
    """The Macs of the file: their place there, and their nodes in its order."""

    path: tuple[str, ...]
    nodes: Sequence[str]


def convert(text: str, source: str, *, nodes: NodeFinder, models: Sequence[str]) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file, with their lines.

    """
    config = Source(read_documents(text, source)[0])
    cluster = config.section("cluster") or config
    workers = _workers(cluster, nodes)
    pools, labels = _pools(cluster, workers), _labels(cluster, workers)
    routing, tiers = _routing(cluster), _tiers(cluster)
    # Discovery adds Macs that no pool lists.
    is_closed = not cluster.boolean("discovery", "enabled")
    names = [pool.name for pool in pools] if is_closed else []
    deployments = draft_deployments(cluster, models, routing, names)
    by_name = _nodes_by_name(cluster, workers)
    for draft, model in zip(deployments, models, strict=True):
        _put_tier(draft, _tier_of(draft, model, tiers), by_name, nodes)
    limit = cluster.number(*_CACHE_LIMIT, least=1)
    if limit is not None:
        draft = ManifestDraft(kind="NodePool", name="model-cache", source=cluster)
        draft.put("spec.selector", {})
        draft.put("spec.modelDiskLimit", f"{limit:g}G", *_CACHE_LIMIT)
        draft.notes.append(
            "every Mac keeps no more of models; unused ones go, the longest unused first"
        )
        pools.append(draft)
    omitted = cluster.omission_lines(_REASONS)
    cluster.raise_problems()
    if not deployments:
        omitted += routing_comment(routing)
    if not (pools or labels or deployments):
        cluster.refuse(
            (),
            "names no workers and no models, so there is nothing to declare: Macs that discovery would find join with "
            "fleetctl join",
            "Name models with --model; they are placed on the Macs that have joined",
        )
        cluster.raise_problems()
    return join_manifests(header(source, "mlx-serving", omitted), [*pools, *labels, *deployments])


def _workers(cluster: Source, finder: NodeFinder) -> _Workers:
    """Return the workers: below `static`, or `workers` itself."""
    is_plain = cluster.find_path("workers") is not None and cluster.section("workers") is None
    path = ("workers",) if is_plain else ("workers", "static")
    hosts: list[tuple[Place, Sequence[str]]] = [
        ((*path, n), [cluster.text(*path, n, word) or "" for word in ("name", "ip")])
        for n in range(cluster.count(*path))
    ]
    return _Workers(path, resolve_nodes(cluster, hosts, finder) if hosts else ())


def _pools(cluster: Source, workers: _Workers) -> list[ManifestDraft]:
    """Return a pool for each priority, highest first."""
    pools: dict[int, ManifestDraft] = {}
    members: dict[int, list[Tree]] = {}
    for index, node in enumerate(workers.nodes):
        at: Place = (*workers.path, index)
        priority = cluster.integer(*at, "priority") or 0
        members.setdefault(priority, []).append(node)
        if priority not in pools:
            name = f"workers-{priority}"
            pools[priority] = ManifestDraft(kind="NodePool", name=name, source=cluster)
            pools[priority].put("spec.priority", priority, *at, "priority")
        pools[priority].put("spec.nodes", members[priority], *at)
    return [pools[priority] for priority in sorted(pools, reverse=True)]


def _labels(cluster: Source, workers: _Workers) -> list[ManifestDraft]:
    """Return the labels of the Macs that have tags."""
    drafts = []
    for index, node in enumerate(workers.nodes):
        at: Place = (*workers.path, index, "tags")
        labels: dict[str, Tree] = {
            f"mlx-serving/{object_name(tag, 'tag')}": "true" for tag in cluster.text_list(*at)
        }
        if labels:
            draft = ManifestDraft(kind="Node", name=node, source=cluster)
            draft.put("metadata.labels", labels, *at)
            draft.put("spec", {})
            drafts.append(draft)
    return drafts


def _nodes_by_name(cluster: Source, workers: _Workers) -> dict[str, str]:
    """Return the node of each worker that has a name or an address in the file."""
    nodes: dict[str, str] = {}
    for index, node in enumerate(workers.nodes):
        at: Place = (*workers.path, index)
        names = (cluster.text(*at, word) for word in ("name", "ip"))
        nodes.update({name: node for name in names if name is not None})
        if cluster.find_path(*at, "name") is not None:
            cluster.explain((*at, "ip"), _WORKERS)
    return nodes


def _routing(cluster: Source) -> Routing:
    section = "load_balancing"
    strategy = cluster.choice(_STRATEGIES, section, "strategy")
    sticky = cluster.boolean(section, "sticky_sessions")
    sticky = cluster.boolean(section, "sticky_session") if sticky is None else sticky
    ttl_ms = cluster.number(section, "session_ttl_ms", least=1)
    sessions: dict[str, Tree] = {} if sticky is None else {"enabled": sticky}
    sessions |= {} if ttl_ms is None else {"ttl": duration.render(ttl_ms / 1000)}
    word = "sticky_sessions" if cluster.find_path(section, "sticky_sessions") else "session_ttl_ms"
    rows: tuple[tuple[str, Tree, str], ...] = (
        ("strategy", strategy, "strategy"),
        ("sessions", sessions or None, word),
    )
    return [
        (ours, value, cluster.find_path(section, theirs))
        for ours, value, theirs in rows
        if value is not None
    ]


def _tiers(cluster: Source) -> list[_Tier]:
    """Return the tiers, those of the largest models first."""
    tiers = []
    for name in cluster.keys("models", "tier_preferences"):
        path, size = ("models", "tier_preferences", name), _TIER.fullmatch(name)
        if cluster.section(*path) is None:
            words = "min_memory_gb, preferred_chips or preferred_workers"
            cluster.refuse(path, f"expected a mapping with {words}")
        elif size is None:
            cluster.refuse(path, "names no size of models", "Write such as 30B+, 7-13B or <3B")
        else:
            bound = float(size[2])
            tiers.append(_Tier(0.0, bound, path) if size[1] else _Tier(bound, math.inf, path))
    return sorted(tiers, key=lambda tier: -tier.least)


def _tier_of(draft: ManifestDraft, model: str, tiers: Sequence[_Tier]) -> _Tier | None:
    """Return the tier that the size in the model's name belongs to; note it, or why there is none."""
    if not tiers:
        return None
    size = _SIZE.search(model.rstrip("/").rpartition("/")[2])
    if size is None:
        draft.notes.append("its name has no size such as 8B, so the size tiers of the fleet apply")
        return None
    billions = float(size[2]) * int(size[1] or 1)
    tier = next((tier for tier in tiers if tier.least <= billions < tier.below), None)
    draft.notes.append(
        f"no tier of the file is for {billions:g}B; those of the fleet apply"
        if tier is None
        else f"placement.tier: that of {tier.path[-1]}; Macs that meet it come first"
    )
    return tier


def _put_tier(
    draft: ManifestDraft, tier: _Tier | None, by_name: Mapping[str, str], finder: NodeFinder
) -> None:
    """Set the preferences of the tier."""
    if tier is None:
        return
    cluster, path = draft.source, tier.path
    memory = cluster.number(*path, "min_memory_gb", least=1)
    rows: tuple[tuple[str, str, Tree], ...] = (
        ("minGpuCores", "min_gpu_cores", cluster.integer(*path, "min_gpu_cores", least=1)),
        ("minMemory", "min_memory_gb", None if memory is None else f"{memory:g}Gi"),
        ("preferredChips", "preferred_chips", _chips(draft, path) or None),
        ("preferredNodes", "preferred_workers", _preferred(cluster, path, by_name, finder) or None),
    )
    if all(value is None for _, _, value in rows):
        words = ", ".join(theirs for _, theirs, _ in rows)
        cluster.refuse(path, "prefers no Macs", f"Add one of {words}")
    for ours, theirs, value in rows:
        draft.put(f"spec.placement.tier.{ours}", value, *path, theirs)


def _chips(draft: ManifestDraft, path: Place) -> list[Tree]:
    """Return the chips of the tier that Macs have."""
    chips = draft.source.text_list(*path, "preferred_chips")
    sold = {chip.name for chip in CHIPS}
    trees: list[Tree] = [f"Apple {chip}" for chip in chips if f"Apple {chip}" in sold]
    if chips and not trees:
        draft.source.refuse((*path, "preferred_chips"), "names no chip that Apple sold")
    draft.notes += [
        f"{chip} is left out: no Mac has this chip"
        for chip in chips
        if f"Apple {chip}" not in trees
    ]
    return trees


def _preferred(
    cluster: Source, path: Place, by_name: Mapping[str, str], finder: NodeFinder
) -> list[Tree]:
    """Return the nodes of the tier's preferred workers."""
    trees: list[Tree] = []
    for worker in cluster.text_list(*path, "preferred_workers"):
        node = by_name.get(worker) or finder.look_up(worker)
        if not node:
            hint = "Write the worker's name, as in workers[].name"
            cluster.refuse((*path, "preferred_workers"), f"{worker} names no node", hint)
        trees.append(node)
    return trees
