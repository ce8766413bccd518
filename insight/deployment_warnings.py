"""Warnings about deployments that are valid, and that the Macs cannot serve as they are declared. Pure."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from manifests.suggestions import nearest
from models.catalogue import catalogue
from reconciler.deployments.model_fit import with_facts
from reconciler.deployments.snapshot import FleetSnapshot
from reconciler.placement.inputs import NodeView, PlacementRequest, request_for
from reconciler.placement.memory_proof import override_shortfall, proof_of
from schemas import quantity
from schemas.deployment import ModelDeployment
from schemas.node import NodeStatus

_NAMED = 10
# Agents report models two levels below the models folder, and up to 100 (models/model_files.py).
_DEPTH, _MOST = 2, 100


def deployment_warnings(deployment: ModelDeployment, seen: FleetSnapshot) -> Iterator[str]:
    """Yield what keeps the Macs from serving a deployment: no Mac reports its folder, or too little memory is set."""
    found = [seen.lister.node_status(name) for name in seen.lister.node_names()]
    statuses = [status for status in found if status is not None]
    for text in (_missing_folder(deployment, statuses), _little_memory(deployment, seen, statuses)):
        if text:
            yield f"modeldeployment/{deployment.name}: {text}"


def _missing_folder(deployment: ModelDeployment, statuses: list[NodeStatus]) -> str:
    """Describe a folder below the models folder that no Mac has; empty if one may have it."""
    path = PurePosixPath(deployment.spec.model.path or "/")
    if not statuses or path.is_absolute() or len(path.parts) > _DEPTH:
        return ""
    known: set[str] = set()
    for status in statuses:
        if status.local_models is None or len(status.local_models) >= _MOST:
            return ""
        known |= {model.path for model in status.local_models}
        known |= {report.path for report in status.models if report.geometry is not None}
    if {str(path), deployment.spec.model.path} & known:
        return ""
    names = sorted(known)
    close = nearest(str(path), names)
    guess = f"; did you mean {close}?" if close is not None else "."
    listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"no Mac reports a model {path} in its models folder yet{guess} Models there: {listed or 'none'}"


def _little_memory(
    deployment: ModelDeployment, seen: FleetSnapshot, statuses: list[NodeStatus]
) -> str:
    """Describe a spec.resources.memory below what the model needs; empty if it is enough, or the need is not known."""
    request = request_for(deployment)
    if not request.override_bytes:
        return ""
    hub = deployment.spec.model.hub
    listed = catalogue.find(hub.repo, catalogue.shipped_catalogue()) if hub is not None else None
    for node in seen.table().nodes:
        view = node if listed is None else with_facts(node, request.path, listed.facts)
        if _is_known(request, view):
            return override_shortfall(proof_of(request, view))
    # No agent has inspected the model yet.
    path = str(PurePosixPath(request.path))
    local = [model for status in statuses for model in status.local_models or ()]
    sizes = [model.weights_bytes for model in local if model.path == path]
    if request.override_bytes >= max(sizes, default=0):
        return ""
    show = quantity.show
    return (
        f"spec.resources.memory is {show(request.override_bytes)}, less than the weights ({show(max(sizes))}): "
        "remove it, and the memory proof decides"
    )


def _is_known(request: PlacementRequest, node: NodeView) -> bool:
    """Return whether the node reports all that the memory proof needs."""
    source = request.spec.model
    models = [request.path, *([source.draft.path] if source.draft is not None else [])]
    reports = [node.models.get(path) for path in models]
    has_models = all(
        report is not None and report.geometry and not report.geometry.unknown for report in reports
    )
    return has_models and all(path in node.adapters for path in source.adapter_paths)
