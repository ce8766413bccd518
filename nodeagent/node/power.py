"""Sleep of this machine by the leader's order, magic packets for other machines, and the power assertion.

Before the machine sleeps, the node's status says so, endpoints leave service, and the lease ends: the fleet then knows
that the node is asleep and not lost. Engines stay in memory, and go on where they were.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from machinery.clock import Clock
from nodeagent.hardware.machine_sleep import MachineSleeper, PowerAssertion
from nodeagent.node.registration import NodeRegistration
from schemas.event import ObjectReference
from schemas.power import PowerOrder, WakePacket
from schemas.replica import Endpoint
from store import codec, keys
from store.errors import StoreError
from store.events import EventRecorder
from store.informer import Informer
from store.port import ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
# Gateways hear of a change within milliseconds; a request that came before shows in the engine's next health answer.
_SETTLE_S: Final = 2.5
# macOS wakes by itself for moments, such as for Power Nap. The leader withdraws its order before it wakes a Mac.
_BACK_TO_SLEEP_S: Final = 15.0
# After an attempt that did not put the machine to sleep.
_RETRY_S: Final = 300.0
_STORE_S: Final = 5.0


@dataclass(slots=True, kw_only=True)
class NodePower:
    """Follows the leader's orders for this node. Run `run()` in a task group."""

    transport: Transport
    clock: Clock
    node: str
    registration: NodeRegistration
    recorder: EventRecorder
    send: Callable[[Sequence[WakePacket]], None]
    """Sends magic packets; raises OSError."""
    work: Callable[[], str]
    """Returns what keeps the machine busy now; empty if nothing does."""
    keeps_awake: Callable[[], bool]
    """Returns whether the machine must not fall asleep by itself."""
    announce: Callable[[datetime | None], Awaitable[bool]]
    """Writes into the node's status since when it sleeps, None for awake; returns whether it was written."""
    on_wake: Callable[[], None]
    """Brings endpoints back into service."""
    sleeper: MachineSleeper | None
    """None: this machine cannot be put to sleep."""
    assertion: PowerAssertion | None
    """None: the system has no power assertions."""
    _sent: dict[str, tuple[datetime, int]] = field(default_factory=dict)
    """The last attempt that was sent for each node, with the time of its first one."""
    _retry_at: float = float("-inf")

    async def run(self) -> None:
        """Follow the orders, forever."""
        changed, key = asyncio.Event(), keys.power_order_key(self.node)
        prefix = keys.power_order_prefix(self.node)
        orders = Informer(
            self.transport, prefix, lambda item: codec.decode(PowerOrder, item), self.clock
        )
        orders.on_change(lambda _: changed.set())
        async with asyncio.TaskGroup() as group:
            group.create_task(orders.run())
            try:
                while True:
                    changed.clear()
                    await self._hold_assertion()
                    order = orders.items.get(key, PowerOrder())
                    self._send_wakes(order)
                    if order.sleep and self._may_sleep():
                        await self._sleep()
                    try:
                        async with asyncio.timeout(_LOOK_S):
                            await changed.wait()
                    except TimeoutError:
                        continue
            finally:
                if self.assertion is not None:
                    await self.assertion.release()

    async def _hold_assertion(self) -> None:
        if self.assertion is not None:
            is_wanted = self.assertion.is_forced or self.keeps_awake() or self.work()
            await (self.assertion.hold() if is_wanted else self.assertion.release())

    def _send_wakes(self, order: PowerOrder) -> None:
        """Send the attempts that were not sent yet."""
        for request in order.wakes:
            attempt = request.requested_at, request.attempt
            if self._sent.get(request.node, attempt) >= attempt and request.node in self._sent:
                continue
            self._sent[request.node] = attempt
            try:
                self.send(request.packets)
            except OSError as error:
                log.warning(
                    "magic packet not sent", extra={"node": request.node, "why": str(error)}
                )
                continue
            log.info("magic packet sent", extra={"node": request.node, "attempt": request.attempt})

    def _may_sleep(self) -> bool:
        is_due = self.clock.monotonic() >= self._retry_at
        has_lease = self.registration.lease is not None
        return self.sleeper is not None and is_due and has_lease and not self.work()

    async def _sleep(self) -> None:
        """Leave service, sleep until the fleet or the owner wants the machine, and come back."""
        sleeper = self.sleeper
        assert sleeper is not None
        if not await self._is_ordered():  # the cache may be behind after a sleep
            return
        try:
            await self._leave_service()
            await self.clock.sleep(_SETTLE_S)
            if self.work() or not await self.announce(self.clock.now()):
                return
            log.info("going to sleep")
            await self.registration.suspend()
            if self.assertion is not None:
                await self.assertion.release()
            if not await self._sleep_until_wanted(sleeper):
                self._retry_at = self.clock.monotonic() + _RETRY_S
                message = f"the system did not go to sleep; the next attempt is in {_RETRY_S:.0f} s"
                await self.recorder.record(
                    ObjectReference(kind="Node", name=self.node),
                    "SleepFailed",
                    message,
                    type_="Warning",
                )
        except StoreError as error:
            log.info("not going to sleep", extra={"why": str(error)})
        finally:
            self.registration.resume()
            self.on_wake()
            await self.announce(None)

    async def _sleep_until_wanted(self, sleeper: MachineSleeper) -> bool:
        """Sleep, and again after each wake that nothing asked for; return False if the machine does not sleep."""
        while await sleeper.suspend():
            log.info("woke up")
            if self.work() or not await self._is_ordered():
                return True
            await self.clock.sleep(_BACK_TO_SLEEP_S)
            if self.work() or not await self._is_ordered():
                return True
        return False

    async def _is_ordered(self) -> bool:
        """Return whether the leader wants this machine to sleep, by the store and not by the cache."""
        while True:
            try:
                async with asyncio.timeout(_STORE_S):
                    item = await self.transport.get(keys.power_order_key(self.node))
                return item is not None and codec.decode(PowerOrder, item).sleep
            except codec.UndecodableError:
                return False  # of a newer release
            except (StoreError, TimeoutError) as error:
                # The network comes up some seconds after the machine.
                log.debug("order not read", extra={"why": str(error)})
                await self.clock.sleep(_LOOK_S)

    async def _leave_service(self) -> None:
        """Mark the endpoints as leaving: gateways then send nothing here, and keep none of them as a last resort.

        Raises:
            StoreError: the store was not written.

        """
        lease = self.registration.lease
        listing = await self.transport.list(keys.endpoint_prefix(self.node))
        for item in listing.items if lease is not None else ():
            endpoint = codec.decode_object(Endpoint, item)
            spec = endpoint.spec.model_copy(update={"is_leaving": True})
            value = codec.encode(endpoint.model_copy(update={"spec": spec}))
            guard = ModRevisionGuard(key=item.key, mod_revision=item.mod_revision)
            put = Put(key=item.key, value=value, lease=item.lease)
            await self.transport.commit([guard], [put])
