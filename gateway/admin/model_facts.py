"""Facts about models, from what Macs report and what is proven for replicas."""

from collections.abc import Mapping, Sequence

from gateway.admin.admin_context import AdminContext, NodeList
from gateway.apis.ollama.model_facts import ModelFacts
from gateway.routing.table import ServedModel
from schemas.node import ModelGeometry


async def read_facts(
    context: AdminContext, models: Sequence[ServedModel]
) -> Mapping[str, ModelFacts]:
    """Return the facts by model name. Without the store they are those of a moment ago, or none."""
    nodes = await context.nodes.nodes()
    geometries = _geometries(nodes)
    deployments = context.fleet_state.table_cache.known().deployments
    facts = {}
    for model in models:
        names = model.deployments()
        source = next((deployments[n].spec.model for n in names if n in deployments), None)
        geometry = None if source is None else geometries.get(source.folder)
        facts[model.name] = ModelFacts(
            source="" if source is None else source.label,
            loaded_bytes=sum(nodes.memory.get(name, 0) for name in names),
            family=geometry.model_type if geometry else "",
            parameters=geometry.parameters if geometry else 0,
            weights_bytes=geometry.weights_bytes if geometry else 0,
        )
    return facts


def _geometries(nodes: NodeList) -> dict[str, ModelGeometry]:
    """Return the properties of models by their folders, as deployments write them."""
    return {
        report.path: report.geometry
        for status in nodes.statuses.values()
        for report in status.models
        if report.geometry is not None
    }
