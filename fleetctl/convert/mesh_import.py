"""Conversion of mlx-stack's mesh YAML to a NodePool and a ModelDeployment per tier. Pure.

mlx-stack issue #31 ("Multi-Mac mesh networking") defines the fields role, discovery (a list of kinds: mdns, tailscale,
or static with hosts and ports), routing (strategy, weights), health_check and coordinator. `tiers` come from its stack
definition.
"""

from collections.abc import Mapping, Sequence

from fleetctl.convert import manifest_drafts
from fleetctl.convert.foreign_config import ForeignConfig, OmissionReason, read_documents
from fleetctl.convert.manifest_drafts import (
    ManifestDraft,
    join_manifests,
    object_name,
    resolve_nodes,
    served_names,
)
from fleetctl.convert.node_names import NodeNames
from manifests.trees import Path, Tree
from schemas import duration

_STRATEGIES = {"scored": "Scored", "round_robin": "RoundRobin", "random": "Random"}
_WEIGHTS = {
    "modelLoaded": "model_loaded",
    "memoryHeadroom": "memory_headroom",
    "queueDepth": "queue_depth",
}
# One of these fields identifies a mesh file; the second group does so only below `mesh`, because it is too common.
_KNOWN = ("discovery", "routing", "tiers")
_BELOW_MESH = ("role", "failover_timeout", "health_check", "coordinator", "enabled")
_TAILNETS = (".tailnet", ".ts.net")
_HEALTH = ("health_check", "health")
# Bounds of spec.routing.healthCheck in seconds, by the mesh's names, which are those of the fleet.
_HEALTH_TIMES = {"interval": (1.0, 3600.0), "timeout": (0.1, 60.0)}
_HEALTH_THRESHOLDS = ("unhealthy_threshold", "failures")
_LISTS = ("nodes", "peers", "hosts", "static")

_REASONS = {
    "enabled": OmissionReason(text="a fleet is active while its agents run; there is no switch"),
    "role": OmissionReason(
        text="any number of reconcilers run and one leads; all gateways are equal", is_shown=True
    ),
    "port": OmissionReason(text="set the gateway's port with its flag --port (default 4000)"),
    "discovery.type": OmissionReason(
        text="agents connect to the fleet's etcd (--etcd), over any network that reaches it"
    ),
    "discovery.nodes": OmissionReason(text="a gateway learns each engine's port from the store"),
    "discovery.peers": OmissionReason(text="a gateway learns each engine's port from the store"),
    "discovery.hosts": OmissionReason(text="a gateway learns each engine's port from the store"),
    "discovery.static": OmissionReason(text="a gateway learns each engine's port from the store"),
    "discovery.interface": OmissionReason(text="agents announce themselves on every local network"),
    "coordinator.port": OmissionReason(
        text="set the gateway's port with its flag --port (default 4000)"
    ),
    "coordinator.failover_timeout": OmissionReason(
        text="all gateways serve at any time; of the reconcilers the next leads within seconds, and requests go on"
    ),
    "coordinator": OmissionReason(text="any number of reconcilers run and one leads"),
    "failover_timeout": OmissionReason(
        text="a gateway tries another endpoint at once; spec.routing.timeouts.attempt limits the wait for a response"
    ),
    "tiers.port": OmissionReason(text="agents choose the ports of engines"),
    "tiers.quant": OmissionReason(text="the model folder defines the quantization"),
    "tiers.vllm_flags": OmissionReason(
        text="flags of vllm-mlx; the fleet's engines batch and cache without flags"
    ),
    "cloud_fallback": OmissionReason(
        text="write a ModelRoute with the cloud in spec.external and spec.fallbacks; its key is an externalkey"
    ),
}


