"""Agents of still nodes: `python -m bench.still_nodes --etcd ADDRESS` answers for all nodes of a fleet, at once.

For each Replica it writes what an agent would: Ready and an endpoint, or Stopped once it is to end. There is no engine, and
one process speaks for all nodes, so what a bench measures with it is the control plane alone.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import click

from machinery.clock import SystemClock
from schemas.replica import Replica
from store import codec, keys
from store.etcd.connect import connect
from store.etcd.flags import address_from_flags, etcd_options
from store.informer import Informer
from store.port import Delete, Operation, Transport
from tests.support.reconciler_agents import put_endpoint, put_rank

_AT_ONCE = 100
_REPLICAS = keys.spec_prefix("Replica")


class StillNodes:
    """Answers for every node, as `FakeAgent` does for one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._replicas = Informer(
            transport,
            _REPLICAS,
            lambda item: codec.decode_object(Replica, item),
            SystemClock(),
        )
        self._published: dict[str, tuple[str, str]] = {}
        """The key of each replica's endpoint, and the uid that it has, by the replica's key."""
        self._changed: set[str] = set()
        self._noted = asyncio.Event()

    async def run(self) -> None:
        """Answer until cancelled."""
        self._replicas.on_change(self._note)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replicas.run())
            while True:
                await self._noted.wait()
                self._noted.clear()
                changed, self._changed = self._changed, set()
                operations = [answer for key in changed for answer in self._answers(key)]
                for at in range(0, len(operations), _AT_ONCE):
                    await self._transport.commit([], operations[at : at + _AT_ONCE])

    def _note(self, key: str) -> None:
        self._changed.add(key)
        self._noted.set()

    def _answers(self, key: str) -> Iterator[Operation]:
        """Yield what the agents write about a Replica as it is now."""
        replica, before = self._replicas.items.get(key), self._published.get(key)
        is_wanted = replica is not None and replica.metadata.deletion_timestamp is None
        wanted = _endpoint_of(replica) if replica is not None and is_wanted else None
        if before is not None and before != wanted:
            yield Delete(key=before[0])
            del self._published[key]
        if replica is not None and wanted is None:
            yield put_rank(replica, "Stopped")
        if replica is not None and wanted is not None and before != wanted:
            yield put_endpoint(replica)
            yield put_rank(replica)
            self._published[key] = wanted


def _endpoint_of(replica: Replica) -> tuple[str, str]:
    """Return the key of the replica's endpoint, and the uid that it names."""
    return keys.endpoint_key(replica.spec.ranks[0].node, replica.name), replica.metadata.uid


@click.command()
@etcd_options
def main(**options: Any) -> None:
    """Answer until killed."""
    asyncio.run(StillNodes(connect(address_from_flags(options))).run())


if __name__ == "__main__":
    main()
