"""Conversion of mlx-serving's cluster.yaml to NodePools, Nodes, and a ModelDeployment per --model, in its size tier. Pure.

Reads both forms: `cluster:` in snake_case (PRD of 2025-11-09), and config/cluster.yaml of release 1.2.0 in camelCase.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleetctl.convert import manifest_drafts
from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason, read_documents
from fleetctl.convert.manifest_drafts import ManifestDraft, join_manifests, resolve_nodes
from fleetctl.convert.node_names import NodeNames
from manifests.trees import Tree
from nodeagent.node.identity import dns_label
from schemas import duration
from schemas.chips import CHIPS

_STRATEGIES = {
    "round_robin": "RoundRobin",
    "least_loaded": "LeastLoaded",
    "hardware_aware": "HardwareAware",
    "smart": "HardwareAware",
}
_TIER = re.compile(r"(<?)(\d+(?:\.\d+)?)(?:b?-\d+(?:\.\d+)?)?b?\+?", re.IGNORECASE)
# As in Qwen3-30B-A3B, of which 3 billion are active, and Mixtral-8x7B.
_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)

_REASONS = {
    "mode": OmissionReason(
        text="any Mac may run an agent, a gateway, a reconciler, or all of them"
    ),
    "controller": OmissionReason(
        text="the gateway is the API: fleet-gateway --host, --port, --cors-origin; below /api/dashboard/ is the dashboard's data"
    ),
    "controller.api.rate_limit": OmissionReason(
        text="API keys have limits: fleetctl create apikey NAME --requests-per-minute; requests without a key have those of "
        "fleet-gateway --anonymous-requests-per-minute, by address"
    ),
    "nats": OmissionReason(text="nats: etcd replaces it, with leases and watches", is_shown=False),
    "worker": OmissionReason(text="agents choose the ports of engines, and detect the hardware"),
    "workers": OmissionReason(text="gateways learn addresses and ports from the agents"),
    "discovery": OmissionReason(
        text="agents join by themselves: a lease of 4 s shows that a Mac is alive; etcd's passwords control who may join"
    ),
    "load_balancing.prefer_model_loaded": OmissionReason(
        text="gateways use only endpoints that have the model loaded"
    ),
    "load_balancing.avoid_overloaded": OmissionReason(
        text="full engines refuse requests, and gateways try others; spec.routing.queueing limits the queue"
    ),
    "models.tier_preferences": OmissionReason(
        text="no model of this size; --model PATH deploys one with the preferences of its tier"
    ),
    "models.cache_coordination": OmissionReason(
        text="Macs get model files from each other, once from a hub"
    ),
    "monitoring": OmissionReason(
        text="gateways, reconcilers, agents and engines answer GET /metrics for Prometheus, on their own ports"
    ),
    "monitoring.logging": OmissionReason(text="every process logs JSON lines: fleetctl logs"),
    "logging": OmissionReason(text="every process logs JSON lines: fleetctl logs"),
    "dashboard": OmissionReason(
        text="fleetctl dashboard opens the page; fleet-dashboard --port, --state-dir, --history-time"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tier:
    """The preferences for models of one size."""

    path: tuple[str, ...]
    """Its place in the file; the last part is its name."""
    least: float
    """The smallest models, in billions of parameters."""
    below: float
    """The models must be smaller than this."""


def convert(text: str, source: str, *, nodes: NodeNames, models: Sequence[str]) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file, with their lines.

    """
    config = ForeignConfig(read_documents(text, source)[0])
    cluster = config.section("cluster") or config
    macs_of_workers = _resolve_workers(cluster, nodes)
    pools, macs = _workers(cluster, macs_of_workers)
    by_name = _nodes_by_worker(cluster, macs_of_workers)
    routing, tiers = _routing(cluster), _tiers(cluster)
    # Discovery adds Macs that no pool lists.
    is_closed = not cluster.boolean("discovery", "enabled")
    deployments = manifest_drafts.draft_deployments(
        cluster,
        models,
        routing,
        [pool.name for pool in pools] if is_closed else [],
        {
            "strategy": cluster.find_path("load_balancing", "strategy"),
            "sessions": cluster.find_path("load_balancing", "sticky_sessions")
            or cluster.find_path("load_balancing", "session_ttl_ms"),
        },
    )
    for draft, model in zip(deployments, models, strict=True):
        _put_tier(draft, model, tiers, by_name, nodes)
    pools += _disk_limit(cluster)
    header = [f"From {source} of mlx-serving. Settings without a counterpart:"]
    header.extend(cluster.omission_lines(_REASONS, "the fleet has no such setting"))
    cluster.raise_problems()
    if not deployments:
        header.extend(manifest_drafts.routing_comment(routing))
    if not (pools or macs or deployments):
        cluster.refuse(
            (),
            "names no workers and no models, so there is nothing to declare: Macs that discovery would find join with "
            "fleetctl join",
            "Name models with --model; they are placed on the Macs that have joined",
        )
        cluster.raise_problems()
    return join_manifests(header, [*pools, *macs, *deployments])


