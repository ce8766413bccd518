"""Fleet state: routing table, API keys, and their copy on disk for a start without the store."""

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from gateway import errors
from gateway.auth.access_control import AccessControl
from gateway.auth.keyring import Keyring, Principal
from gateway.auth.rate_limits import AnonymousClients, Limits
from gateway.routing.table import RoutingTable, ServedModel
from gateway.state.endpoint_filter import EngineAccess
from gateway.state.gpu_loads import GpuLoads
from gateway.state.key_cache import GatewayCounter, KeyCache
from gateway.state.persistence import GatewaySnapshot, SnapshotFile
from gateway.state.table_cache import TableCache
from machinery.clock import Clock
from schemas.records import ApiKey
from schemas.wire.errors import RefusedError
from store.port import Transport

log = logging.getLogger(__name__)

# The longest wait for the store at the start before the file is used.
_PATIENCE_S = 2.0
# A rollout changes endpoints many times; a file of this age is good enough.
_EVERY_S = 5.0


class StatePersister:
    """Saves the state and restores it at the start. Run `run()` in a task group."""

    def __init__(
        self,
        file: SnapshotFile,
        table_cache: TableCache,
        key_cache: KeyCache,
        gateways: GatewayCounter,
        clock: Clock,
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._file = file
        self._table_cache = table_cache
        self._key_cache = key_cache
        self._gateways = gateways
        self._clock = clock
        self._patience_s = patience_s
        self._changed_event = asyncio.Event()
        self._settled = asyncio.Event()
        self._keys: Mapping[str, ApiKey] | None = None
        self._saved_at: datetime | None = None
        table_cache.on_change(self._changed_event.set)
        key_cache.on_change(self._changed_event.set)

    def age_s(self) -> float | None:
        """Return the age of the restored file in seconds; None if the store is in use."""
        if self._table_cache.source != "snapshot" or self._saved_at is None:
            return None
        return max(0.0, (self._clock.now() - self._saved_at).total_seconds())

    async def wait_settled(self) -> None:
        """Wait until the store was read, the file is restored, or there is no file."""
        await self._settled.wait()

    async def run(self) -> None:
        """Restore the file if necessary, then keep it current forever."""
        snapshot = await asyncio.to_thread(self._file.read)
        if snapshot is not None:
            self._keys = snapshot.keys
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._table_cache.wait_synced()
                    await self._key_cache.wait_synced()
            except TimeoutError:
                self._saved_at = snapshot.saved_at
                log.warning(
                    "store not reached in time; using the saved fleet state",
                    extra={"saved_at": snapshot.saved_at.isoformat()},
                )
                self._gateways.restore(snapshot.gateways)
                if snapshot.keys is not None:
                    self._key_cache.restore(snapshot.keys)
                # Perhaps only the keys are missing.
                if not self._table_cache.is_synced:
                    self._table_cache.restore(snapshot.known)
                    await self._table_cache.changed(within_s=1.0)
        self._settled.set()
        while True:
            await self._changed_event.wait()
            self._changed_event.clear()
            if self._table_cache.source == "store":
                # Encoded and written in a thread, because a disk may be slow.
                await asyncio.to_thread(self._file.save, self._snapshot())
                await self._clock.sleep(_EVERY_S)

    def _snapshot(self) -> GatewaySnapshot:
        # Keys that cannot be read now are kept unchanged.
        known = self._key_cache.known()
        self._keys = self._keys if known is None else known
        return GatewaySnapshot(
            saved_at=self._clock.now(),
            known=self._table_cache.known(),
            keys=self._keys,
            gateways=self._gateways.all(),
        )


class FleetState:
    """All that a gateway knows about its fleet. Run `run()` in a task group."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        anonymous: Limits | None,
        state_dir: Path | None,
        site: str,
        access: EngineAccess | None = None,
    ) -> None:
        """Create the state, empty.

        Args:
            transport: the store.
            clock: the time.
            anonymous: limits of each client without a key; None: requests need a key.
            state_dir: the folder of the file; None: not saved.
            site: the gateway's own.
            access: to engines; None: those on ports, without TLS.

        """
        self.table_cache = TableCache(transport, clock, site=site, access=access)
        table_cache = self.table_cache
        self.gpu_loads = GpuLoads(transport, clock, is_stale=lambda: table_cache.is_stale)
        self.keyring = Keyring(clock)
        asks_for_keys = anonymous is None
        clients = AnonymousClients(anonymous, clock) if anonymous not in (None, Limits()) else None
        self.access = AccessControl(self.keyring, clock, is_on=asks_for_keys, anonymous=clients)
        self.gateways = GatewayCounter(transport, clock)
        # Also where keys are not required: the limits of a key that is shown hold.
        self.key_cache = KeyCache(transport, clock, self.keyring, self.gateways)
        rates = self.access.model_rates
        self.table_cache.on_change(lambda: rates.update(self.table_cache.table.models))
        self.gateways.on_change(lambda: rates.share(self.gateways.all()))
        self._persister: StatePersister | None = None
        if state_dir is not None:
            file = SnapshotFile(state_dir)
            self._persister = StatePersister(
                file, self.table_cache, self.key_cache, self.gateways, clock
            )

    async def wait_settled(self) -> None:
        """Wait until there is state to use, or nothing to wait for; two seconds at most."""
        if self._persister is not None:
            await self._persister.wait_settled()

    def snapshot_age_s(self) -> float | None:
        """Return the age of the restored file in seconds; None if the store is in use."""
        return None if self._persister is None else self._persister.age_s()

    def visible_models(self, principal: Principal | None) -> list[ServedModel]:
        """Return the models that a client may use, by name. Raises RefusedError: the store was not read yet."""
        models, may_use = self._table().models, self.access.may_use(principal)
        return [models[name] for name in sorted(models) if may_use(name)]

    def find_model(self, principal: Principal | None, name: str) -> ServedModel:
        """Return the model of this name.

        Raises:
            RefusedError: the client may not use the model, it does not exist, or the store was not read yet.

        """
        table = self._table()
        self.access.allow(principal, name)
        model = table.models.get(name)
        if model is None:
            raise self.access.unknown_model(principal, table, name)
        return model

    def _table(self) -> RoutingTable:
        if not self.table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        return self.table_cache.table

    async def run(self) -> None:
        """Keep the state current, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.table_cache.run())
            group.create_task(self.gateways.run())
            group.create_task(self.gpu_loads.run())
            group.create_task(self.key_cache.run())
            if self._persister is not None:
                group.create_task(self._persister.run())
