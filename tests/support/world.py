"""Builders of objects for tests: nodes, deployments, replicas, revisions and what a reconciler observes."""

from datetime import UTC, datetime
from typing import Any, TypeVar

from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.rollout.revisions import content_of, revision_name, template_hash
from reconciler.placement.inputs import NodeView
from reconciler.placement.table import NodeTable
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentSpec,
    ModelSource,
    Resources,
    Revision,
    RevisionSpec,
)
from schemas.meta import (
    ApiObject,
    Condition,
    ConditionStatus,
    ObjectMeta,
    OwnerReference,
    Status,
    find_condition,
)
from schemas.node import ModelGeometry, ModelReport
from schemas.placement import Placement
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from schemas.rollout import Rollout

GIB = 2**30
# What replicas run that are outdated.
OLD = "0" * 12
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
Kind = TypeVar("Kind", bound=ApiObject)


def proof(gib: float) -> MemoryProof:
    """Return a memory proof of this size, all of it weights."""
    size = int(gib * GIB)
    return MemoryProof(weights_bytes=size, kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0)


PROOF = proof(1)


def with_metadata(obj: Kind, **changes: object) -> Kind:
    metadata = obj.metadata.model_copy(update=changes)
    return obj.model_copy(update={"metadata": metadata})


def with_spec(obj: Kind, **changes: object) -> Kind:
    spec = obj.spec.model_copy(update=changes)  # type: ignore[attr-defined]  # every kind has one
    return obj.model_copy(update={"spec": spec})


def condition(
    type_: str = "Ready", reason: str = "Fake", message: str = "so it is", *, holds: bool = True
) -> Condition:
    truth = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    return Condition(type=type_, status=truth, reason=reason, message=message)


def condition_of(status: Status, type_: str) -> tuple[str, str, str]:
    """Return status, reason and message of a condition that must be there."""
    match = find_condition(status.conditions, type_)
    assert match is not None, f"there is no condition {type_}: {status.conditions}"
    return match.status.value, match.reason, match.message


def deployment(
    *,
    replicas: int = 1,
    name: str = "qwen",
    path: str = "qwen",
    placement: Placement | None = None,
    priority: int = 0,
    memory: str = "",
    min_available: int | str = 0,
    context_length: int = 1024,
    rollout: Rollout | None = None,
    is_deleting: bool = False,
    **spec: Any,
) -> ModelDeployment:
    """Return a deployment; `spec` has any further fields of it, by name."""
    fields = {"model": ModelSource(path=path), "concurrency": 1, **spec}
    return ModelDeployment(
        metadata=ObjectMeta(
            name=name,
            uid=f"uid-{name}",
            generation=1,
            resource_version="7",
            deletion_timestamp=NOW if is_deleting else None,
        ),
        spec=ModelDeploymentSpec(
            replicas=replicas,
            context_length=context_length,
            placement=placement or Placement(),
            priority=priority,
            min_available=min_available,
            rollout=rollout or Rollout(),
            resources=Resources(memory=memory) if memory else None,
            **fields,
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
    leave_reason: str = "",
    **fields: Any,
) -> NodeView:
    """Return a node; `fields` has any further fields of it, by name."""
    models = {"qwen": ModelReport(path="qwen", geometry=GEOMETRY)}
    fields = {"models": models, "allocatable_bytes": int(memory_gib * GIB), **fields}
    return NodeView(
        name=name,
        is_ready=is_ready,
        is_cordoned=is_cordoned,
        labels=labels or {},
        pools=pools,
        leave_reason=leave_reason,
        **fields,
    )


def replica(
    ordinal: int,
    *,
    on: str = "a",
    of: ModelDeployment | None = None,
    is_ready: bool = True,
    reported_ready: bool = False,
    is_deleting: bool = False,
    is_stopped: bool = False,
    is_node_lost: bool = False,
    cannot_start: bool = False,
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
                template=OLD if is_outdated else template_hash(owner),
                model=owner.spec.model,
                served_names=(owner.name,),
                context_length=1024,
                concurrency=1,
                ranks=(RankAssignment(node=on, memory=memory),),
            ),
        ),
        version=ordinal + 1,
        is_owned=True,
        # An endpoint lives under the lease of its node.
        is_ready=is_ready and not is_deleting and not is_node_lost,
        reported_ready=reported_ready,
        # A lost node stops nothing and reports nothing.
        is_stopped=is_stopped or is_node_lost,
        is_node_lost=is_node_lost,
        cannot_start=cannot_start,
    )


def revision(of: ModelDeployment, number: int = 1) -> Revision:
    """Return the revision of what the deployment's replicas run now."""
    return Revision(
        metadata=ObjectMeta(
            name=revision_name(of.name, template_hash(of)),
            resource_version=str(number + 100),
            owner_references=(
                OwnerReference(kind="ModelDeployment", name=of.name, uid=of.metadata.uid),
            ),
        ),
        spec=RevisionSpec(
            deployment=of.name, template=template_hash(of), revision=number, content=content_of(of)
        ),
    )


def observed(
    wanted: ModelDeployment | None,
    replicas: tuple[ReplicaView, ...] = (),
    nodes: tuple[NodeView, ...] = (),
    *,
    revisions: tuple[Revision, ...] | None = None,
) -> DeploymentView:
    """Return the situation; the newest revision is saved already, unless others are given."""
    if revisions is None:
        is_there = wanted is not None and wanted.metadata.deletion_timestamp is None
        revisions = (revision(wanted),) if wanted is not None and is_there else ()
    return DeploymentView(
        name="qwen",
        deployment=wanted,
        replicas=replicas,
        table=NodeTable(nodes),
        revisions=revisions,
    )
