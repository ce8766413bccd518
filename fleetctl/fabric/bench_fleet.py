"""The test of the fabric by agents: written under a lease, so that it ends with this command, and waited for."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from fleetctl import groups, reader
from fleetctl.connect import opened
from fleetctl.errors import FleetctlError
from fleetctl.fabric.bench_text import Result, Wanted
from fleetctl.fabric.reading import one_group
from machinery.clock import Clock, SystemClock
from nodeagent.fabric.orders import CONNECT_S, ROUND_S
from schemas.fabrictest import FabricRank, FabricTest, FabricTestSpec
from schemas.formation import Formation
from schemas.meta import ObjectMeta
from schemas.shardgroup import ShardGroup
from store import codec, keys
from store.errors import ConflictError, StoreError, UnavailableError
from store.lease import LeaseSession
from store.port import Put, Transport, Unchanged

_LEASE_S = 10
_LOOK_S = 0.2
# An agent hears of a test within a moment; one that has not said so by now does not know what tests are.
_CLAIM_S = 15.0
# The ranks' own deadlines end them earlier.
_SILENT_S = CONNECT_S + ROUND_S


async def measure(
    group: str | None, wanted: Wanted, tell: Callable[[str], None], options: dict[str, Any]
) -> Result:
    """Have the agents of the group's Macs test its cables.

    Raises:
        FleetctlError: there is no such group, it cannot be formed, or a rank did not come to its end.

    """
    clock = SystemClock()
    async with opened(options) as transport:
        found = await one_group(transport, group)
        test = await _made(transport, clock, found, wanted)
        lease = LeaseSession(transport, clock, ttl_s=_LEASE_S)
        await lease.open()
        try:
            await _write(transport, test, lease.id)
            ranks = await _waited(transport, clock, test, lease, tell)
        finally:
            await lease.close()
    label = f"shardgroup/{found.name}"
    return Result(about=label, backend=test.spec.formation.backend, ranks=ranks)


async def _made(
    transport: Transport, clock: Clock, group: ShardGroup, wanted: Wanted
) -> FabricTest:
    nodes, ready = await groups.read_nodes(transport), await reader.ready_nodes(transport)
    seats = groups.seated(group, nodes, ready)
    away = [seat.node for seat in seats if seat.node not in ready]
    if away:
        raise FleetctlError(
            f"shardgroup/{group.name}: {', '.join(away)} is NotReady: its agent does not renew its lease"
        )
    spec = group.spec
    return FabricTest(
        metadata=ObjectMeta(
            name=group.name, uid=secrets.token_hex(16), creation_timestamp=clock.now()
        ),
        spec=FabricTestSpec(
            formation=Formation(
                group=group.name,
                backend=spec.backend,
                port=spec.port,
                environment=spec.environment,
                formed_at=clock.now(),
            ),
            seats=seats,
            sizes=wanted.sizes,
            rounds=wanted.rounds,
        ),
    )


async def _write(transport: Transport, test: FabricTest, lease: int) -> None:
    key = keys.named(keys.FABRIC_TEST_PREFIX, test.name)
    put = Put(key=key, value=codec.encode_spec(test), lease=lease)
    try:
        await transport.commit([Unchanged(key=key, mod_revision=0)], [put])
    except ConflictError as error:
        raise FleetctlError(
            f"shardgroup/{test.name} is being tested already; wait for that, or a moment if it was broken off"
        ) from error


async def _waited(
    transport: Transport,
    clock: Clock,
    test: FabricTest,
    lease: LeaseSession,
    tell: Callable[[str], None],
) -> tuple[FabricRank, ...]:
    """Return what all ranks said at the end, while the lease is kept."""
    reports = _Reports(transport, clock, test, tell)
    try:
        async with asyncio.TaskGroup() as tasks:
            kept = tasks.create_task(lease.keep())
            ranks = await reports.wait(lease)
            kept.cancel()
    except* (FleetctlError, StoreError, codec.UndecodableError) as failed:
        raise failed.exceptions[0] from None
    return ranks


class _Reports:
    """What the agents say of one test; remembers how far they were."""

    def __init__(
        self, transport: Transport, clock: Clock, test: FabricTest, tell: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._test = test
        self._tell = tell
        self._said: dict[int, FabricRank] = {}

    async def wait(self, lease: LeaseSession) -> tuple[FabricRank, ...]:
        """Wait until every rank is done.

        Raises:
            FleetctlError: one failed, or nobody said anything for too long.

        """
        moved_at = self._clock.monotonic()
        while True:
            if await self._look():
                moved_at = self._clock.monotonic()
            failed = [rank for rank in self._said.values() if rank.state == "Failed"]
            if failed:
                raise FleetctlError(f"the test broke off: {_because(failed)}")
            seats = self._test.spec.seats
            if all(self._state(rank) == "Done" for rank in range(len(seats))):
                return tuple(self._said[rank] for rank in range(len(seats)))
            self._check(lease, self._clock.monotonic() - moved_at)
            await self._clock.sleep(_LOOK_S)

    def _check(self, lease: LeaseSession, silent_s: float) -> None:
        """Give up where waiting is no use any more."""
        if not lease.valid():
            raise FleetctlError("the test broke off: the store was away for too long")
        seats = self._test.spec.seats
        absent = [seat.node for rank, seat in enumerate(seats) if rank not in self._said]
        if absent and silent_s > _CLAIM_S:
            raise FleetctlError(
                f"the test broke off: the agent of {', '.join(absent)} did not begin within {_CLAIM_S:g} s; "
                "does it run this version of mlx-fleet? See: fleetctl fabric matrix"
            )
        if silent_s > _SILENT_S:
            raise FleetctlError(f"the test broke off: no rank went on for {_SILENT_S:g} s")

    async def _look(self) -> bool:
        """Read what ranks say; return whether any of it is news."""
        is_news = False
        for rank, seat in enumerate(self._test.spec.seats):
            try:
                item = await self._transport.get(keys.fabric_rank_key(seat.node, self._test.name))
            except UnavailableError:
                return is_news  # the lease's deadline decides how long
            if item is None:
                continue
            said = codec.decode(FabricRank, item)
            if said.test_uid != self._test.metadata.uid or said == self._said.get(rank):
                continue
            is_news, before = True, self._said.get(rank)
            self._said[rank] = said
            count = len(said.figures)
            if before is None or len(before.figures) != count:
                self._tell(
                    f"rank {rank}, {seat.node}: {count} of {len(self._test.spec.sizes)} sizes"
                )
        return is_news

    def _state(self, rank: int) -> str:
        return self._said[rank].state if rank in self._said else ""


def _because(failed: Sequence[FabricRank]) -> str:
    return "; ".join(f"rank {one.rank} ({one.node}): {one.message}" for one in failed)
