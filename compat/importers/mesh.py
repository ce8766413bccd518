"""Importer of mlx-stack's mesh YAML: a NodePool, and a ModelDeployment per tier. Pure.

mlx-stack issue #31 ("Multi-Mac mesh networking") defines the fields role, discovery (a list of kinds: mdns, tailscale,
or static with hosts and ports), routing (strategy, weights), health_check and coordinator. `tiers` come from its stack
definition.
"""

from collections.abc import Mapping, Sequence
from typing import Final

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
    scale_weights,
    served_names,
)
from compat.importers.source import Source, read_documents
from manifests.trees import Tree
from schemas import duration
from schemas.meta import object_name

_STRATEGIES = {"scored": "Scored", "round_robin": "RoundRobin", "random": "Random"}
_WEIGHTS = {
    "modelLoaded": ("model_loaded",),
    "memoryHeadroom": ("memory_headroom",),
    "queueDepth": ("queue_depth",),
    "prefixAffinity": ("cache_affinity", "prefix_cache_hit", "prefix_cache"),
}
# One of these fields identifies a mesh file; the second group does so only below `mesh`, because it is too common.
_KNOWN = ("discovery", "routing", "tiers")
_BELOW_MESH = ("role", "failover_timeout", "health_check", "coordinator", "enabled")
# Bounds of spec.routing.healthCheck in seconds, by the mesh's names, which are those of the fleet.
_HEALTH_TIMES = {"interval": (1.0, 3600.0), "timeout": (0.1, 60.0)}
_LISTS = ("nodes", "peers", "hosts", "static")
_JOIN = "agents connect to the fleet's etcd (--etcd), over any network that reaches it"
_PORT = "set the gateway's port with its flag --port (default 4000)"
_ENGINES = "a gateway learns each engine's port from the store"
_REASONS: Final[Mapping[str, str]] = {
    "enabled": "a fleet is active while its agents run; there is no switch",
    "role": "any number of reconcilers run and one leads; all gateways are equal",
    "port": _PORT,
    "discovery.type": _JOIN,
    **dict.fromkeys((f"discovery.{name}" for name in _LISTS), _ENGINES),
    "discovery.interface": "agents announce themselves on every local network",
    "coordinator": "any number of reconcilers run and one leads",
    "coordinator.port": _PORT,
    "coordinator.failover_timeout": "all gateways serve; the next reconciler leads within seconds, and requests go on",
    "failover_timeout": "a gateway tries another endpoint at once; spec.routing.timeouts.attempt limits the wait",
    "tiers.port": "agents choose the ports of engines",
    "tiers.quant": "the model folder defines the quantization",
    "tiers.vllm_flags": "flags of vllm-mlx; the fleet's engines batch and cache without flags",
    "cloud_fallback": "write a ModelRoute with spec.external and spec.fallbacks; its key is an externalkey",
}


def convert(text: str, source: str, *, name: str, nodes: NodeFinder, models: Sequence[str]) -> str:
    """Convert the file to manifests.

    Raises:
        ManifestErrors: all problems of the file, with their lines.

    """
    files = [Source(document) for document in read_documents(text, source)]
    parts = [file.section("mesh") or file for file in files]
    is_mesh = any(part.find_path(word) for part in parts for word in _KNOWN) or any(
        file.find_path("mesh", word) for file in files for word in _BELOW_MESH
    )
    if not is_mesh:
        # Any YAML would become a pool of all Macs.
        known = ", ".join((*_KNOWN, *_BELOW_MESH))
        files[0].refuse((), "is not mesh YAML", f"Expected a field `mesh` with one of {known}")
        files[0].raise_problems()
    words = ("discovery", "routing", "role")
    mesh = next((part for part in parts if any(map(part.find_path, words))), parts[0])
    pools, routing = _pools(mesh, name, nodes), _routing(mesh)
    names = [pool.name for pool in pools]
    deployments = [draft for part in parts for draft in _tiers(part, routing, names)]
    deployments += draft_deployments(mesh, models, routing, names)
    omitted: list[str] = []
    for part in parts:
        omitted += part.omission_lines(_REASONS)
        part.raise_problems()
    if not deployments:
        pools[-1].notes += routing_comment(routing)
    return join_manifests(header(source, "mlx-stack", omitted), [*pools, *deployments])