def _resolve_workers(cluster: ForeignConfig, names: NodeNames) -> tuple[str, ...]:
    """Return the node of each worker."""
    path = _workers_path(cluster)
    hosts: list[tuple[tuple[str | int, ...], tuple[str, ...]]] = []
    for index in range(cluster.count(*path)):
        name, ip = cluster.text(*path, index, "name"), cluster.text(*path, index, "ip")
        hosts.append(((*path, index), (name or "", ip or "")))
    return resolve_nodes(cluster, hosts, names) if hosts else ()


def _workers(
    cluster: ForeignConfig, nodes: Sequence[str]
) -> tuple[list[ManifestDraft], list[ManifestDraft]]:
    """Return a pool for each priority, highest first, and the labels of the Macs."""
    path = _workers_path(cluster)
    pools: dict[int, ManifestDraft] = {}
    members: dict[int, list[Tree]] = {}
    macs = []
    for index, node in enumerate(nodes):
        priority = cluster.integer(*path, index, "priority") or 0
        members.setdefault(priority, []).append(node)
        if priority not in pools:
            pools[priority] = ManifestDraft(
                kind="NodePool", name=f"workers-{priority}", source=cluster
            )
            pools[priority].put("spec.priority", priority, *path, index, "priority")
        pools[priority].put("spec.nodes", members[priority], *path, index)
        tags = cluster.text_list(*path, index, "tags")
        if tags:
            macs.append(_labels_draft(cluster, node, tags, (*path, index, "tags")))
    return [pools[priority] for priority in sorted(pools, reverse=True)], macs


def _workers_path(cluster: ForeignConfig) -> tuple[str, ...]:
    """Return the path of the list of workers: below `static`, or `workers` itself."""
    is_plain = cluster.find_path("workers") is not None and cluster.section("workers") is None
    return ("workers",) if is_plain else ("workers", "static")


def _labels_draft(
    cluster: ForeignConfig, node: str, tags: list[str], path: tuple[str | int, ...]
) -> ManifestDraft:
    draft = ManifestDraft(kind="Node", name=node, source=cluster)
    labels: dict[str, Tree] = {
        f"mlx-serving/{dns_label(tag, fallback='tag')}": "true" for tag in tags
    }
    draft.put("metadata.labels", labels, *path)
    draft.put("spec", {})
    return draft


def _routing(cluster: ForeignConfig) -> dict[str, Tree]:
    found: dict[str, Tree] = {}
    strategy = cluster.choice(_STRATEGIES, "load_balancing", "strategy")
    if strategy is not None:
        found["strategy"] = strategy
    sticky = cluster.boolean("load_balancing", "sticky_sessions")
    if sticky is None:
        sticky = cluster.boolean("load_balancing", "sticky_session")
    ttl = cluster.number("load_balancing", "session_ttl_ms", least=1)
    sessions: dict[str, Tree] = {}
    if sticky is not None:
        sessions["enabled"] = sticky
    if ttl is not None:
        sessions["ttl"] = duration.render(ttl / 1000)
    return {**found, **({"sessions": sessions} if sessions else {})}


def _disk_limit(cluster: ForeignConfig) -> list[ManifestDraft]:
    """Return the pool of every Mac with the limit of its models; none if the file has no limit."""
    limit = cluster.number("models", "cache_coordination", "max_cache_gb_per_worker", least=1)
    if limit is None:
        return []
    draft = ManifestDraft(kind="NodePool", name="model-cache", source=cluster)
    draft.put("spec.selector", {})
    draft.notes.append(
        "every Mac keeps no more of models; unused ones go, the longest unused first"
    )
    place = ("models", "cache_coordination", "max_cache_gb_per_worker")
    draft.put("spec.modelDiskLimit", f"{limit:g}G", *place)
    return [draft]


