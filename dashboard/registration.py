"""Registration of this dashboard in the store: gateways and fleetctl find its address there."""

import logging
from collections.abc import Callable
from typing import Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from schemas.records import DashboardLease
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.leases import LEASE_TTL_S, LeaseSession, keep_published
from store.port import Put, Transport

log = logging.getLogger(__name__)
_BACKOFF: Final = Backoff(first_s=0.5, limit_s=4.0)


class DashboardRegistration:
    """Keeps the dashboard's key under a lease for as long as the process runs."""

    def __init__(
        self, transport: Transport, clock: Clock, id_: str, lease: Callable[[], DashboardLease]
    ) -> None:
        """`lease` returns the value of the key; the key follows it."""
        self._transport = transport
        self._clock = clock
        self._lease = lease
        self._key = keys.named(keys.DASHBOARD_LEASE_PREFIX, id_)

    async def run(self) -> None:
        """Hold a lease forever, replacing a lost one; revoke it at the end."""
        retries = Retries(_BACKOFF, self._clock)
        while True:
            session = LeaseSession(self._transport, self._clock, ttl_s=LEASE_TTL_S)
            try:
                await session.open()
                put = Put(key=self._key, value=self._value(), lease=session.id)
                await self._transport.commit([], [put])
                retries.reset()
                await keep_published(session, self._transport, self._clock, self._key, self._value)
            except StoreError as error:
                if retries.failures == 0:
                    log.warning("dashboard not registered; will retry", extra={"why": str(error)})
                await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
            finally:
                await session.close()

    def _value(self) -> bytes:
        return codec.encode(self._lease())
