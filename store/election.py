"""Leader election with fencing: who leads writes only under the guard of its own election key."""

import asyncio
import logging
import random

from machinery.clock import Clock
from store.errors import ConflictError, LeaseLostError, StoreError
from store.lease import LeaseSession
from store.port import CreatedAt, Guard, Put, Transport, Unchanged

log = logging.getLogger(__name__)


class Leadership:
    """The right to write, while it lasts. `keep()` must run for it to last."""

    def __init__(self, key: str, epoch: int, session: LeaseSession) -> None:
        self._session = session
        self.epoch = epoch
        # Leadership is no lock: a leader that lost it may not know yet, so etcd must check.
        self.guard: Guard = CreatedAt(key=key, create_revision=epoch)

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
            return await self._transport.commit([Unchanged(key=self._key, mod_revision=0)], [put])
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
