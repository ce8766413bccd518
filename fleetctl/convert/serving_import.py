"""Conversion of mlx-serving's cluster.yaml to NodePools, Nodes, and a ModelDeployment per --model. Pure.

Reads both forms: `cluster:` in snake_case (PRD of 2025-11-09), and config/cluster.yaml of release 1.2.0 in camelCase.
"""

from collections.abc import Sequence

from fleetctl.convert import manifest_drafts
from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason, read_documents
from fleetctl.convert.manifest_drafts import ManifestDraft, join_manifests, resolve_nodes
from manifests.trees import Tree
from nodeagent.node.identity import dns_label

_STRATEGIES = {
    "round_robin": "RoundRobin",
    "least_loaded": "LeastLoaded",
    "hardware_aware": "HardwareAware",
    "smart": "HardwareAware",
}
# Apple never sold this chip; schemas/chips.py lists those that exist.
_NEVER_SOLD = ("M4 Ultra",)
_TIERS = {
    "30b+": "tier-30b-and-more",
    "13-27b": "tier-13-27b",
    "7-13b": "tier-7-13b",
    "3-7b": "tier-3-7b",
    "<3b": "tier-below-3b",
}

_REASONS = {
    "mode": OmissionReason(
        text="any Mac may run an agent, a gateway, a reconciler, or all of them"
    ),
    "controller": OmissionReason(
        text="the gateway is the API: fleet-gateway --host, --port, --cors-origin; its /admin has the dashboard's metrics"
    ),
    "controller.api.rate_limit": OmissionReason(
        text="API keys have limits: fleetctl create apikey NAME --requests-per-minute"
    ),
    "nats": OmissionReason(text="nats: etcd replaces it, with leases and watches", is_shown=False),
    "worker": OmissionReason(text="agents choose the ports of engines, and detect the hardware"),
    "workers.static": OmissionReason(text="gateways learn addresses and ports from the agents"),
    "discovery": OmissionReason(
        text="agents join by themselves: a lease of 4 s shows that a Mac is alive; etcd's passwords control who may join"
    ),
    "load_balancing.prefer_model_loaded": OmissionReason(
        text="gateways use only endpoints that have the model loaded"
    ),
    "load_balancing.avoid_overloaded": OmissionReason(
        text="full engines refuse requests, and gateways try others; spec.routing.queueing limits the queue"
    ),
    "models.tier_preferences.*.min_gpu_cores": OmissionReason(
        text="pools choose by chip and memory; placement.profile: HardwareAware prefers more cores"
    ),
    "models.cache_coordination": OmissionReason(
        text="spec.kvCache.prefixBytes limits a replica's cache, and prefixAffinity routes prompts to it"
    ),
    "monitoring": OmissionReason(text="every process answers GET /metrics for Prometheus"),
    "monitoring.logging": OmissionReason(text="every process logs JSON lines: fleetctl logs"),
    "logging": OmissionReason(text="every process logs JSON lines: fleetctl logs"),
    "dashboard": OmissionReason(text="use the gateway's metrics and fleetctl top"),
}


def convert(text: str, source: str, *, nodes: Sequence[str], models: Sequence[str]) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file, with their lines.

    """
    config = ForeignConfig(read_documents(text, source)[0])
    cluster = config.section("cluster") or config
    pools, macs = _workers(cluster, nodes)
    routing = _routing(cluster)
    tiers = _tiers(cluster)
    deployments = manifest_drafts.draft_deployments(
        cluster, models, routing, [pool.name for pool in pools]
    )
    header = [f"From {source} of mlx-serving. Settings without a counterpart:"]
    header.extend(cluster.omission_lines(_REASONS, "the fleet has no such setting"))
    cluster.raise_problems()
    if not deployments:
        header.extend(manifest_drafts.routing_comment(routing))
    if not (pools or tiers or macs or deployments):
        cluster.refuse(
            (),
            "names no workers and no tiers, so there is nothing to declare",
            "Name models with --model",
        )
        cluster.raise_problems()
    return join_manifests(header, [*pools, *tiers, *macs, *deployments])


def _workers(
    cluster: ForeignConfig, given: Sequence[str]
) -> tuple[list[ManifestDraft], list[ManifestDraft]]:
    """Return a pool for each priority, highest first, and the labels of the Macs."""
    path = ("workers", "static")
    count = cluster.count(*path)
    hosts: list[tuple[tuple[str | int, ...], str]] = []
    for index in range(count):
        named, ip = cluster.text(*path, index, "name"), cluster.text(*path, index, "ip")
        hosts.append(((*path, index), named or ip or ""))
    nodes = resolve_nodes(cluster, hosts, given) if hosts else ()
    pools: dict[int, ManifestDraft] = {}
    members: dict[int, list[Tree]] = {}
    macs = []
    for index, node in enumerate(nodes):
        priority = min(cluster.integer(*path, index, "priority") or 0, 100)
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
        sessions["ttl"] = manifest_drafts.duration_text(ttl)
    return {**found, **({"sessions": sessions} if sessions else {})}


def _tiers(cluster: ForeignConfig) -> list[ManifestDraft]:
    """Return a pool for each tier: the Macs that can run models of its size."""
    preferences = cluster.section("models", "tier_preferences")
    drafts = []
    for theirs, ours in _TIERS.items() if preferences is not None else ():
        tier = cluster.section("models", "tier_preferences", theirs)
        if tier is None:
            continue
        draft = ManifestDraft(kind="NodePool", name=ours, source=tier)
        memory = tier.number("min_memory_gb", least=1)
        if memory is not None:
            draft.put("spec.selector.minMemory", f"{memory:g}Gi", "min_memory_gb")
        chips = tier.text_list("preferred_chips")
        sold: list[Tree] = [f"Apple {chip}" for chip in chips if chip not in _NEVER_SOLD]
        draft.put("spec.selector.chips", sold or None, "preferred_chips")
        if not draft.has("spec"):
            draft.put("spec.selector", {})
        if sold:
            draft.notes.append("these chips were a preference; the pool contains no others")
        draft.notes.extend(
            f"{chip} is left out: no Mac has this chip" for chip in chips if chip in _NEVER_SOLD
        )
        drafts.append(draft)
    return drafts