def convert(text: str, source: str, *, name: str, nodes: NodeNames, models: Sequence[str]) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file, with their lines.

    """
    configs = [ForeignConfig(document) for document in read_documents(text, source)]
    _require_mesh(configs)
    parts = [_root(config) for config in configs]
    drafts: list[ManifestDraft] = []
    header = [f"From {source} of mlx-stack. Settings without a counterpart:"]
    mesh = next((part for part in parts if _is_mesh(part)), parts[0])
    pools = _pools(mesh, name, nodes)
    routing = _routing(mesh)
    places = {name: mesh.find_path("routing", name) for name in ("strategy", "weights")}
    places["healthCheck"] = next((at for word in _HEALTH if (at := mesh.find_path(word))), None)
    drafts.extend(pools)
    pool_names = [pool.name for pool in pools]
    for part in parts:
        drafts.extend(_tiers(part, routing, pool_names, places))
    drafts.extend(manifest_drafts.draft_deployments(mesh, models, routing, pool_names, places))
    for part in parts:
        header.extend(part.omission_lines(_REASONS, "the fleet has no such setting"))
        part.raise_problems()
    if len(drafts) == len(pools):
        pools[-1].notes.extend(manifest_drafts.routing_comment(routing))
    return join_manifests(header, drafts)


def _root(config: ForeignConfig) -> ForeignConfig:
    return config.section("mesh") or config


def _require_mesh(configs: Sequence[ForeignConfig]) -> None:
    """Refuse a file without mesh fields; otherwise any YAML would become a pool of all Macs.

    Raises:
        ManifestErrors: no field of a mesh was found.

    """
    if any(
        config.find_path(word) is not None or config.find_path("mesh", word) is not None
        for config in configs
        for word in _KNOWN
    ) or any(
        config.find_path("mesh", word) is not None for config in configs for word in _BELOW_MESH
    ):
        return
    words = ", ".join((*_KNOWN, *_BELOW_MESH))
    configs[0].refuse((), "is not mesh YAML", f"Expected a field `mesh` with one of {words}")
    configs[0].raise_problems()


def _is_mesh(part: ForeignConfig) -> bool:
    return any(part.find_path(word) is not None for word in ("discovery", "routing", "role"))


def _pools(mesh: ForeignConfig, name: str, names: NodeNames) -> list[ManifestDraft]:
    """Return a pool of the listed Macs, of all Macs where discovery is automatic, or one of each."""
    kinds = {"mdns": "any", "tailscale": "any", "static": "static"}
    found: set[str] = set()
    hosts: list[tuple[tuple[str | int, ...], tuple[str, ...]]] = []
    is_list = _is_list(mesh)
    for path in _discoveries(mesh, is_list=is_list):
        # A list may name a kind alone.
        at = path if mesh.section(*path) is None and is_list else (*path, "type")
        kind = mesh.choice(kinds, *at)
        mesh.explain(at, _REASONS["discovery.type"].text)
        found.update([kind] if kind else [])
        if at != path:
            for word in _LISTS:
                hosts.extend(_hosts(mesh, (*path, word)))
    if "static" in found and not hosts and not names.given:
        mesh.refuse(
            ("discovery",),
            "is static and lists no Macs",
            "Add below it: nodes: [{host: mac-1.local, port: 4000}], or give --nodes",
        )
    listed, every = ManifestDraft(kind="NodePool", name=name, source=mesh), None
    if is_list and hosts and "any" in found:
        every, listed.name = (
            ManifestDraft(kind="NodePool", name=name, source=mesh),
            f"{name}-static",
        )
    if hosts or names.given:
        hosts = hosts or [(("discovery",), (node,)) for node in names.given]
        nodes: list[Tree] = [*resolve_nodes(mesh, hosts, names)]
        listed.put("spec.nodes", nodes, *hosts[0][0])
        if every is None:
            return [listed]
        listed.notes.append(
            "the Macs of discovery type static; `fleetctl node add` installs an agent on each"
        )
    else:
        every = listed
    every.put("spec.selector", {})
    every.notes.append("every Mac whose agent joins; give --nodes to choose")
    return [every] if every is listed else [every, listed]


def _is_list(mesh: ForeignConfig) -> bool:
    return mesh.find_path("discovery") is not None and mesh.section("discovery") is None


def _discoveries(mesh: ForeignConfig, *, is_list: bool) -> list[tuple[str | int, ...]]:
    """Return the paths of the kinds of discovery: one below `discovery`, or a list of them."""
    if not is_list:
        return [("discovery",)]
    return [("discovery", index) for index in range(mesh.count("discovery"))]


def _hosts(
    mesh: ForeignConfig, path: tuple[str | int, ...]
) -> list[tuple[tuple[str | int, ...], tuple[str, ...]]]:
    found: list[tuple[tuple[str | int, ...], tuple[str, ...]]] = []
    for index in range(mesh.count(*path)):
        inner = mesh.section(*path, index)
        if inner is None:
            host = (mesh.text(*path, index) or "").partition(":")[0]
            found.append(((*path, index), (_own_name(host),)))
            continue
        words = [inner.text(word) or "" for word in ("name", "host", "hostname", "ip")]
        found.append(((*path, index), tuple(map(_own_name, words))))
    return found


def _own_name(host: str) -> str:
    """Return the host without the domain of a Tailscale network, which a Mac's own name does not have."""
    return host.partition(".")[0] if host.endswith(_TAILNETS) else host


