"""Fleets as values: nodes, deployments and replicas for planner tests."""

from datetime import UTC, datetime

from reconciler.observe import NodeView, Observed, ReplicaView
from reconciler.plan import template
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource, Resources
from schemas.meta import ObjectMeta, OwnerReference
from schemas.node import ModelGeometry, ModelReport
from schemas.placement import Placement
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec

GIB = 2**30
NOW = datetime(2026, 1, 1, tzinfo=UTC)
GEOMETRY = ModelGeometry(
    model_type="llama",
    weights_bytes=2 * GIB,
    layers=16,
    kv_heads=8,
    head_dim=64,
    kv_element_bytes=2,
    vocab_size=32_000,
    max_context=8192,
)
PROOF = MemoryProof(weights_bytes=GIB, kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0)


def deployment(
    *,
    replicas: int = 1,
    name: str = "qwen",
    path: str = "qwen",
    placement: Placement | None = None,
    priority: int = 0,
    memory: str = "",
    is_deleting: bool = False,
) -> ModelDeployment:
    return ModelDeployment(
        metadata=ObjectMeta(
            name=name,
            uid=f"uid-{name}",
            generation=1,
            resource_version="7",
            deletion_timestamp=NOW if is_deleting else None,
        ),
        spec=ModelDeploymentSpec(
            model=ModelSource(path=path),
            replicas=replicas,
            context_length=1024,
            concurrency=1,
            placement=placement or Placement(),
            priority=priority,
            resources=Resources(memory=memory) if memory else None,
        ),
    )


def node(
    name: str,
    *,
    memory_gib: float = 8,
    is_ready: bool = True,
    is_cordoned: bool = False,
    labels: dict[str, str] | None = None,
    pools: frozenset[str] = frozenset(),
) -> NodeView:
    return NodeView(
        name=name,
        is_ready=is_ready,
        is_cordoned=is_cordoned,
        allocatable_bytes=int(memory_gib * GIB),
        labels=labels or {},
        pools=pools,
        models={"qwen": ModelReport(path="qwen", geometry=GEOMETRY)},
    )


def replica(
    ordinal: int,
    *,
    on: str = "a",
    of: ModelDeployment | None = None,
    is_ready: bool = True,
    is_deleting: bool = False,
    is_stopped: bool = False,
    is_node_lost: bool = False,
    is_outdated: bool = False,
    memory: MemoryProof = PROOF,
) -> ReplicaView:
    owner = of or deployment()
    return ReplicaView(
        replica=Replica(
            metadata=ObjectMeta(
                name=f"{owner.name}-{ordinal}",
                uid=f"uid-{owner.name}-{ordinal}",
                generation=1,
                deletion_timestamp=NOW if is_deleting else None,
                owner_references=(
                    OwnerReference(kind="ModelDeployment", name=owner.name, uid=owner.metadata.uid),
                ),
            ),
            spec=ReplicaSpec(
                deployment=owner.name,
                template="old" if is_outdated else template(owner),
                model=owner.spec.model,
                served_names=(owner.name,),
                context_length=1024,
                concurrency=1,
                ranks=(RankAssignment(node=on, memory=memory),),
            ),
        ),
        version=ordinal + 1,
        is_ours=True,
        is_ready=is_ready and not is_deleting,
        is_stopped=is_stopped,
        is_node_lost=is_node_lost,
    )


def observed(
    wanted: ModelDeployment | None,
    replicas: tuple[ReplicaView, ...] = (),
    nodes: tuple[NodeView, ...] = (),
) -> Observed:
    return Observed(name="qwen", deployment=wanted, replicas=replicas, nodes=nodes)
