"""A shard group of three studios with a cable between each two, and its replica in two epochs."""

from datetime import timedelta

from schemas.formation import Formation
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeFabric, ThunderboltPort
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from schemas.shardgroup import (
    FabricCheck,
    GroupMember,
    ShardGroup,
    ShardGroupSpec,
    ShardGroupStatus,
)
from store import codec, keys
from store.port import Put, Transport
from tests.support.dashboards import CLOCK
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.world import GIB, deployment

STUDIOS = ("studio-1", "studio-2", "studio-3")


def fabric(name: str) -> NodeFabric:
    """Return the ports of a studio, with a cable to each other studio; other Macs have none."""
    if not name.startswith("studio"):
        return NodeFabric()
    ports = tuple(
        ThunderboltPort(
            receptacle=str(number),
            interface=f"en{number + 4}",
            domain=f"{name}-{other}",
            peer=f"{other}-{name}",
            speed_gbps=80,
        )
        for number, other in enumerate(STUDIOS, 1)
        if other != name
    )
    return NodeFabric(ports=ports, thunderbolt=5)


async def put_studios(store: Transport) -> None:
    """Write the Macs of the group."""
    for name in STUDIOS:
        status = node_status(name, memory_gib=144).model_copy(update={"fabric": fabric(name)})
        metadata = ObjectMeta(name=name, uid=f"uid-{name}", generation=1)
        node = codec.put_spec(Node(metadata=metadata))
        await store.commit([], [node, put_node(name, status), put_lease(name)])


async def put_group(store: Transport) -> None:
    members = tuple(GroupMember(node=name) for name in STUDIOS)
    group = ShardGroup(
        metadata=ObjectMeta(name="studios", uid="uid-g", generation=1),
        spec=ShardGroupSpec(members=members, backend="jaccl", parallelism="Tensor"),
    )
    check = FabricCheck(
        at=CLOCK.now() - timedelta(hours=3),
        nodes=tuple(member.node for member in members),
        backend="jaccl",
        outcome="Healthy",
        reason="FabricHealthy",
        message="every sum was right",
        gb_per_second=7.94,
        usual_gb_per_second=7.9,
    )
    status = ShardGroupStatus(members=3, ready_members=3, fabric_checks=(check,))
    key = keys.status_key("ShardGroup", "studios")
    await store.commit([], [codec.put_spec(group), Put(key=key, value=codec.encode(status))])


def of_group(epoch: int, because: str = "") -> Replica:
    """Return the replica of the group in an epoch: a Pipeline over three Macs."""
    proofs = [
        MemoryProof(
            weights_bytes=size * GIB,
            kv_cache_bytes=4 * GIB,
            activation_bytes=GIB,
            overhead_bytes=GIB,
        )
        for size in (30, 24, 24)
    ]
    owner = deployment(name="deep", replicas=1, context_length=8192)
    formation = Formation(
        group="studios",
        epoch=epoch,
        backend="jaccl",
        parallelism="Pipeline",
        formed_at=CLOCK.now() - timedelta(minutes=40 - 20 * epoch),
        because=because,
    )
    return Replica(
        metadata=ObjectMeta(name="deep-0", uid="uid-deep-0", generation=epoch),
        spec=ReplicaSpec(
            deployment="deep",
            template="t",
            model=owner.spec.model,
            served_names=("deep",),
            context_length=8192,
            concurrency=1,
            formation=formation,
            ranks=tuple(
                RankAssignment(node=mac, memory=proof, layers=layers, addresses=("10.0.0.1",))
                for mac, proof, layers in zip(STUDIOS, proofs, (24, 20, 20), strict=True)
            ),
        ),
    )


async def put_epoch(store: Transport, number: int) -> None:
    """Form the group's replica in its first or second epoch; the second tells why the first ended."""
    because = "rank 2 on studio-3 ended with code 137" if number > 1 else ""
    await store.commit([], [codec.put_spec(of_group(number, because))])
