"""Answers questions about the machines behind the nodes, and what was written about them; changes nothing."""

from reconciler.known.caches import BY_HARDWARE, PART_OF, Caches
from schemas.node import NodeStatus
from schemas.nodelife import NodeLifeStatus
from schemas.replica import Replica
from store import keys


class Machines:
    """The part of `Fleet` that is about which Mac a node is, and how it has been lately."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches

    def claiming(self, status: NodeStatus) -> set[str]:
        """Return the nodes that cannot be there beside this one: the same machine, and not both parts of it."""
        if not status.hardware_uuid:
            return set()
        prefix, by_index = keys.status_prefix("Node"), self._caches.statuses.by_index
        found = set(by_index(BY_HARDWARE, status.hardware_uuid))
        if not status.is_part:
            found |= set(by_index(BY_HARDWARE, f"{PART_OF}{status.hardware_uuid}"))
        return {key.removeprefix(prefix) for key in found}

    def peaks(self, replica: Replica) -> tuple[int, ...]:
        """Return the most memory in bytes that each rank of this very replica was seen to take; 0 if unknown."""
        items = self._caches.ranks.items
        reports = [
            items.get(keys.rank_key(rank.node, replica.name, number))
            for number, rank in enumerate(replica.spec.ranks)
        ]
        epoch = replica.spec.formation.epoch if replica.spec.formation is not None else 0
        # The rank of another epoch may have had another share of the model.
        mine = (replica.metadata.uid, epoch)
        return tuple(
            one.peak_bytes if one is not None and (one.replica_uid, one.epoch) == mine else 0
            for one in reports
        )

    def life(self, node: str) -> tuple[NodeLifeStatus | None, int]:
        """Return what a reconciler wrote about the node, and the mod_revision of that; 0 if nothing."""
        key = keys.node_life_key(node)
        return self._caches.lives.items.get(key), self._caches.lives.version(key)

    def is_newer(self, node: str) -> bool:
        """Return whether a newer reconciler wrote about it."""
        return keys.node_life_key(node) in self._caches.lives.newer

    def described(self) -> set[str]:
        """Return the nodes that a reconciler ever wrote about."""
        return {key.removeprefix(keys.NODE_LIFE_PREFIX) for key in self._caches.lives.items}
