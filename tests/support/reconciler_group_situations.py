"""Groups, and replicas on them, as values for planner tests."""

import json
from collections.abc import Sequence
from dataclasses import replace

from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.groups.epochs import Epoch
from reconciler.groups.group_view import GroupView
from reconciler.placement.inputs import Allocation, NodeView
from reconciler.placement.table import NodeTable
from schemas.deployment import ModelDeployment
from schemas.formation import Formation
from schemas.node import ModelReport, SplitOptions
from schemas.replica import MemoryProof, RankAssignment
from schemas.shardgroup import ShardGroupSpec
from tests.support.reconciler_agents import node_status
from tests.support.world import GEOMETRY, GIB, NOW, deployment, node, observed, replica

# 14 GiB in one piece, 16 layers; half of it is 7 GiB of weights, and some 1.7 GiB besides.
LAYER = 14 * GIB // 16
SPLIT = SplitOptions(
    tensor=(2, 4), is_pipelined=True, layer_bytes=(LAYER,) * 16, basis="llama, 8 heads, 8 KV heads"
)
BIG = GEOMETRY.model_copy(update={"weights_bytes": 14 * GIB, "splitting": SPLIT})
SMALL = BIG.model_copy(
    update={
        "weights_bytes": 4 * GIB,
        "splitting": SPLIT.model_copy(update={"layer_bytes": (4 * GIB // 16,) * 16}),
    }
)


def mac(name: str, memory_gib: float = 10, **changes: object) -> NodeView:
    """Return a Mac that has a model too large for it, and a smaller one."""
    models = {"qwen": BIG, "qwen-4bit": SMALL}
    reports = {path: ModelReport(path=path, geometry=one) for path, one in models.items()}
    made = replace(
        node(name, memory_gib=memory_gib), models=reports, memory_bytes=int(memory_gib * GIB)
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # by their names


def group(members: str = "ab", *, name: str = "pair", **spec: object) -> GroupView:
    """Return a group of the Macs with these letters; `nodes` are those that a selector finds."""
    if "selector" not in spec:
        spec["members"] = [{"node": member} for member in members]
    machines = {
        member: node_status(member).model_copy(update={"address": f"169.254.0.{ord(member)}"})
        for member in members
    }
    return GroupView(
        name=name,
        spec=ShardGroupSpec.model_validate_json(json.dumps(spec)),
        members=tuple(members),
        machines=machines,
    )


def sharded(wish: str = "pair", **more: object) -> ModelDeployment:
    """Return a deployment with sharding."""
    made = deployment(**more)  # type: ignore[arg-type]  # by their names
    return made.model_copy(update={"spec": made.spec.model_copy(update={"sharding": wish})})


def on(
    nodes: str,
    *,
    of: ModelDeployment | None = None,
    ordinal: int = 0,
    epoch: Epoch | None = None,
    share_gib: float = 9,
    **formation: object,
) -> ReplicaView:
    """Return a replica that serves from these Macs as one."""
    owner = of or sharded()
    view = replica(ordinal, on=nodes[0], of=owner, is_ready=epoch is None or not epoch.over)
    memory = MemoryProof(
        weights_bytes=int(share_gib * GIB), kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0
    )
    ranks = tuple(RankAssignment(node=name, memory=memory) for name in nodes)
    made = Formation(group="pair", formed_at=NOW).model_copy(update=formation)
    spec = view.replica.spec.model_copy(update={"ranks": ranks, "formation": made})
    return replace(
        view,
        replica=view.replica.model_copy(update={"spec": spec}),
        epoch=epoch or Epoch(is_steady=True),
    )


def seen(
    wanted: ModelDeployment | None,
    replicas: Sequence[ReplicaView] = (),
    nodes: Sequence[NodeView] = (),
    groups: Sequence[GroupView] = (),
) -> DeploymentView:
    """Return the situation with what the replicas hold counted on their nodes, as observing does."""
    made = observed(wanted, tuple(replicas), tuple(nodes))
    return counted(replace(made, groups=tuple(groups)))


def counted(situation: DeploymentView) -> DeploymentView:
    """Return the situation with every replica's ranks as tenants of their nodes."""
    views = []
    for view in situation.table.nodes:
        others = [
            allocation for allocation in view.allocations if allocation.deployment != situation.name
        ]
        ours = [one for r in situation.replicas if (one := _tenant(r, view.name)) is not None]
        allocations = (*others, *ours)
        counts = {t.deployment: 0 for t in allocations}
        for tenant in allocations:
            counts[tenant.deployment] += 1
        views.append(
            replace(
                view,
                allocations=allocations,
                used_bytes=sum(allocation.bytes for allocation in allocations),
                replicas=counts,
            )
        )
    return replace(situation, table=NodeTable(tuple(views)))


def _tenant(one: ReplicaView, name: str) -> Allocation | None:
    spec = one.replica.spec
    sizes = [rank.memory.total_bytes for rank in spec.ranks if rank.node == name]
    sizes += [
        leaving_rank.memory_bytes for leaving_rank in spec.leaving if leaving_rank.node == name
    ]
    if not sizes:
        return None
    everywhere = {rank.node for rank in spec.ranks} | {
        leaving_rank.node for leaving_rank in spec.leaving
    }
    return Allocation(
        replica=one.name,
        deployment=spec.deployment,
        bytes=max(sizes),
        version=one.version,
        is_ending=one.is_deleting,
        nodes=tuple(sorted(everywhere)),
    )
