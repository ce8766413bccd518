"""A lease of ours: alive while it is renewed in time, on our own clock, which counts sleep as well.

The owner asks `valid()` before it acts: a process that was frozen past its time, or a Mac that slept,
wakes up dead. What it had sent already only a guard can stop (`store.leases`, fencing).

Leader election with fencing: who leads writes only under the guard of its own election key.
"""

import asyncio
import logging
import random

from machinery.clock import Clock
from store.errors import ConflictError, LeaseLostError, StoreError
from store.port import CreateRevisionGuard, Guard, ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)

# Three renewals within a time to live, as etcd's own client does.
_RENEWALS = 3


class LeaseSession:
    """One lease, from grant to loss. `keep()` must run for it to live."""

    def __init__(self, transport: Transport, clock: Clock, *, ttl_s: int) -> None:
        self._transport = transport
        self._clock = clock
        self._ttl_s = ttl_s
        self._deadline = float("-inf")
        self.id = 0

    async def open(self) -> None:
        """Grant the lease.

        Raises:
            StoreError: there is none.

        """
        asked_at = self._clock.elapsed()
        self.id = await self._transport.grant(self._ttl_s)
        self._deadline = asked_at + self._ttl_s

    def valid(self) -> bool:
        """Return whether others must still take us for alive."""
        return self._clock.elapsed() < self._deadline

    async def keep(self) -> None:
        """Renew until the lease is lost; returns then, and only then.

        While the store is away the lease counts as lost at its deadline, for nobody can say
        whether it still lives.
        """
        while self.valid():
            await self._clock.sleep(self._ttl_s / _RENEWALS)
            try:
                await self._renew()
            except LeaseLostError:
                self._deadline = float("-inf")
        log.warning("lease lost", extra={"lease": self.id})

    async def _renew(self) -> None:
        """Renew once; while there is no answer, try again until the deadline."""
        while self.valid():
            asked_at = self._clock.elapsed()
            try:
                lives_s = await self._transport.keep_alive(self.id)
            except LeaseLostError:
                raise
            except StoreError as error:
                # Whatever it says, it did not say that the lease is gone.
                log.debug("lease not renewed", extra={"why": str(error)})
                await self._clock.sleep(0.1)
                continue
            if lives_s <= 0:
                raise LeaseLostError("the store does not know the lease any more")
            self._deadline = asked_at + lives_s
            return

    async def close(self) -> None:
        """End the lease and the keys on it now; if the store is away they end by themselves."""
        self._deadline = float("-inf")
        if self.id == 0:
            return
        try:
            await self._transport.revoke(self.id)
        except StoreError as error:
            log.info("lease not revoked; it will expire", extra={"why": str(error)})


class Leadership:
    """The right to write, while it lasts. `keep()` must run for it to last."""

    def __init__(self, key: str, epoch: int, session: LeaseSession) -> None:
        self._session = session
        self.epoch = epoch
        # Leadership is no lock: a leader that lost it may not know yet, so etcd must check.
        self.guard: Guard = CreateRevisionGuard(key=key, create_revision=epoch)

    def valid(self) -> bool:
        return self._session.valid()

    async def keep(self) -> None:
        """Return when leadership is lost."""
        await self._session.keep()

    async def resign(self) -> None:
        """Let the next one lead now rather than when the lease ends."""
        await self._session.close()


class Election:
    """A campaign for one key."""

    def __init__(self, transport: Transport, clock: Clock, *, key: str, ttl_s: int) -> None:
        self._transport = transport
        self._clock = clock
        self._key = key
        self._ttl_s = ttl_s

    async def campaign(self, identity: str) -> Leadership:
        """Wait until we lead, however long that takes and whatever breaks meanwhile.

        The lease is granted for each try anew: while waiting, nothing needs to be kept alive.
        """
        while True:
            try:
                await self._wait_for_vacancy()
                session = LeaseSession(self._transport, self._clock, ttl_s=self._ttl_s)
                await session.open()
                epoch = await self._claim(identity, session)
            except (ConflictError, LeaseLostError):
                continue
            except StoreError as error:
                log.info("campaign waits for the store", extra={"why": str(error)})
                await self._clock.sleep(random.uniform(0.05, 0.5))
                continue
            return Leadership(self._key, epoch, session)

    async def _claim(self, identity: str, session: LeaseSession) -> int:
        """Create the key under our lease; return its revision, also if the answer went missing."""
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

    async def _wait_for_vacancy(self) -> None:
        holder = await self._transport.get(self._key)
        while holder is not None:
            await self._wait_for_change(holder.mod_revision)
            holder = await self._transport.get(self._key)

    async def _wait_for_change(self, revision: int) -> None:
        watch = self._transport.watch(self._key, after_revision=revision)
        try:
            # A look now and then costs little, and covers a watch that was told nothing.
            async with asyncio.timeout(self._ttl_s):
                async for batch in watch:
                    if batch.changes:
                        return
        except TimeoutError:
            return
        finally:
            await watch.aclose()
