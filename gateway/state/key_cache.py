"""Caches of the API keys in the store, and of the number of gateways that share rates."""

import asyncio
from collections.abc import Callable, Mapping

from gateway.auth.keyring import Keyring
from machinery.clock import Clock
from schemas.records import ApiKey, GatewayLease
from store import codec, keys
from store.informer import Informer
from store.port import Transport


class GatewayCounter:
    """Counts the gateways with a lease. Run `run()` in a task group."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._leases = Informer(
            transport,
            keys.GATEWAY_LEASE_PREFIX,
            lambda item: codec.decode(GatewayLease, item),
            clock,
        )
        self._restored = 1
        """The saved number, in use until the store was read."""
        self._handlers: list[Callable[[], None]] = []
        self._leases.on_change(lambda _: self._tell())

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call the handler after each change."""
        self._handlers.append(handler)

    def _tell(self) -> None:
        for handler in self._handlers:
            handler()

    def restore(self, gateways: int) -> None:
        """Use the saved number until the store was read."""
        self._restored = gateways
        self._tell()

    def all(self) -> int:
        """Return the number of gateways, which share the rates of keys and models."""
        return len(self._leases.items) if self._leases.synced else self._restored

    async def run(self) -> None:
        """Keep the count current, forever."""
        await self._leases.run()


class KeyCache:
    """Updates the keyring after each change of the keys. Run `run()` in a task group.

    Separate from the table cache: a gateway without the right to read keys (an earlier role) still
    gets a table.
    """

    def __init__(
        self, transport: Transport, clock: Clock, keyring: Keyring, gateways: GatewayCounter
    ) -> None:
        self._keyring = keyring
        self._gateways = gateways
        self._handlers: list[Callable[[], None]] = []
        self._keys = Informer(
            transport, keys.API_KEY_PREFIX, lambda item: codec.decode(ApiKey, item), clock
        )
        self._keys.on_change(lambda _: self._update_keyring())
        gateways.on_change(self._update_keyring)

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call the handler after each change in the store."""
        self._handlers.append(handler)

    def known(self) -> Mapping[str, ApiKey] | None:
        """Return the keys in the store by name; None before they were read."""
        if not self._keys.synced:
            return None
        return {key.removeprefix(keys.API_KEY_PREFIX): one for key, one in self._keys.items.items()}

    def restore(self, known: Mapping[str, ApiKey]) -> None:
        """Use the saved keys until the store was read."""
        if not self._keys.synced:
            self._keyring.replace(known, self._gateways.all())

    def is_current(self) -> bool:
        """Return whether the keys are those in the store now."""
        return self._keys.synced and not self._keys.broken_s()

    def silent_s(self) -> float:
        """Return the seconds since the store stopped to answer; 0.0 while it answers."""
        return self._keys.broken_s()

    async def wait_synced(self) -> None:
        """Wait until the keys were read."""
        await self._keys.wait_synced()

    async def run(self) -> None:
        """Keep the keyring current, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keys.run())
            await self._keys.wait_synced()
            self._update_keyring()  # a fleet without keys sends no change

    def _update_keyring(self) -> None:
        known = self.known()
        if known is None:
            return
        self._keyring.replace(known, self._gateways.all())
        for handler in self._handlers:
            handler()
