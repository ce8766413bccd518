"""Agents without engines: they speak nodeagent's protocol to the store, and nothing else.

They do what the real agent does: write the node's status when it changes; put the node's lease under a lease of the
store; publish an assigned replica under that lease (rank 0's node) and report it as Ready, guarded by the version of
the Replica. For a deleted replica they remove the endpoint, then report Stopped. For a replica that is gone or belongs
to other nodes they remove its endpoint, and for a group the report on their rank.
"""

from machinery.clock import Clock
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import ModelReport, NodeLease, NodeStatus
from schemas.replica import Endpoint, EndpointSpec, RankStatus, Replica
from store import codec, keys
from store.errors import LeaseLostError, StoreError
from store.port import Delete, Operation, Put, Transport
from tests.support.world import GEOMETRY, GIB

_LEASE_TTL_S = 4


def node_status(
    name: str, *, memory_gib: float = 8, chip: str = "Apple M4", model: str = "qwen"
) -> NodeStatus:
    return NodeStatus(
        uid=f"uid-{name}",
        hostname=name,
        address="127.0.0.1",
        agent_version="0",
        os="macOS",
        os_version="26",
        machine="Mac16,1",
        chip=chip,
        cpu_cores=10,
        gpu_cores=10,
        memory_bytes=int(memory_gib * GIB),
        allocatable_bytes=int(memory_gib * GIB),
        models=(ModelReport(path=model, geometry=GEOMETRY),),
    )


def put_node(name: str, status: NodeStatus | None = None) -> Put:
    value = codec.encode(status or node_status(name))
    return Put(key=keys.status_key("Node", name), value=value)


def put_lease(name: str, lease: int = 0) -> Put:
    value = codec.encode(NodeLease(uid=f"uid-{name}", session="folder/1"))
    return Put(key=keys.node_lease_key(name), value=value, lease=lease)


def put_endpoint(replica: Replica, lease: int = 0) -> Put:
    spec = EndpointSpec(
        deployment=replica.spec.deployment,
        replica_uid=replica.metadata.uid,
        node=replica.spec.ranks[0].node,
        url="http://127.0.0.1:4100",
        served_names=replica.spec.served_names,
    )
    endpoint = Endpoint(metadata=ObjectMeta(name=replica.name), spec=spec)
    key = keys.endpoint_key(spec.node, replica.name)
    return Put(key=key, value=codec.encode(endpoint), lease=lease)


def put_rank(replica: Replica, type_: str = "Ready", *, holds: bool = True, rank: int = 0) -> Put:
    truth = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    formation = replica.spec.formation
    status = RankStatus(
        replica_uid=replica.metadata.uid,
        node=replica.spec.ranks[rank].node,
        epoch=formation.epoch if formation is not None else 0,
        conditions=(Condition(type=type_, status=truth, reason="Fake", message="so it is"),),
    )
    return Put(key=keys.rank_key(status.node, replica.name, rank), value=codec.encode(status))


class FakeAgent:
    """One node. `run()` until cancelled, which is its crash: its lease is left to expire."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        name: str,
        *,
        memory_gib: float = 8,
        status: NodeStatus | None = None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self.name = name
        self._status = status or node_status(name, memory_gib=memory_gib)
        self.lease = 0
        self._reported: dict[str, str] = {}
        self._published: dict[str, str] = {}
        self._ranks: dict[str, str] = {}
        """The keys under which ranks of groups were reported."""

    async def run(self) -> None:
        """Look at the store again and again, as often as the real agent hears of a change."""
        await self._transport.commit([], [put_node(self.name, self._status)])
        renewed_at = float("-inf")
        while True:
            try:
                if self._clock.monotonic() - renewed_at > _LEASE_TTL_S / 3:
                    renewed_at = self._clock.monotonic()
                    await self._renew()
                await self._look()
            except LeaseLostError:
                renewed_at = float("-inf")
            except StoreError:
                pass  # a concurrent write: read again
            await self._clock.sleep(0.1)

    async def _renew(self) -> None:
        if self.lease and await self._transport.keep_alive(self.lease) > 0:
            return
        self.lease = await self._transport.grant(_LEASE_TTL_S)
        self._published.clear()
        await self._transport.commit([], [put_lease(self.name, self.lease)])

    async def _look(self) -> None:
        listing = await self._transport.list(keys.spec_prefix("Replica"))
        replicas = [codec.decode_object(Replica, item) for item in listing.items]
        ours = {
            replica.name: (replica, number)
            for replica in replicas
            for number, rank in enumerate(replica.spec.ranks)
            if rank.node == self.name
        }
        leads = {name for name, (_, number) in ours.items() if number == 0}
        for name in [name for name in self._published if name not in leads]:
            await self._withdraw(name)
        for name in [name for name in self._ranks if name not in ours]:
            await self._transport.commit([], [Delete(key=self._ranks.pop(name))])
        for replica, number in ours.values():
            await self._tend(replica, number)

    async def _tend(self, replica: Replica, number: int) -> None:
        uid, name = replica.metadata.uid, replica.name
        guard = codec.unchanged_guard(replica)
        if replica.metadata.deletion_timestamp is not None:
            await self._withdraw(name)
            await self._report(replica, number, "Stopped")
            return
        if self._published.get(name) != uid and number == 0:
            await self._transport.commit([guard], [put_endpoint(replica, self.lease)])
            self._published[name] = uid
        await self._report(replica, number, "Ready")

    async def _report(self, replica: Replica, number: int, type_: str) -> None:
        formation = replica.spec.formation
        epoch = formation.epoch if formation is not None else 0
        said = f"{replica.metadata.uid} {number} {epoch} {type_}"
        if self._reported.get(replica.name) != said:
            put = put_rank(replica, type_, rank=number)
            await self._transport.commit([codec.unchanged_guard(replica)], [put])
            self._reported[replica.name] = said
            if formation is not None:
                self._ranks[replica.name] = put.key

    async def _withdraw(self, name: str) -> None:
        key = keys.endpoint_key(self.name, name)
        there = await self._transport.get(key)
        gone: list[Operation] = [Delete(key=key)]
        if there is not None and there.lease == self.lease:
            await self._transport.commit([], gone)
        self._published.pop(name, None)
