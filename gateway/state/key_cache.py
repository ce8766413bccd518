"""Keeps the API keys like the store, and how many gateways share their rates. Decides nothing."""

import asyncio
from collections.abc import Callable

from gateway.auth.keyring import Keyring
from gateway.state.persistence import KnownKeys
from machinery.clock import Clock
from schemas.records import ApiKey, GatewayLease
from store import codec, keys
from store.informer import Informer
from store.port import Transport


class KeyCache:
    """Has the keyring know the keys, a moment after they were written. Run `run()` in a task group.

    Apart from the table: who may not read keys (a role of before them) still has one.
    """

    def __init__(self, transport: Transport, clock: Clock, keyring: Keyring) -> None:
        self._keyring = keyring
        self._handlers: list[Callable[[], None]] = []
        self._keys = Informer(
            transport, keys.API_KEY_PREFIX, lambda item: codec.decode(ApiKey, item), clock
        )
        self._gateways = Informer(
            transport,
            keys.GATEWAY_LEASE_PREFIX,
            lambda item: codec.decode(GatewayLease, item),
            clock,
        )
        for informer in (self._keys, self._gateways):
            informer.on_change(lambda _: self._take())

    def on_news(self, handler: Callable[[], None]) -> None:
        """Have the handler called after each change that the store told of."""
        self._handlers.append(handler)

    def known(self) -> KnownKeys | None:
        """Return what the store holds; None before it was read."""
        if not self._keys.synced:
            return None
        found = {
            key.removeprefix(keys.API_KEY_PREFIX): one for key, one in self._keys.items.items()
        }
        # Where keys are not asked for, none of their rates is used up.
        sharing = sum(one.asks_for_keys for one in self._gateways.items.values())
        return KnownKeys(keys=found, gateways=sharing)

    def suppose(self, known: KnownKeys) -> None:
        """Go by this until the store is heard."""
        if not self._keys.synced:
            self._keyring.replace(known.keys, known.gateways)

    async def wait_synced(self) -> None:
        """Wait until the keys were read."""
        await self._keys.wait_synced()

    async def run(self) -> None:
        """Keep the keyring like the store, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keys.run())
            group.create_task(self._gateways.run())
            await self._keys.wait_synced()
            self._take()  # a fleet without keys changes nothing

    def _take(self) -> None:
        known = self.known()
        if known is None:
            return
        self._keyring.replace(known.keys, known.gateways)
        for handler in self._handlers:
            handler()
