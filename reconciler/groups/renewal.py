"""The next epoch of a replica as an action: its ranks, and what of the ones before may still be there. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from reconciler.actions import ReformReplica
from reconciler.groups.epochs import Epoch, failures
from reconciler.observe import NodeView, ReplicaView
from reconciler.placement.place import Placed
from schemas.replica import LeavingRank


def next_epoch(replica: ReplicaView, to: Placed, epoch: Epoch) -> ReformReplica:
    """Return what begins the next epoch on these Macs."""
    formation = replica.replica.spec.formation
    assert formation is not None
    assert to.form is not None
    is_same_model = to.form.model == replica.replica.spec.model.path
    return ReformReplica(
        name=replica.name,
        ranks=to.ranks,
        form=to.form.with_golden(epoch.golden if is_same_model else None),
        failures=failures(formation, epoch),
        because=epoch.message or epoch.over,
        leaving=tuple(_leaving(replica, to)),
        version=replica.version,
    )


def _leaving(replica: ReplicaView, to: Placed) -> Iterator[LeavingRank]:
    """Yield the ranks that may still be there, and are not to be; on a Mac that is away nobody can tell."""
    new = {(rank.node, number): rank for number, rank in enumerate(to.ranks)}
    yield from (one for one in replica.unended if (one.node, one.rank) not in new)
    for number, rank in enumerate(replica.replica.spec.ranks):
        size, after = rank.memory.total_bytes, new.get((rank.node, number))
        stays = after is not None and after.memory.total_bytes >= size
        if not stays and rank.node not in replica.away:
            yield LeavingRank(node=rank.node, rank=number, memory_bytes=size)


def without(node: NodeView, replica: ReplicaView) -> NodeView:
    """Return a node as it will be once the replica has ended."""
    name = replica.replica.spec.deployment
    sizes = [one.bytes for one in node.tenants if one.replica == replica.name]
    proven = [
        rank.memory.total_bytes for rank in replica.replica.spec.ranks if rank.node == node.name
    ]
    others = {**node.replicas, name: node.replicas.get(name, 1) - 1}
    return replace(
        node,
        used_bytes=node.used_bytes - (sum(sizes) or sum(proven)),
        replicas={other: count for other, count in others.items() if count},
        tenants=tuple(one for one in node.tenants if one.replica != replica.name),
    )
