"""Conversion of mlx-serving's cluster.yaml to NodePools, Nodes, and a ModelDeployment per --model. Pure.

Reads both forms: `cluster:` in snake_case (PRD of 2025-11-09), and config/cluster.yaml of release 1.2.0 in camelCase.
"""

from collections.abc import Mapping, Sequence

from fleetctl.convert import manifest_drafts
from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason, read_documents
from fleetctl.convert.manifest_drafts import ManifestDraft, join_manifests, resolve_nodes
from manifests.trees import Tree
from nodeagent.node.identity import dns_label
from schemas.chips import CHIPS

_STRATEGIES = {
    "round_robin": "RoundRobin",
    "least_loaded": "LeastLoaded",
    "hardware_aware": "HardwareAware",
    "smart": "HardwareAware",
}
# Of schemas.pools.
_MOST_PRIORITY = 100
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
        text="the gateway is the API: fleet-gateway --host, --port, --cors-origin; below /api/dashboard/ is the dashboard's data"
    ),
    "controller.api.rate_limit": OmissionReason(
        text="API keys have limits: fleetctl create apikey NAME --requests-per-minute"
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
    "models.tier_preferences.*.min_gpu_cores": OmissionReason(
        text="preferred_chips chooses the Macs; placement.profile: HardwareAware prefers more cores"
    ),
    "models.cache_coordination": OmissionReason(
        text="Macs get model files from each other, once from a hub; fleetctl models rm frees disk, and reserved.disk "
        "of a NodePool bounds it"
    ),
    "monitoring": OmissionReason(
        text="gateways, reconcilers, agents and engines answer GET /metrics for Prometheus, on their own ports"
    ),
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
    macs_of_workers = _resolve_workers(cluster, nodes)
    pools, macs = _workers(cluster, macs_of_workers)
    by_name = _nodes_by_worker(cluster, macs_of_workers)
    routing = _routing(cluster)
    tiers = _tiers(cluster, by_name)
    deployments = manifest_drafts.draft_deployments(
        cluster,
        models,
        routing,
        [pool.name for pool in pools],
        {
            "strategy": cluster.find_path("load_balancing", "strategy"),
            "sessions": cluster.find_path("load_balancing", "sticky_sessions")
            or cluster.find_path("load_balancing", "session_ttl_ms"),
        },
    )
    if tiers and not pools:
        names = ", ".join(tier.name for tier in tiers)
        for draft in deployments:
            draft.notes.append(f"may be placed on any Mac; spec.placement.pools chooses of {names}")
    header = [f"From {source} of mlx-serving. Settings without a counterpart:"]
    header.extend(cluster.omission_lines(_REASONS, "the fleet has no such setting"))
    cluster.raise_problems()
    if not deployments:
        header.extend(manifest_drafts.routing_comment(routing))
    if not (pools or tiers or macs or deployments):
        cluster.refuse(
            (),
            "names no workers and no tiers, so there is nothing to declare: Macs that discovery would find join with "
            "fleetctl join",
            "Name models with --model; they are placed on the Macs that have joined",
        )
        cluster.raise_problems()
    return join_manifests(header, [*pools, *tiers, *macs, *deployments])


def _resolve_workers(cluster: ForeignConfig, given: Sequence[str]) -> tuple[str, ...]:
    """Return the node of each worker."""
    path = _workers_path(cluster)
    hosts: list[tuple[tuple[str | int, ...], str]] = []
    for index in range(cluster.count(*path)):
        named, ip = cluster.text(*path, index, "name"), cluster.text(*path, index, "ip")
        hosts.append(((*path, index), named or ip or ""))
    return resolve_nodes(cluster, hosts, given) if hosts else ()


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
        sessions["ttl"] = manifest_drafts.duration_text(ttl)
    return {**found, **({"sessions": sessions} if sessions else {})}


def _tiers(cluster: ForeignConfig, by_name: Mapping[str, str]) -> list[ManifestDraft]:
    """Return a pool for each tier: the Macs that can run models of its size, and one of its preferred workers."""
    drafts = []
    for theirs in cluster.keys("models", "tier_preferences"):
        tier = cluster.section("models", "tier_preferences", theirs)
        if tier is None:
            cluster.refuse(
                ("models", "tier_preferences", theirs),
                "expected a mapping with min_memory_gb, preferred_chips or preferred_workers",
            )
            continue
        name = _TIERS.get(theirs.lower()) or _tier_name(theirs)
        found = [*_capable(tier, name), *_preferred(tier, name, by_name)]
        if not found:
            # Without a condition, it would be a pool of every Mac.
            tier.refuse(
                (),
                "names no Macs",
                "Add min_memory_gb, min_gpu_cores, preferred_chips or preferred_workers",
            )
        drafts += found
    return drafts


def _tier_name(theirs: str) -> str:
    """Return the pool's name for a tier of any size: `<7B` becomes `tier-below-7b`."""
    words = theirs.replace("<", "below-").replace(">", "above-").replace("+", "-and-more")
    return f"tier-{dns_label(words, fallback='other')}"


def _capable(tier: ForeignConfig, name: str) -> list[ManifestDraft]:
    """Return the pool of the Macs with the tier's chips, GPU cores and memory; none if it demands nothing."""
    draft = ManifestDraft(kind="NodePool", name=name, source=tier)
    memory = tier.number("min_memory_gb", least=1)
    if memory is not None:
        draft.put("spec.selector.minMemory", f"{memory:g}Gi", "min_memory_gb")
    chips = tier.text_list("preferred_chips")
    names = {chip.name for chip in CHIPS}
    sold: list[Tree] = [f"Apple {chip}" for chip in chips if f"Apple {chip}" in names]
    draft.put("spec.selector.chips", sold or None, "preferred_chips")
    if chips and not sold:
        tier.refuse(("preferred_chips",), "names no chip that Apple sold")
    if sold:
        draft.notes.append("these chips were a preference; the pool contains no others")
    else:
        cores = tier.integer("min_gpu_cores", least=1)
        enough: list[Tree] = [*_chips_with_cores(cores or 0)]
        if cores is not None:
            draft.put("spec.selector.chips", enough, "min_gpu_cores")
            draft.notes.append(f"the chips that have {cores} GPU cores or more")
    draft.notes.extend(
        f"{chip} is left out: no Mac has this chip"
        for chip in chips
        if f"Apple {chip}" not in names
    )
    return [draft] if draft.has("spec") else []


def _chips_with_cores(cores: int) -> list[str]:
    """Return the names of the chips that are sold with so many GPU cores."""
    return list(dict.fromkeys(chip.name for chip in CHIPS if max(chip.gpu_cores) >= cores))


def _preferred(tier: ForeignConfig, name: str, by_name: Mapping[str, str]) -> list[ManifestDraft]:
    """Return the pool of the tier's preferred workers, which come first; none if it has none."""
    workers = tier.text_list("preferred_workers")
    if not workers:
        return []
    draft = ManifestDraft(kind="NodePool", name=f"{name}-preferred", source=tier)
    nodes: list[Tree] = []
    for worker in workers:
        node = by_name.get(worker) or manifest_drafts.node_name(worker)
        if not node:
            tier.refuse(
                ("preferred_workers",),
                f"{worker} names no node",
                "Write the worker's name, as in workers[].name",
            )
        nodes.append(node)
    draft.put("spec.nodes", nodes, "preferred_workers")
    draft.put("spec.priority", _MOST_PRIORITY)
    draft.notes.append(
        f"models of the tier name {name}-preferred in spec.placement.pools, and further pools to go elsewhere as well"
    )
    return [draft]


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
