"""One run of a fabric test through the agents of a group, from its document to the reports of all ranks.

`fleetctl fabric bench` and the leader's regular checks use it. A lease ends the test together with its caller.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

from machinery.clock import Clock
from schemas.fabrictest import (
    CONNECT_TIMEOUT_S,
    ROUND_TIMEOUT_S,
    FabricRank,
    FabricTest,
    FabricTestSpec,
)
from schemas.formation import Formation, Seat
from schemas.meta import ObjectMeta
from schemas.shardgroup import ShardGroup
from store import codec, keys
from store.errors import ConflictError, StoreError, UnavailableError
from store.leases import LeaseSession
from store.port import Guard, ModRevisionGuard, Put, Transport

_TEST_LEASE_S = 10
_POLL_S = 0.2
# Agents see a test within moments; one that has not claimed it by then does not support tests.
_CLAIM_S = 15.0
# The ranks' own deadlines are shorter.
_MAX_SILENCE_S = CONNECT_TIMEOUT_S + ROUND_TIMEOUT_S


class FabricTestError(Exception):
    """The test failed; the message says why."""


class FabricTestBusyError(FabricTestError):
    """Another test of the group is running."""


def make_test(
    group: ShardGroup,
    seats: tuple[Seat, ...],
    *,
    figures: tuple[tuple[int, ...], int],
    uid: str,
    now: datetime,
) -> FabricTest:
    """Return the test of a group's cables; `figures` are the sizes in bytes, and the rounds of each."""
    spec, (sizes, rounds) = group.spec, figures
    return FabricTest(
        metadata=ObjectMeta(name=group.name, uid=uid, creation_timestamp=now),
        spec=FabricTestSpec(
            formation=Formation(
                group=group.name,
                backend=spec.backend,
                port=spec.port,
                environment=spec.environment,
                formed_at=now,
            ),
            seats=seats,
            sizes=sizes,
            rounds=rounds,
        ),
    )


def _ignore(_: str) -> None:
    """Report nothing."""


async def run_test(
    transport: Transport,
    clock: Clock,
    test: FabricTest,
    *,
    fence: Sequence[Guard] = (),
    report: Callable[[str], None] = _ignore,
) -> tuple[FabricRank, ...]:
    """Run the test on the group's Macs, and return the final reports of all ranks.

    Its document exists during this call only: cancel the call to end the test. `report` gets the progress.

    Raises:
        FabricTestError: a rank failed, or made no progress for too long; FabricTestBusyError if one is running.
        StoreError: the store did not answer, or refused the test.

    """
    lease = LeaseSession(transport, clock, ttl_s=_TEST_LEASE_S)
    await lease.open()
    try:
        await _write_test(transport, test, lease.id, fence)
        reports = _RankReports(transport, clock, test, report)
        try:
            async with asyncio.TaskGroup() as tasks:
                renewal = tasks.create_task(lease.keep())
                ranks = await reports.wait(lease)
                renewal.cancel()
        except* (FabricTestError, StoreError, codec.UndecodableError) as failed:
            raise failed.exceptions[0] from None
        return ranks
    finally:
        await lease.close()


async def _write_test(
    transport: Transport, test: FabricTest, lease: int, fence: Sequence[Guard]
) -> None:
    key = keys.named(keys.FABRIC_TEST_PREFIX, test.name)
    put = Put(key=key, value=codec.encode_spec(test), lease=lease)
    try:
        await transport.commit([*fence, ModRevisionGuard(key=key, mod_revision=0)], [put])
    except ConflictError as error:
        raise FabricTestBusyError(
            f"a test of shardgroup/{test.name} is already running; wait for its end (an interrupted one ends within 10 s)"
        ) from error


class _RankReports:
    """Reports of the ranks of one test."""

    def __init__(
        self, transport: Transport, clock: Clock, test: FabricTest, report: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._test = test
        self._report = report
        self._reports: dict[int, FabricRank] = {}

    async def wait(self, lease: LeaseSession) -> tuple[FabricRank, ...]:
        """Wait until every rank is done.

        Raises:
            FabricTestError: a rank failed, or made no progress for too long.

        """
        progress_at = self._clock.monotonic()
        while True:
            if await self._poll():
                progress_at = self._clock.monotonic()
            failed = [rank for rank in self._reports.values() if rank.state == "Failed"]
            if failed:
                raise FabricTestError(f"the test failed: {_failure_text(failed)}")
            seats = self._test.spec.seats
            if all(self._state(rank) == "Done" for rank in range(len(seats))):
                return tuple(self._reports[rank] for rank in range(len(seats)))
            self._check(lease, self._clock.monotonic() - progress_at)
            await self._clock.sleep(_POLL_S)

    def _check(self, lease: LeaseSession, silent_s: float) -> None:
        """Raise if the test cannot finish any more."""
        if not lease.valid():
            raise FabricTestError("the test failed: the store was unavailable for too long")
        seats = self._test.spec.seats
        absent = [seat.node for rank, seat in enumerate(seats) if rank not in self._reports]
        if absent and silent_s > _CLAIM_S:
            raise FabricTestError(
                f"the test failed: the agent of {', '.join(absent)} did not start it within {_CLAIM_S:g} s; "
                "check with `fleetctl version --nodes` that it runs this version of mlx-fleet"
            )
        if silent_s > _MAX_SILENCE_S:
            raise FabricTestError(
                f"the test failed: no rank made progress for {_MAX_SILENCE_S:g} s"
            )

    async def _poll(self) -> bool:
        """Read the reports of all ranks; return whether any changed."""
        has_changed = False
        for rank, seat in enumerate(self._test.spec.seats):
            try:
                item = await self._transport.get(keys.fabric_rank_key(seat.node, self._test.name))
            except UnavailableError:
                return has_changed  # the lease's deadline limits the wait
            if item is None:
                continue
            rank_report = codec.decode(FabricRank, item)
            if rank_report.test_uid != self._test.metadata.uid or rank_report == self._reports.get(
                rank
            ):
                continue
            has_changed, before = True, self._reports.get(rank)
            self._reports[rank] = rank_report
            count = len(rank_report.figures)
            if before is None or len(before.figures) != count:
                self._report(
                    f"rank {rank}, {seat.node}: {count} of {len(self._test.spec.sizes)} sizes"
                )
        return has_changed

    def _state(self, rank: int) -> str:
        return self._reports[rank].state if rank in self._reports else ""


def _failure_text(failed: Sequence[FabricRank]) -> str:
    return "; ".join(f"rank {rank.rank} ({rank.node}): {rank.message}" for rank in failed)
