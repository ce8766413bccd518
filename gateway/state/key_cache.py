"""Cache of the API keys in the store, and of the number of gateways that share their rates."""

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
    """Updates the keyring after each change of the keys. Run `run()` in a task group.

    Separate from the table cache: a gateway without the right to read keys (an earlier role) still
    gets a table.
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
            informer.on_change(lambda _: self._update_keyring())

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call the handler after each change in the store."""
        self._handlers.append(handler)

    def known(self) -> KnownKeys | None:
        """Return the keys in the store; None before they were read."""
        if not self._keys.synced:
            return None
        found = {
            key.removeprefix(keys.API_KEY_PREFIX): one for key, one in self._keys.items.items()
        }
        # Gateways that do not require keys use none of their rates.
        sharing = sum(one.asks_for_keys for one in self._gateways.items.values())
        return KnownKeys(keys=found, gateways=sharing)

    def restore(self, known: KnownKeys) -> None:
        """Use the saved keys until the store was read."""
        if not self._keys.synced:
            self._keyring.replace(known.keys, known.gateways)

    async def wait_synced(self) -> None:
        """Wait until the keys were read."""
        await self._keys.wait_synced()

    async def run(self) -> None:
        """Keep the keyring current, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keys.run())
            group.create_task(self._gateways.run())
            await self._keys.wait_synced()
            self._update_keyring()  # a fleet without keys sends no change

    def _update_keyring(self) -> None:
        known = self.known()
        if known is None:
            return
        self._keyring.replace(known.keys, known.gateways)
        for handler in self._handlers:
            handler()
