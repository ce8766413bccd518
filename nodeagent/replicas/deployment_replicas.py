"""The replicas of one deployment on all nodes, read from the store when they are needed: an agent watches its own only."""

from dataclasses import dataclass
from typing import Protocol

from schemas.replica import Replica
from store import codec, keys
from store.port import Transport


class Siblings(Protocol):
    """The port to the replicas of one deployment."""

    async def of(self, replica: str) -> tuple[Replica, ...]:
        """Return the replicas of a replica's deployment, itself among them; () if there is no such replica.

        Raises:
            StoreError: the store could not be read.
            UndecodableError: a newer mlx-fleet wrote the replica.

        """
        ...


@dataclass(frozen=True, slots=True)
class StoredSiblings:
    """`Siblings` in the store."""

    transport: Transport

    async def of(self, replica: str) -> tuple[Replica, ...]:
        """As `Siblings.of`; a sibling that cannot be decoded is left out."""
        own = await self.transport.get(keys.spec_key("Replica", replica))
        if own is None:
            return ()
        deployment = codec.decode_object(Replica, own).spec.deployment
        # The names of other deployments may begin like this one's.
        listing = await self.transport.list(keys.spec_key("Replica", f"{deployment}-"))
        replicas: list[Replica] = []
        for item in listing.items:
            try:
                one = codec.decode_object(Replica, item)
            except codec.UndecodableError:
                continue
            if one.spec.deployment == deployment:
                replicas.append(one)
        return tuple(replicas)
