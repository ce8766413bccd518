"""The uses of models by deployments: the leader's short records while it keeps them, else the deployments themselves.

docs/adr/0004-one-writer-per-key.md has the rules.
"""

import asyncio
from collections.abc import Callable, Mapping

from machinery.backoff import Backoff
from machinery.clock import Clock
from models.inspection import model_use
from nodeagent.kept_copies import LOOK, KeptCopies, ObjectCache, RenamedCache
from schemas.deployment import ModelDeployment
from schemas.model_use import ModelUse
from schemas.shardgroup import ShardGroup
from store import codec, keys
from store.informer import Informer
from store.port import Transport

_DEPLOYMENTS = keys.spec_prefix("ModelDeployment")


class ModelUses(KeptCopies[ModelUse]):
    """A cache of all uses (`ObjectCache`), by the deployment's name."""

    def __init__(self, transport: Transport, clock: Clock, *, look: Backoff = LOOK) -> None:
        """Prepare; `run()` reads. `look`: as of `KeptCopies`."""

        def copies() -> ObjectCache[ModelUse]:
            return RenamedCache(
                Informer(
                    transport,
                    keys.MODEL_USE_PREFIX,
                    lambda item: codec.decode(ModelUse, item),
                    clock,
                ),
                lambda key: key.removeprefix(keys.MODEL_USE_PREFIX),
            )

        super().__init__(
            transport,
            clock,
            mark=keys.MODEL_USES_KEPT,
            copies=copies,
            everything=lambda: DeclaredUses(transport, clock),
            look=look,
        )


class DeclaredUses:
    """The same (`ObjectCache`) from all ModelDeployments and ShardGroups."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._deployments = Informer(
            transport, _DEPLOYMENTS, lambda item: codec.decode_object(ModelDeployment, item), clock
        )
        self._groups = Informer(
            transport,
            keys.spec_prefix("ShardGroup"),
            lambda item: codec.decode_object(ShardGroup, item),
            clock,
        )
        self._items: dict[str, ModelUse] = {}
        self._handlers: list[Callable[[str], None]] = []
        self._deployments.on_change(self._changed)
        self._groups_changed = asyncio.Event()
        self._groups.on_change(lambda _: self._groups_changed.set())

    @property
    def items(self) -> Mapping[str, ModelUse]:
        return self._items

    @property
    def synced(self) -> bool:
        return self._deployments.synced and self._groups.synced

    @property
    def refusal(self) -> str:
        return self._deployments.refusal or self._groups.refusal

    def staleness_s(self) -> float | None:
        ages = [self._deployments.staleness_s(), self._groups.staleness_s()]
        known = [age for age in ages if age is not None]
        return max(known) if len(known) == len(ages) else None

    def on_change(self, handler: Callable[[str], None]) -> None:
        self._handlers.append(handler)

    async def wait_synced(self) -> None:
        await self._deployments.wait_synced()
        await self._groups.wait_synced()
        self._apply_groups()

    async def run(self) -> None:
        """Keep the cache in sync until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deployments.run())
            group.create_task(self._groups.run())
            while True:
                await self._groups_changed.wait()
                self._apply_groups()

    def _apply_groups(self) -> None:
        """Compute the uses again if groups have changed; once for all groups of a list."""
        if self._groups_changed.is_set():
            self._groups_changed.clear()
            for key in list(self._deployments.items):
                self._changed(key)

    def _changed(self, key: str) -> None:
        name, deployment = key.removeprefix(_DEPLOYMENTS), self._deployments.items.get(key)
        if deployment is None:
            self._items.pop(name, None)
        else:
            self._items[name] = model_use(deployment, self._groups.items.values())
        for handler in self._handlers:
            handler(name)
