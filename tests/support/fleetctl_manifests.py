"""Manifests and values that several tests of fleetctl's verbs use."""

from hypothesis import strategies as st

from schemas.deployment import ModelDeployment
from schemas.meta import ObjectMeta
from schemas.node import Node
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from store import codec, objects
from store.port import Put, Transport
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import put_lease, put_node
from tests.support.world import PROOF

DEPLOYMENT = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: NAME}
spec: {model: {path: small}, servedNames: [fast], replicas: 2}
"""
"""A ModelDeployment; replace NAME."""

SCALARS = st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "a", "x/y", "~"])
"""Scalars of JSON."""


def deployment_manifest(name: str, *, replicas: int = 2, labels: str = "team: a") -> str:
    """Return the manifest of a ModelDeployment."""
    return (
        "---\napiVersion: fleet/v1alpha1\nkind: ModelDeployment\n"
        f"metadata: {{name: {name}, labels: {{{labels}}}}}\n"
        f"spec:\n  model: {{path: qwen}}\n  replicas: {replicas}\n"
    )


def pool_manifest(name: str) -> str:
    """Return the manifest of a NodePool with one node."""
    return (
        "---\napiVersion: fleet/v1alpha1\nkind: NodePool\n"
        f"metadata: {{name: {name}}}\nspec: {{nodes: [mac-1]}}\n"
    )


def put_replica(
    of: ModelDeployment,
    ordinal: int,
    node: str,
    *,
    memory: MemoryProof = PROOF,
    template: str = "t",
) -> Put:
    """Return the write of a replica with one rank on the node."""
    return codec.put_spec(
        Replica(
            metadata=ObjectMeta(name=f"{of.name}-{ordinal}", uid="u"),
            spec=ReplicaSpec(
                deployment=of.name,
                template=template,
                model=of.spec.model,
                served_names=(of.name,),
                context_length=1024,
                concurrency=1,
                ranks=(RankAssignment(node=node, memory=memory),),
            ),
        )
    )


async def apply_deployments(fleet: MemoryFleet, *names: str) -> None:
    """Apply a ModelDeployment for each name."""
    await fleet.applied("---\n".join(DEPLOYMENT.replace("NAME", name) for name in names))


async def read_deployment(transport: Transport, name: str) -> ModelDeployment:
    """Return a stored deployment."""
    obj = await objects.get(transport, ModelDeployment, name)
    assert obj is not None
    return obj


async def join_node(
    transport: Transport, *names: str, labels: dict[str, str] | None = None
) -> None:
    """Write nodes as after they joined, with the specs of the reconciler."""
    for name in names:
        meta = ObjectMeta(name=name, uid=f"uid-{name}", generation=1, labels=labels or {})
        puts = [put_node(name), put_lease(name), codec.put_spec(Node(metadata=meta))]
        await transport.commit([], puts)


async def read_node(transport: Transport, name: str) -> Node:
    """Return a stored node."""
    obj = await objects.get(transport, Node, name)
    assert obj is not None
    return obj
