"""The gateway's sign of life in the store, so that the reconciler finds its figures. Nothing waits for it."""

import asyncio
import contextlib
import logging
import random

from machinery.clock import Clock
from machinery.version import version
from schemas.gateway import GatewayLease
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.lease import LeaseSession
from store.port import Put, Transport

log = logging.getLogger(__name__)

# As nodes' leases (docs/architecture.md, section 3): a dead gateway holds nothing up for longer.
LEASE_TTL_S = 4
_GOODBYE_S = 1.0


class Presence:
    """Keeps the gateway's key under a lease for as long as it runs. The gateway serves without it, too."""

    def __init__(
        self, transport: Transport, clock: Clock, *, id_: str, url: str, asks_for_keys: bool = True
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._key = keys.named(keys.GATEWAY_LEASE_PREFIX, id_)
        lease = GatewayLease(url=url, version=version(), asks_for_keys=asks_for_keys)
        self._value = codec.encode(lease)

    async def run(self) -> None:
        """Hold a lease for ever, a new one whenever one is lost; give it back at the end."""
        told: str | None = None
        while True:
            session = LeaseSession(self._transport, self._clock, ttl_s=LEASE_TTL_S)
            failed: StoreError | None = None
            try:
                await self._hold(session)
            except StoreError as error:
                failed = error
            finally:
                # At the end of the process an etcd that is away must not keep it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await session.close()
            if failed is None:
                told = None
                continue
            if str(failed) != told:
                told = str(failed)
                log.warning("not registered; autoscaling does not see us", extra={"why": told})
            # Rights are mended by a person, an etcd that is away comes back by itself.
            is_refused = isinstance(failed, PermissionDeniedError)
            await self._clock.sleep(random.uniform(0.5, 1.5) * (20 if is_refused else 1))

    async def _hold(self, session: LeaseSession) -> None:
        """Register, and stay so until the lease is lost. Raises StoreError."""
        await session.open()
        put = Put(key=self._key, value=self._value, lease=session.id)
        await self._transport.commit([], [put])
        log.info("registered", extra={"lease": session.id})
        await session.keep()
