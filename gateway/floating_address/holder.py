"""Election of the gateway that holds a floating address: it holds while it has the lease, and then while no other can.

Does not touch the network itself; the keeper does.
"""

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from ipaddress import IPv4Interface
from typing import Final, NoReturn, Protocol

from gateway.floating_address.keeper_process import KeeperProcess
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from store import keys
from store.errors import StoreError
from store.leases import Election, Leadership
from store.port import Transport

log = logging.getLogger(__name__)

LEASE_TTL_S: Final = 3
"""Another gateway takes over within 4 s of a death; etcd notices an expiry up to half a second late."""
_RENEW_EVERY_S = 0.25
# The last part of a lease that is not renewed counts as none.
_LAST_S = 0.75
# A gateway that hangs without a lease loses the address after this time.
_ALONE_S = 2.0
_ASK_S = 1.0
_LOOK_BACKOFF = Backoff(first_s=0.25, limit_s=0.5)
# A person has to mend what keeps the address from being added.
_FAILED_BACKOFF = Backoff(first_s=5.0, limit_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatingAddress:
    """The address, and the interface of this machine that gets it."""

    address: IPv4Interface
    interface: str


class Keeper(Protocol):
    """The process that has the address on its interface."""

    failure: str

    async def run(self) -> None: ...

    async def hold(self, seconds: float, *, has_lease: bool) -> None: ...

    async def release(self) -> None: ...

    async def close(self) -> None: ...


class AddressHolder:
    """Campaigns for the address for as long as the gateway serves."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        keeper: Keeper,
        *,
        key: str,
        identity: str,
    ) -> None:
        """`identity` is HOST/ID, different for each gateway."""
        self._transport = transport
        self._clock = clock
        self._keeper = keeper
        self._key = key
        self._identity = identity
        self._leadership: Leadership | None = None
        self._election = Election(transport, clock, key=key, ttl_s=LEASE_TTL_S)

    async def run(self) -> None:
        """Hold the address whenever no other gateway does, until cancelled; then remove it and give up the lease."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keeper.run())
                await self._remove_leftover()
                await self._campaign()
        finally:
            # The address goes before the lease does, so that no two machines have it.
            await self._keeper.close()
            if self._leadership is not None:
                await self._leadership.resign()

    async def _campaign(self) -> NoReturn:
        """Hold the address whenever no other gateway does."""
        failures = Retries(_FAILED_BACKOFF, self._clock)
        while True:
            if await self._tenure(await self._election.campaign(self._identity)):
                await failures.wait()
                self._keeper.failure = ""
            else:
                failures.reset()

    async def _remove_leftover(self) -> None:
        """Remove an address that a killed keeper has left, unless another gateway of this machine has it."""
        with contextlib.suppress(StoreError):
            holder = await self._transport.get(self._key)
            own_host = self._identity.partition("/")[0]
            if holder is None or holder.value.decode().partition("/")[0] != own_host:
                await self._keeper.release()

    async def _tenure(self, leadership: Leadership) -> bool:
        """Hold until another gateway has the lease; return whether the address could not be held."""
        while True:
            self._leadership = leadership
            if await self._hold(leadership):
                await self._keeper.release()
                await leadership.resign()
                return True
            found = await self._hold_alone()
            if found is None:
                return False
            leadership = found

    async def _hold(self, leadership: Leadership) -> bool:
        """Hold while the lease is valid; return whether the address could not be held."""
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(leadership.keep())
            while leadership.valid() and not self._keeper.failure:
                left_s = leadership.remaining_s()
                if left_s > _LAST_S:
                    await self._keeper.hold(left_s, has_lease=True)
                else:
                    # The store may be away: have the time of the next phase before this one is over.
                    await self._keeper.hold(_ALONE_S, has_lease=False)
                await self._clock.sleep(_RENEW_EVERY_S)
            keeping.cancel()
        return bool(self._keeper.failure)

    async def _hold_alone(self) -> Leadership | None:
        """Keep the address without a valid lease; return the new lease, or None once another gateway has it.

        While the store is away, no gateway can win the lease. If only this machine cannot reach the store, another
        gateway wins it, announces the address, and the keeper here removes it.
        """
        log.warning("floating address held without a lease", extra={"key": self._key})
        retries = Retries(_LOOK_BACKOFF, self._clock)
        async with asyncio.TaskGroup() as group:
            campaign = group.create_task(self._election.campaign(self._identity))
            while not campaign.done():
                await self._keeper.hold(_ALONE_S, has_lease=False)
                if await self._is_taken():
                    await self._keeper.release()
                    campaign.cancel()
                    return None
                await retries.wait()
        return campaign.result()

    async def _is_taken(self) -> bool:
        """Return whether the store says that another gateway has the lease."""
        try:
            async with asyncio.timeout(_ASK_S):
                holder = await self._transport.get(self._key)
        except (StoreError, TimeoutError):
            return False
        return holder is not None and holder.value.decode() != self._identity


def make_holder(
    transport: Transport, clock: Clock, floating: FloatingAddress | None, instance: str
) -> AddressHolder | None:
    """Return the holder of a gateway, or None without a floating address; `instance` differs for each process."""
    if floating is None:
        return None
    return AddressHolder(
        transport,
        clock,
        KeeperProcess(floating.address, floating.interface, clock),
        key=keys.named(keys.FLOATING_ADDRESS_PREFIX, str(floating.address.ip)),
        identity=f"{socket.gethostname()}/{instance}",
    )
