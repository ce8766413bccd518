"""Leases that are kept alive, and leader election with fencing on top of them.

Validity is measured on the local clock, which includes the time a machine sleeps. The owner calls `valid()` before it
acts: after a freeze or a sleep longer than the lease, the lease is invalid. Writes that were already sent are stopped
by a guard on the election's key only (fencing).
"""

import asyncio
import logging
from collections.abc import Callable

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from store.errors import ConflictError, LeaseLostError, PermissionDeniedError, StoreError
from store.port import CreateRevisionGuard, Guard, ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)

LEASE_TTL_S = 4
"""Time to live, in seconds, of the leases of nodes, gateways and registrations; the leader's is shorter (`reconciler/controller.py`).

What a dead process held must vanish within 5 s (docs/architecture.md, "Life of an apply"), and etcd notices an expiry
up to half a second late.
"""

# Three renewals per time to live, as etcd's own client does.
_RENEWALS = 3
# A lease lives for seconds, so a failed renewal is repeated soon, until the lease's deadline.
_RENEWAL_BACKOFF = Backoff(first_s=0.1, limit_s=0.4)
_CAMPAIGN_BACKOFF = Backoff(first_s=0.1, limit_s=2.0)
# What a lease's value says changes rarely, and an administrator waits for it.
_PUBLISH_EVERY_S = 0.5
_PUBLISH_BACKOFF = Backoff(first_s=0.1, limit_s=2.0)
_REGISTRATION_BACKOFF = Backoff(first_s=0.5, limit_s=4.0)
# A process that ends does not wait longer for the store: its leases expire by themselves.
_CLOSE_S = 1.0


class LeaseSession:
    """One lease, from grant to loss. `keep()` must run to keep it alive."""

    def __init__(self, transport: Transport, clock: Clock, *, ttl_s: int) -> None:
        self._transport = transport
        self._clock = clock
        self._ttl_s = ttl_s
        self._deadline = float("-inf")
        self.id = 0

    async def open(self) -> None:
        """Grant the lease.

        Raises:
            StoreError: the lease could not be granted.

        """
        asked_at = self._clock.elapsed()
        self.id = await self._transport.grant(self._ttl_s)
        self._deadline = asked_at + self._ttl_s
        log.debug("lease granted", extra={"lease": self.id, "ttl_s": self._ttl_s})

    def valid(self) -> bool:
        """Return whether other processes must still consider the owner alive."""
        return self.remaining_s() > 0

    def remaining_s(self) -> float:
        """Return for how long other processes must still consider the owner alive, in seconds."""
        return max(0.0, self._deadline - self._clock.elapsed())

    async def keep(self) -> None:
        """Renew the lease until it is lost, then return.

        While the store does not answer, the lease counts as lost at its deadline: its real state is unknown.
        """
        while self.valid():
            await self._clock.sleep(self._ttl_s / _RENEWALS)
            try:
                await self._renew()
            except LeaseLostError:
                self._deadline = float("-inf")
        log.warning("lease lost", extra={"lease": self.id})

    async def _renew(self) -> None:
        """Renew once; without an answer, try again until the deadline."""
        retries = Retries(_RENEWAL_BACKOFF, self._clock, refused=_RENEWAL_BACKOFF)
        while self.valid():
            asked_at = self._clock.elapsed()
            try:
                lives_s = await self._transport.keep_alive(self.id)
            except LeaseLostError:
                raise
            except StoreError as error:
                # An error is no answer: only a TTL of 0 says that the lease is gone.
                log.debug("lease not renewed", extra={"why": str(error)})
                left_s = max(0.0, self._deadline - self._clock.elapsed())
                await self._clock.sleep(min(retries.next_delay_s(), left_s))
                continue
            if lives_s <= 0:
                raise LeaseLostError("the store no longer has the lease")
            self._deadline = asked_at + lives_s
            log.debug("lease renewed", extra={"lease": self.id, "ttl_s": lives_s})
            return

    async def close(self) -> None:
        """End the lease and delete its keys; if the store does not answer within a second, they expire."""
        self._deadline = float("-inf")
        if self.id == 0:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._transport.revoke(self.id)
        except (StoreError, TimeoutError) as error:
            why = str(error) or "no answer"
            log.info("lease not revoked; it will expire", extra={"why": why})


async def keep_published(
    session: LeaseSession,
    transport: Transport,
    clock: Clock,
    key: str,
    value: Callable[[], bytes],
) -> None:
    """Keep the lease, and write the key when its value changes; return when the lease is lost.

    The key has been written with the value that it has now.
    """
    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(_publish(session, transport, clock, key, value))
        await session.keep()
        publishing.cancel()