def _tiers(cluster: ForeignConfig) -> list[_Tier]:
    """Return the tiers, those of the largest models first."""
    found = []
    for name in cluster.keys("models", "tier_preferences"):
        path, size = ("models", "tier_preferences", name), _TIER.fullmatch(name)
        if cluster.section(*path) is None:
            cluster.refuse(
                path, "expected a mapping with min_memory_gb, preferred_chips or preferred_workers"
            )
        elif size is None:
            cluster.refuse(path, "names no size of models", "Write such as 30B+, 7-13B or <3B")
        else:
            bound, is_below = float(size[2]), bool(size[1])
            least, below = (0.0, bound) if is_below else (bound, math.inf)
            found.append(_Tier(path=path, least=least, below=below))
    return sorted(found, key=lambda tier: -tier.least)


def _put_tier(
    draft: ManifestDraft,
    model: str,
    tiers: Sequence[_Tier],
    by_name: Mapping[str, str],
    names: NodeNames,
) -> None:
    """Set the preferences of the tier that the size in the model's name belongs to."""
    size = _SIZE.search(model.rstrip("/").rpartition("/")[2])
    if not tiers:
        return
    if size is None:
        draft.notes.append("its name has no size such as 8B, so the size tiers of the fleet apply")
        return
    billions = float(size[2]) * int(size[1] or 1)
    tier = next((one for one in tiers if one.least <= billions < one.below), None)
    if tier is None:
        draft.notes.append(f"no tier of the file is for {billions:g}B; those of the fleet apply")
        return
    draft.notes.append(f"placement.tier: that of {tier.path[-1]}; Macs that meet it come first")
    cluster, path = draft.source, tier.path
    memory = cluster.number(*path, "min_memory_gb", least=1)
    ours: dict[str, tuple[str, Tree]] = {
        "min_gpu_cores": ("minGpuCores", cluster.integer(*path, "min_gpu_cores", least=1)),
        "min_memory_gb": ("minMemory", None if memory is None else f"{memory:g}Gi"),
        "preferred_chips": ("preferredChips", _chips(draft, path) or None),
        "preferred_workers": ("preferredNodes", _preferred(cluster, path, by_name, names) or None),
    }
    if all(value is None for _, value in ours.values()):
        words = "min_memory_gb, min_gpu_cores, preferred_chips or preferred_workers"
        cluster.refuse(path, "prefers no Macs", f"Add {words}")
    for theirs, (field, value) in ours.items():
        draft.put(f"spec.placement.tier.{field}", value, *path, theirs)


def _chips(draft: ManifestDraft, path: tuple[str, ...]) -> list[Tree]:
    """Return the chips of the tier that Macs have."""
    chips = draft.source.text_list(*path, "preferred_chips")
    sold = {chip.name for chip in CHIPS}
    found: list[Tree] = [f"Apple {chip}" for chip in chips if f"Apple {chip}" in sold]
    if chips and not found:
        draft.source.refuse((*path, "preferred_chips"), "names no chip that Apple sold")
    draft.notes.extend(
        f"{chip} is left out: no Mac has this chip"
        for chip in chips
        if f"Apple {chip}" not in found
    )
    return found


def _preferred(
    cluster: ForeignConfig, path: tuple[str, ...], by_name: Mapping[str, str], names: NodeNames
) -> list[Tree]:
    """Return the nodes of the tier's preferred workers."""
    found: list[Tree] = []
    for worker in cluster.text_list(*path, "preferred_workers"):
        node = by_name.get(worker) or replace(names, given=()).find(0, worker)
        if not node:
            cluster.refuse(
                (*path, "preferred_workers"),
                f"{worker} names no node",
                "Write the worker's name, as in workers[].name",
            )
        found.append(node)
    return found


def _nodes_by_worker(cluster: ForeignConfig, nodes: Sequence[str]) -> dict[str, str]:
    """Return the node of each worker that has a name or an address in the file."""
    found: dict[str, str] = {}
    path = _workers_path(cluster)
    for index, node in enumerate(nodes):
        for word in ("name", "ip"):
            known = cluster.text(*path, index, word)
            if known is not None:
                found[known] = node
        if cluster.find_path(*path, index, "name") is not None:
            cluster.explain((*path, index, "ip"), _REASONS["workers"].text)
    return found
