"""mlx-stack's mesh YAML (issue #31, "Multi-Mac mesh networking") to a NodePool and the deployments of its tiers. Pure.

The proposal fixes these words: role, discovery (type mdns, tailscale or static, with host and port), routing (strategy,
weights), health and failover_timeout. `tiers` are those of mlx-stack's stack definition.
"""

from collections.abc import Sequence

from fleetctl.convert import manifest_drafts
from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason, read_documents
from fleetctl.convert.manifest_drafts import (
    ManifestDraft,
    join_manifests,
    object_name,
    resolve_nodes,
    served_names,
)
from manifests.trees import Tree

_STRATEGIES = {"scored": "Scored", "round_robin": "RoundRobin", "random": "Random"}
_WEIGHTS = {
    "modelLoaded": "model_loaded",
    "memoryHeadroom": "memory_headroom",
    "queueDepth": "queue_depth",
}
# One of them says that it is a mesh; the latter are anybody's words where `mesh` does not stand above them.
_KNOWN, _BELOW_MESH = ("discovery", "routing", "tiers"), ("role", "failover_timeout")
_LISTS = ("nodes", "peers", "hosts", "static")

_REASONS = {
    "enabled": OmissionReason(says="a fleet is there while its agents run; nothing is switched on"),
    "role": OmissionReason(
        says="any number of reconcilers run and one leads; gateways are all alike", is_shown=True
    ),
    "port": OmissionReason(says="the gateway's port is its flag --port, 4000 unless it is said"),
    "discovery.type": OmissionReason(
        says="agents find the fleet by its etcd (--etcd), over any network that reaches it"
    ),
    "discovery.nodes": OmissionReason(says="a gateway learns each engine's port from the store"),
    "discovery.peers": OmissionReason(says="a gateway learns each engine's port from the store"),
    "discovery.hosts": OmissionReason(says="a gateway learns each engine's port from the store"),
    "discovery.static": OmissionReason(says="a gateway learns each engine's port from the store"),
    "health": OmissionReason(
        says="a Mac's lease of 4 s is its sign of life, and gateways ask a failing engine less by themselves"
    ),
    "failover_timeout": OmissionReason(
        says="another endpoint is asked at once; spec.routing.timeouts.attempt sets a limit of silence"
    ),
    "tiers.port": OmissionReason(says="agents choose the ports of engines"),
    "tiers.quant": OmissionReason(says="the model's folder has its quantization"),
    "tiers.vllm_flags": OmissionReason(
        says="flags of vllm-mlx; engines of the fleet batch and cache by themselves"
    ),
    "cloud_fallback": OmissionReason(
        says="the fleet asks no cloud; a client or a proxy before it may"
    ),
}


def convert(
    text: str, source: str, *, name: str, nodes: Sequence[str], models: Sequence[str]
) -> str:
    """Return the manifests.

    Raises:
        ManifestErrors: everything that is wrong with the file, with its lines.

    """
    wholes = [ForeignConfig(document) for document in read_documents(text, source)]
    _refuse_strangers(wholes)
    parts = [_root(whole) for whole in wholes]
    drafts: list[ManifestDraft] = []
    header = [f"From {source} of mlx-stack. What has no counterpart:"]
    mesh = next((part for part in parts if _is_mesh(part)), parts[0])
    pool = _pool(mesh, name, nodes)
    routing = _routing(mesh)
    drafts.append(pool)
    for part in parts:
        drafts.extend(_tiers(part, routing, pool.name))
    drafts.extend(manifest_drafts.draft_deployments(mesh, models, routing, [pool.name]))
    for part in parts:
        header.extend(part.left(_REASONS, "the fleet has no word for it"))
        part.checked()
    if len(drafts) == 1:
        pool.notes.extend(manifest_drafts.routing_comment(routing))
    return join_manifests(header, drafts)


def _root(whole: ForeignConfig) -> ForeignConfig:
    return whole.below("mesh") or whole