def _pools(mesh: Source, name: str, finder: NodeFinder) -> list[ManifestDraft]:
    """Return a pool of the listed Macs, of all Macs where discovery is automatic, or one of each."""
    kinds = {"mdns": "any", "tailscale": "any", "static": "static"}
    found: set[str | None] = set()
    hosts: list[tuple[Place, Sequence[str]]] = []
    is_list = mesh.find_path("discovery") is not None and mesh.section("discovery") is None
    paths: list[Place] = [("discovery",)]
    if is_list:
        paths = [("discovery", index) for index in range(mesh.count("discovery"))]
    for path in paths:
        # A list may name a kind alone.
        is_word = is_list and mesh.section(*path) is None
        at = path if is_word else (*path, "type")
        found.add(mesh.choice(kinds, *at))
        mesh.explain(at, _JOIN)
        for word in () if is_word else _LISTS:
            hosts += _hosts(mesh, (*path, word))
    if "static" in found and not hosts and not finder.given:
        hint = "Add below it: nodes: [{host: mac-1.local, port: 4000}], or give --nodes"
        mesh.refuse(("discovery",), "is static and lists no Macs", hint)
    every = ManifestDraft(kind="NodePool", name=name, source=mesh)
    every.put("spec.selector", {})
    every.notes.append("every Mac whose agent joins; give --nodes to choose")
    if not hosts and not finder.given:
        return [every]
    has_both = is_list and bool(hosts) and "any" in found
    hosts = hosts or [(("discovery",), (node,)) for node in finder.given]
    listed_name = f"{name}-static" if has_both else name
    listed = ManifestDraft(kind="NodePool", name=listed_name, source=mesh)
    listed.put("spec.nodes", [*resolve_nodes(mesh, hosts, finder)], *hosts[0][0])
    if not has_both:
        return [listed]
    listed.notes.append(
        "the Macs of discovery type static; `fleetctl node add` installs an agent on each"
    )
    return [every, listed]


def _hosts(mesh: Source, path: Place) -> list[tuple[Place, Sequence[str]]]:
    hosts: list[tuple[Place, Sequence[str]]] = []
    for index in range(mesh.count(*path)):
        inner = mesh.section(*path, index)
        if inner is None:
            names = [(mesh.text(*path, index) or "").partition(":")[0]]
        else:
            names = [inner.text(word) or "" for word in ("name", "host", "hostname", "ip")]
        # A Mac's own name does not have the domain of a Tailscale network.
        bare = [
            host.partition(".")[0] if host.endswith((".tailnet", ".ts.net")) else host
            for host in names
        ]
        hosts.append(((*path, index), bare))
    return hosts


def _routing(mesh: Source) -> Routing:
    strategy = mesh.choice(_STRATEGIES, "routing", "strategy")
    places: dict[str, Place] = {}
    for ours, words in _WEIGHTS.items():
        given = (word for word in words if mesh.find_path("routing", "weights", word))
        places[ours] = ("routing", "weights", next(given, words[0]))
    weights = scale_weights(mesh, places)
    if weights is not None and strategy not in (None, "Scored"):
        for place in places.values():
            mesh.explain(place, f"strategy {strategy} has no weights")
        weights = None
    word = next((word for word in ("health_check", "health") if mesh.find_path(word)), "health")
    values: tuple[tuple[str, Tree, Place], ...] = (
        ("strategy", strategy, ("routing", "strategy")),
        ("weights", weights, ("routing", "weights")),
        ("healthCheck", _health_check(mesh, word) or None, (word,)),
    )
    return [(ours, value, mesh.find_path(*at)) for ours, value, at in values if value is not None]


def _health_check(mesh: Source, word: str) -> dict[str, Tree]:
    """Return the health checks of endpoints; the file gives times in seconds, or as durations."""
    checks: dict[str, Tree] = {}
    for name, (least, most) in _HEALTH_TIMES.items():
        seconds = mesh.seconds(word, name)
        if seconds is not None:
            if not least <= seconds <= most:
                mesh.refuse((word, name), f"is {seconds:g} s; give {least:g} to {most:g} s")
            checks[name] = duration.render(seconds)
    for name in ("unhealthy_threshold", "failures"):
        threshold = mesh.integer(word, name, least=1)
        if threshold is not None:
            checks["unhealthyThreshold"] = threshold
    return checks


def _tiers(part: Source, routing: Routing, pools: Sequence[str]) -> list[ManifestDraft]:
    """Return a deployment for each tier; clients can keep requesting it by the tier's name."""
    drafts = []
    for index in range(part.count("tiers")):
        tier = part.section("tiers", index)
        if tier is None:
            part.refuse(("tiers", index), "expected a mapping with name and model")
            continue
        shown = tier.text("model")
        model = tier.text("source") or shown
        if model is None:
            tier.refuse((), "names no model", "Add: model: mlx-community/Qwen3-8B-4bit")
            continue
        name = object_name(shown or model, "model")
        draft = ManifestDraft(kind="ModelDeployment", name=name, source=tier)
        draft.put_model(model, "source" if tier.find_path("source") else "model")
        draft.put("spec.servedNames", served_names(name, tier.text("name"), shown), "name")
        draft.put_routing(routing, pools)
        drafts.append(draft)
    return drafts
