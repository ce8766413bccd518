"""mlx-serving's cluster.yaml to NodePools, Nodes and the deployments that --model names. Pure.

Both of its forms: `cluster:` with snake_case of the PRD (2025-11-09), and config/cluster.yaml of 1.2.0 in camelCase.
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
# Announced by nobody: schemas/chips.py has those that were sold.
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
        says="any Mac may run an agent, a gateway, a reconciler, or all of them"
    ),
    "controller": OmissionReason(
        says="the gateway is the API: fleet-gateway --host, --port, --cors-origin; its /admin has the dashboard's figures"
    ),
    "controller.api.rate_limit": OmissionReason(
        says="a key has limits: fleetctl create apikey NAME --requests-per-minute"
    ),
    "nats": OmissionReason(
        says="nats: etcd takes its place, with leases and watches", is_shown=False
    ),
    "worker": OmissionReason(says="agents choose the ports of engines, and know themselves"),
    "workers.static": OmissionReason(says="gateways learn addresses and ports from the agents"),
    "discovery": OmissionReason(
        says="agents come and go by themselves: a lease of 4 s says who is there; etcd's passwords say who may join"
    ),
    "load_balancing.prefer_model_loaded": OmissionReason(
        says="only endpoints with the model loaded are asked at all"
    ),
    "load_balancing.avoid_overloaded": OmissionReason(
        says="full engines refuse and others are asked; spec.routing.queueing bounds what waits"
    ),
    "models.tier_preferences.*.min_gpu_cores": OmissionReason(
        says="pools choose by chip and memory; placement.profile: HardwareAware prefers more cores"
    ),
    "models.cache_coordination": OmissionReason(
        says="spec.kvCache.prefixBytes bounds what a replica keeps, and prefixAffinity sends prompts there"
    ),
    "monitoring": OmissionReason(says="every process answers GET /metrics for Prometheus"),
    "monitoring.logging": OmissionReason(says="every process logs JSON lines: fleetctl logs"),
    "logging": OmissionReason(says="every process logs JSON lines: fleetctl logs"),
    "dashboard": OmissionReason(says="the gateway's own figures and fleetctl top"),
}


def convert(text: str, source: str, *, nodes: Sequence[str], models: Sequence[str]) -> str:
    """Return the manifests.

    Raises:
        ManifestErrors: everything that is wrong with the file, with its lines.

    """
    whole = ForeignConfig(read_documents(text, source)[0])
    cluster = whole.below("cluster") or whole
    pools, macs = _workers(cluster, nodes)
    routing = _routing(cluster)
    tiers = _tiers(cluster)
    deployments = manifest_drafts.draft_deployments(
        cluster, models, routing, [pool.name for pool in pools]
    )
    header = [f"From {source} of mlx-serving. What has no counterpart:"]
    header.extend(cluster.left(_REASONS, "the fleet has no word for it"))
    cluster.checked()
    if not deployments:
        header.extend(manifest_drafts.routing_comment(routing))
    if not (pools or tiers or macs or deployments):
        cluster.refuse(
            (),
            "names no workers and no tiers, so there is nothing to declare",
            "Name models: --model",
        )
        cluster.checked()
    return join_manifests(header, [*pools, *tiers, *macs, *deployments])


def _workers(
    cluster: ForeignConfig, given: Sequence[str]
) -> tuple[list[ManifestDraft], list[ManifestDraft]]:
    """Return a pool for every priority, filled in its order, and the labels of the Macs."""
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
        priority = min(cluster.whole(*path, index, "priority") or 0, 100)
        members.setdefault(priority, []).append(node)
        if priority not in pools:
            pools[priority] = ManifestDraft(
                kind="NodePool", name=f"workers-{priority}", source=cluster
            )
            pools[priority].put("spec.priority", priority, *path, index, "priority")
        pools[priority].put("spec.nodes", members[priority], *path, index)
        tags = cluster.texts(*path, index, "tags")
        if tags:
            macs.append(_labelled(cluster, node, tags, (*path, index, "tags")))
    return [pools[priority] for priority in sorted(pools, reverse=True)], macs


def _labelled(
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
    strategy = cluster.one_of(_STRATEGIES, "load_balancing", "strategy")
    if strategy is not None:
        found["strategy"] = strategy
    sticky = cluster.truth("load_balancing", "sticky_sessions")
    if sticky is None:
        sticky = cluster.truth("load_balancing", "sticky_session")
    ttl = cluster.number("load_balancing", "session_ttl_ms", least=1)
    sessions: dict[str, Tree] = {}
    if sticky is not None:
        sessions["enabled"] = sticky
    if ttl is not None:
        sessions["ttl"] = manifest_drafts.duration_text(ttl)
    return {**found, **({"sessions": sessions} if sessions else {})}


def _tiers(cluster: ForeignConfig) -> list[ManifestDraft]:
    """Return a pool for each tier, of the Macs that suffice for it."""
    preferences = cluster.below("models", "tier_preferences")
    made = []
    for theirs, ours in _TIERS.items() if preferences is not None else ():
        tier = cluster.below("models", "tier_preferences", theirs)
        if tier is None:
            continue
        draft = ManifestDraft(kind="NodePool", name=ours, source=tier)
        memory = tier.number("min_memory_gb", least=1)
        if memory is not None:
            draft.put("spec.selector.minMemory", f"{memory:g}Gi", "min_memory_gb")
        chips = tier.texts("preferred_chips")
        sold: list[Tree] = [f"Apple {chip}" for chip in chips if chip not in _NEVER_SOLD]
        draft.put("spec.selector.chips", sold or None, "preferred_chips")
        if not draft.has("spec"):
            draft.put("spec.selector", {})
        if sold:
            draft.notes.append("chips were preferred there; a pool has no other Macs than these")
        draft.notes.extend(
            f"{chip} is left out: no Mac has such a chip" for chip in chips if chip in _NEVER_SOLD
        )
        made.append(draft)
    return made
