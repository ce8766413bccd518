"""Preloads: the nodes that fetch a hub's model before they get a replica of it. Pure.

A few nodes fetch at a time: as many as have the files already, which they give to the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from reconciler.deployments.actions import EndPreload, StartPreload
from reconciler.deployments.observe import DeploymentView
from reconciler.placement import filters
from reconciler.placement.inputs import NodeView, PlacementRequest, request_for
from reconciler.placement.table import NodeTable
from schemas import quantity, sizes
from schemas.deployment import HubReference, ModelDeployment, PreloadStatus
from schemas.meta import Condition, ConditionStatus

PRELOADED: Final = "Preloaded"
# More would share the uplink of few Macs, and all of them would be whole late.
_MOST_AT_ONCE: Final = 4
# People read statuses.
_MOST_LISTED: Final = 100


def plan_preloads(
    observed: DeploymentView, needed: Mapping[str, HubReference]
) -> Iterator[StartPreload | EndPreload]:
    """Yield the preloads that start and end now; `needed` are nodes that a rollout is about to use, with its model."""
    deployment = observed.deployment
    is_ending = deployment is None or observed.is_ending
    wanted = {} if deployment is None or is_ending else _wanted(deployment, observed)
    wanted |= {} if is_ending else needed
    current = {view.node: view for view in observed.preloads}
    for preload in observed.preloads:
        if preload.node not in wanted:
            yield EndPreload(name=observed.name, node=preload.node, version=preload.version)
    started = {
        name
        for name, source in wanted.items()
        if name in current and current[name].source == source
    }
    waiting = [name for name in wanted if name not in started]
    nodes = {node.name: node for node in observed.table.nodes} if waiting else {}
    free = _free_places(nodes, [(name, wanted[name]) for name in started], wanted)
    for name in waiting:
        source, node = wanted[name], nodes.get(name)
        if node is None or not node.has_files(source.folder):
            if free <= 0 and name not in needed:
                continue
            free -= 1
        version = current[name].version if name in current else 0
        yield StartPreload(name=observed.name, node=name, source=source, version=version)


def _free_places(
    nodes: Mapping[str, NodeView],
    started: Sequence[tuple[str, HubReference]],
    wanted: Mapping[str, HubReference],
) -> int:
    """Return how many more nodes may begin to fetch; a node whose fetch fails, or that is away, holds no place."""
    folders = {source.folder for source in wanted.values()}
    givers = sum(n.is_ready and any(map(n.has_files, folders)) for n in nodes.values())
    fetching = 0
    for name, source in started:
        node = nodes.get(name)
        if node is not None and node.is_ready and not node.fetch_problem(source.folder):
            fetching += not node.has_files(source.folder)
    return min(_MOST_AT_ONCE, max(1, givers)) - fetching


def _wanted(deployment: ModelDeployment, observed: DeploymentView) -> dict[str, HubReference]:
    source = deployment.spec.model.hub
    if deployment.spec.preload is None or source is None or not source.is_pinned:
        return {}
    chosen = choose_nodes(observed, deployment)
    return {node.name: source for node in chosen}


def choose_nodes(observed: DeploymentView, deployment: ModelDeployment) -> tuple[NodeView, ...]:
    """Return the nodes that spec.preload asks for, in the order in which they fetch.

    Those with a replica come first, then those that were chosen before, then those with the fewest bytes to fetch, then
    the better ones. A node that is away keeps its place; one that is drained loses it.
    """
    preload = deployment.spec.preload
    if preload is None:
        return ()
    table, request = observed.table, request_for(deployment, apart_from=observed.apart_from)
    evaluated = table.evaluate(request)
    here = {
        name for replica in observed.replicas if not replica.is_deleting for name in replica.nodes
    }
    before = {view.node for view in observed.preloads}
    rows = [row for row in _able_rows(request, table) if _is_in(preload.pools, table.nodes[row])]

    def order(row: int) -> tuple[object, ...]:
        node = table.nodes[row]
        lacks = node.missing_bytes(request.path)
        score = -float(evaluated.weighted[row])
        return node.name not in here, node.name not in before, lacks, score, node.name

    stays = [
        row
        for row in rows
        if not table.nodes[row].leave_reason
        and (table.nodes[row].takes_replicas or table.nodes[row].name in here | before)
    ]
    number = quantity.resolve_amount(preload.nodes, len(stays), round_up=True)
    return tuple(table.nodes[row] for row in sorted(stays, key=order)[:number])


def _able_rows(request: PlacementRequest, table: NodeTable) -> list[int]:
    """Return the rows of the nodes that could take a replica if they were empty and healthy."""
    evaluated = table.evaluate(request)
    able = evaluated.need.of_node <= table.allocatable
    for node_filter, verdict in zip(filters.FIXED, evaluated.verdicts, strict=True):
        if not node_filter.is_passing:
            able &= verdict.passes
    return list(map(int, np.flatnonzero(able)))


def _is_in(pools: Sequence[str], node: NodeView) -> bool:
    return not pools or not node.pools.isdisjoint(pools)


def preload_status(observed: DeploymentView) -> tuple[PreloadStatus, Condition] | None:
    """Return the state of spec.preload and its condition; None without it, or while the model is not resolved."""
    deployment = observed.deployment
    if deployment is None or deployment.spec.preload is None or not observed.has_model:
        return None
    folder = deployment.spec.model.folder
    chosen = choose_nodes(observed, deployment)
    lacking = [node for node in chosen if not node.has_files(folder)]
    status = PreloadStatus(
        desired=len(chosen),
        present=len(chosen) - len(lacking),
        missing_bytes=sum(node.missing_bytes(folder) for node in lacking),
        nodes=tuple(sorted(node.name for node in chosen))[:_MOST_LISTED],
    )
    return status, _condition(status, lacking, folder)


def _condition(found: PreloadStatus, lacking: Sequence[NodeView], folder: str) -> Condition:
    count = f"{found.present} of {found.desired} nodes have the files"
    if not found.desired:
        message = "no node that may run a replica is in the pools, and takes replicas now"
        return _false("NoNodeToPreload", message)
    if not lacking:
        return Condition(
            type=PRELOADED, status=ConditionStatus.TRUE, reason="AllPresent", message=count
        )
    failing = [node for node in lacking if node.fetch_problem(folder)]
    if failing:
        why = "; ".join(f"{node.name}: {node.fetch_problem(folder)}" for node in failing[:3])
        return _false("PreloadFailing", f"{count}; {why}")
    return _false("Preloading", f"{count}; the others lack {sizes.show(found.missing_bytes)}")


def _false(reason: str, message: str) -> Condition:
    return Condition(type=PRELOADED, status=ConditionStatus.FALSE, reason=reason, message=message)