async def _publish(
    session: LeaseSession,
    transport: Transport,
    clock: Clock,
    key: str,
    value: Callable[[], bytes],
) -> None:
    """Write the key whenever its value has changed, forever."""
    written = value()
    retries = Retries(_PUBLISH_BACKOFF, clock)
    while True:
        await clock.sleep(_PUBLISH_EVERY_S)
        wanted = value()
        if wanted == written:
            continue
        try:
            await transport.commit([], [Put(key=key, value=wanted, lease=session.id)])
        except StoreError as error:
            log.debug("lease's value not written", extra={"why": str(error)})
            await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
            continue
        retries.reset()
        written = wanted


async def hold_published(
    transport: Transport, clock: Clock, key: str, value: Callable[[], bytes]
) -> None:
    """Keep the key under a lease forever: replace a lost lease, and revoke it at the end.

    The key follows `value`.
    """
    retries = Retries(_REGISTRATION_BACKOFF, clock)
    while True:
        session = LeaseSession(transport, clock, ttl_s=LEASE_TTL_S)
        try:
            await session.open()
            await transport.commit([], [Put(key=key, value=value(), lease=session.id)])
            retries.reset()
            log.info("registered", extra={"key": key, "lease": session.id})
            await keep_published(session, transport, clock, key, value)
        except StoreError as error:
            if retries.failures == 0:
                log.warning("not registered; will retry", extra={"why": str(error)})
            await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
        finally:
            await session.close()


class Leadership:
    """The right to write while it lasts. `keep()` must run for it to last."""

    def __init__(self, key: str, epoch: int, session: LeaseSession) -> None:
        self._session = session
        self.epoch = epoch
        # Leadership is not a lock: a former leader may not know yet that it lost, so etcd must check.
        self.guard: Guard = CreateRevisionGuard(key=key, create_revision=epoch)

    @property
    def lease(self) -> int:
        """The lease that ends with the leadership, for keys that say something about it."""
        return self._session.id

    def valid(self) -> bool:
        return self._session.valid()

    def remaining_s(self) -> float:
        """Return how long leadership lasts if it is not renewed, in seconds."""
        return self._session.remaining_s()

    async def keep(self) -> None:
        """Return when leadership is lost."""
        await self._session.keep()

    async def resign(self) -> None:
        """End leadership now, so that the next candidate need not wait for the lease to expire."""
        await self._session.close()


class Election:
    """A campaign for one key."""

    def __init__(self, transport: Transport, clock: Clock, *, key: str, ttl_s: int) -> None:
        self._transport = transport
        self._clock = clock
        self._key = key
        self._ttl_s = ttl_s

    async def campaign(self, identity: str) -> Leadership:
        """Wait until this process leads; errors of the store only delay it.

        Each attempt gets a new lease: while it waits, nothing needs to be kept alive.
        """
        retries = Retries(_CAMPAIGN_BACKOFF, self._clock)
        while True:
            try:
                holder = await self._transport.get(self._key)
                while holder is not None:
                    await self._wait_for_change(holder.mod_revision)
                    holder = await self._transport.get(self._key)
                session = LeaseSession(self._transport, self._clock, ttl_s=self._ttl_s)
                await session.open()
                epoch = await self._claim(identity, session)
            except ConflictError:
                continue  # another one leads: the next attempt waits until it does not
            except StoreError as error:
                log.info("campaign waits for the store", extra={"why": str(error)})
                await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
                continue
            return Leadership(self._key, epoch, session)

    async def _claim(self, identity: str, session: LeaseSession) -> int:
        """Create the key under the lease and return its revision, even if the answer was lost."""
        put = Put(key=self._key, value=identity.encode(), lease=session.id)
        try:
            return await self._transport.commit(
                [ModRevisionGuard(key=self._key, mod_revision=0)], [put]
            )
        except ConflictError:
            await session.close()
            raise
        except StoreError:
            holder = await self._transport.get(self._key)
            if holder is not None and holder.lease == session.id:
                return holder.create_revision
            raise

    async def _wait_for_change(self, revision: int) -> None:
        watch = self._transport.watch(self._key, after_revision=revision)
        try:
            # An occasional read costs little, and covers a watch that misses the deletion.
            async with asyncio.timeout(self._ttl_s):
                async for batch in watch:
                    if batch.changes:
                        return
        except TimeoutError:
            return
        finally:
            await watch.aclose()
