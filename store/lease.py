"""A lease of ours: alive while it is renewed in time, on our own clock, which counts sleep as well.

The owner asks `valid()` before it acts: a process that was frozen past its time, or a Mac that slept,
wakes up dead. What it had sent already only a guard can stop (`store.election`, fencing).
"""

import logging

from machinery.clock import Clock
from store.errors import LeaseLostError, StoreError
from store.port import Transport

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