def _routing(mesh: ForeignConfig) -> dict[str, Tree]:
    found: dict[str, Tree] = {}
    strategy = mesh.choice(_STRATEGIES, "routing", "strategy")
    if strategy is not None:
        found["strategy"] = strategy
    weight_paths: dict[str, tuple[str | int, ...]] = {
        name: ("routing", "weights", theirs) for name, theirs in _WEIGHTS.items()
    }
    words = ("cache_affinity", "prefix_cache_hit", "prefix_cache")
    affinity = next(
        (word for word in words if mesh.find_path("routing", "weights", word)), words[0]
    )
    weight_paths["prefixAffinity"] = ("routing", "weights", affinity)
    weights = manifest_drafts.scale_weights(mesh, weight_paths)
    if weights is not None and strategy in (None, "Scored"):
        found["weights"] = weights
    elif weights is not None:
        for path in weight_paths.values():
            mesh.explain(path, f"strategy {strategy} has no weights")
    checks = _health_check(mesh)
    if checks:
        found["healthCheck"] = checks
    return found


def _health_check(mesh: ForeignConfig) -> dict[str, Tree]:
    """Return the health checks of endpoints; the file gives times in seconds, or as durations."""
    found: dict[str, Tree] = {}
    for word in _HEALTH:
        for name, (least, most) in _HEALTH_TIMES.items():
            seconds = mesh.seconds(word, name)
            if seconds is None:
                continue
            if not least <= seconds <= most:
                mesh.refuse((word, name), f"is {seconds:g} s; give {least:g} to {most:g} s")
            found[name] = duration.render(seconds)
        for name in _HEALTH_THRESHOLDS:
            threshold = mesh.integer(word, name, least=1)
            if threshold is not None:
                found["unhealthyThreshold"] = threshold
    return found


def _tiers(
    part: ForeignConfig,
    routing: dict[str, Tree],
    pools: Sequence[str],
    places: Mapping[str, Path | None],
) -> list[ManifestDraft]:
    """Return a deployment for each tier; clients can keep requesting it by the tier's name."""
    drafts = []
    for index in range(part.count("tiers")):
        tier = part.section("tiers", index)
        if tier is None:
            part.refuse(("tiers", index), "expected a mapping with name and model")
            continue
        model = tier.text("source") or tier.text("model")
        word = tier.text("name")
        if model is None:
            tier.refuse((), "names no model", "Add: model: mlx-community/Qwen3-8B-4bit")
            continue
        shown = tier.text("model")
        draft = ManifestDraft(
            kind="ModelDeployment", name=object_name(shown or model, "model"), source=tier
        )
        draft.put_model(model, "source" if tier.find_path("source") else "model")
        names: list[Tree] = [*served_names(draft.name, word, shown)]
        draft.put("spec.servedNames", names or None, "name")
        manifest_drafts.set_placement(draft, routing, pools, places)
        drafts.append(draft)
    return drafts