def _refuse_strangers(wholes: Sequence[ForeignConfig]) -> None:
    """Refuse a file that says nothing of a mesh: a pool of every Mac must not come of any text.

    Raises:
        ManifestErrors: it says nothing of one.

    """
    if any(
        whole.where(word) is not None or whole.where("mesh", word) is not None
        for whole in wholes
        for word in _KNOWN
    ) or any(whole.where("mesh", word) is not None for whole in wholes for word in _BELOW_MESH):
        return
    words = ", ".join((*_KNOWN, *_BELOW_MESH))
    wholes[0].refuse((), "is no mesh YAML", f"Expected a field `mesh` with one of {words}")
    wholes[0].checked()


def _is_mesh(part: ForeignConfig) -> bool:
    return any(part.where(word) is not None for word in ("discovery", "routing", "role"))


def _pool(mesh: ForeignConfig, name: str, given: Sequence[str]) -> ManifestDraft:
    """Return the Macs of the mesh: as listed, or all of them where they find each other."""
    draft = ManifestDraft(kind="NodePool", name=name, source=mesh)
    kinds = {"mdns": "any", "tailscale": "any", "static": "static"}
    kind = mesh.one_of(kinds, "discovery", "type") or "any"
    mesh.tell(("discovery", "type"), _REASONS["discovery.type"].says)
    hosts: list[tuple[tuple[str | int, ...], str]] = []
    for word in _LISTS:
        hosts.extend(_hosts(mesh, ("discovery", word)))
    if hosts or given:
        hosts = hosts or [(("discovery",), node) for node in given]
        listed: list[Tree] = [*resolve_nodes(mesh, hosts, given)]
        draft.put("spec.nodes", listed, *hosts[0][0])
    elif kind == "static":
        mesh.refuse(
            ("discovery",),
            "is static and lists no Macs",
            "Write below it: nodes: [{host: mac-1.local, port: 4000}], or --nodes",
        )
    else:
        draft.put("spec.selector", {})
        draft.notes.append("every Mac whose agent joins; name them with --nodes to choose")
    return draft


def _hosts(
    mesh: ForeignConfig, path: tuple[str | int, ...]
) -> list[tuple[tuple[str | int, ...], str]]:
    found: list[tuple[tuple[str | int, ...], str]] = []
    for index in range(mesh.count(*path)):
        inner = mesh.below(*path, index)
        if inner is None:
            host = (mesh.text(*path, index) or "").partition(":")[0]
            found.append(((*path, index), host))
            continue
        named = inner.text("name")
        at = inner.text("host") or inner.text("hostname") or inner.text("ip")
        found.append(((*path, index), named or at or ""))
    return found


def _routing(mesh: ForeignConfig) -> dict[str, Tree]:
    found: dict[str, Tree] = {}
    strategy = mesh.one_of(_STRATEGIES, "routing", "strategy")
    if strategy is not None:
        found["strategy"] = strategy
    where: dict[str, tuple[str | int, ...]] = {
        ours: ("routing", "weights", theirs) for ours, theirs in _WEIGHTS.items()
    }
    words = ("cache_affinity", "prefix_cache_hit", "prefix_cache")
    affinity = next((word for word in words if mesh.where("routing", "weights", word)), words[0])
    where["prefixAffinity"] = ("routing", "weights", affinity)
    weights = manifest_drafts.scale_weights(mesh, where)
    if weights is not None and strategy in (None, "Scored"):
        found["weights"] = weights
    return found


def _tiers(part: ForeignConfig, routing: dict[str, Tree], pool: str) -> list[ManifestDraft]:
    """Return a deployment for each tier; clients go on asking for it by the tier's name."""
    made = []
    for index in range(part.count("tiers")):
        tier = part.below("tiers", index)
        if tier is None:
            part.refuse(("tiers", index), "expected a mapping with name and model")
            continue
        model = tier.text("source") or tier.text("model")
        word = tier.text("name")
        if model is None:
            tier.refuse((), "names no model", "Write: model: mlx-community/Qwen3-8B-4bit")
            continue
        shown = tier.text("model")
        draft = ManifestDraft(
            kind="ModelDeployment", name=object_name(shown or model, "model"), source=tier
        )
        draft.put("spec.model.path", model, "source" if tier.where("source") else "model")
        names: list[Tree] = [*served_names(draft.name, word, shown)]
        draft.put("spec.servedNames", names or None, "name")
        manifest_drafts.set_placement(draft, routing, [pool])
        made.append(draft)
    return made
