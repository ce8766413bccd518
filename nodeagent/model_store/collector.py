"""The agent's collection of models: when the disk fills up, above a pool's limit, and when a fetch lacks room.

`models/model_store/collection.py` decides what goes; this module says what is in use, and records what went.
"""

import asyncio
import logging
import random
import shutil
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from models.model_store.collection import (
    CollectionPlan,
    CollectionPolicy,
    collect,
    collectable_bytes,
    content_sizes,
    excess_bytes,
)
from models.model_store.store import ModelStore
from nodeagent.model_store.usage import ModelUsers
from schemas import quantity
from schemas.event import ObjectReference
from store import codec
from store.errors import StoreError
from store.events import EventRecorder

log = logging.getLogger(__name__)

# A Mac's disk fills within minutes at the speed of a fast link; a look costs one statvfs.
_PERIOD_S: Final = 60.0
_DISK_FULL: Final = "the disk is full"

ReadUsers: TypeAlias = Callable[[], Awaitable[ModelUsers]]


class ModelCollector:
    """Removes models that nothing uses from the store of one node.

    Without the store of the fleet nothing is known to be unused, and nothing is removed.
    """

    def __init__(
        self,
        store: ModelStore,
        recorder: EventRecorder,
        read_users: ReadUsers,
        *,
        node: str,
        policy: CollectionPolicy | None = None,
    ) -> None:
        """Record events by `recorder`, which is that of this node."""
        self.store = store
        self.policy = policy or CollectionPolicy()
        self._recorder = recorder
        self._read_users = read_users
        self._node = ObjectReference(kind="Node", name=node)

    async def run(self) -> None:
        """Look at the disk about once a minute, forever, and collect when it is full or the store is above its limit."""
        while True:
            # Agents of several nodes of one machine do not look at the same moment.
            await self.store.clock.sleep(_PERIOD_S * (0.5 + random.random()))
            try:
                await self.collect_if_due()
            except (StoreError, codec.UndecodableError, OSError) as error:
                log.warning("no model was collected", extra={"why": str(error)})

    async def users(self) -> ModelUsers:
        """Return the users of the models now. Raises StoreError, UndecodableError."""
        return await self._read_users()

    async def collect_if_due(self) -> CollectionPlan:
        """Collect if the disk is as full as the policy says, or the store above its limit; return what was removed.

        Raises:
            StoreError, UndecodableError: the users are unknown; nothing was removed.
            OSError: the disk failed; what was removed so far is gone.

        """
        cause = await asyncio.to_thread(self._due_cause)
        return await self._collect(None, cause) if cause else CollectionPlan()

    async def make_room(self, wanted_bytes: int) -> int:
        """Free so many bytes if unused models have them; otherwise remove nothing.

        Return the bytes that unused models still have: what a message about the full disk may promise.

        Raises:
            OSError: the disk failed.

        """
        try:
            in_use = await self._in_use()
        except (StoreError, codec.UndecodableError) as error:
            log.warning("no room was made", extra={"why": str(error)})
            return 0
        free = await asyncio.to_thread(collectable_bytes, self.store, in_use, policy=self.policy)
        if free < wanted_bytes:
            return free
        plan = await self._collect(wanted_bytes, _DISK_FULL)
        return free - plan.freed_bytes

    def _due_cause(self) -> str:
        """Return why models must be removed; "" if none must."""
        if not self.store.blobs.is_dir():
            return ""
        disk = shutil.disk_usage(self.store.root)
        stored, limit = sum(content_sizes(self.store).values()), self.policy.limit_bytes
        excess = excess_bytes(
            disk_bytes=disk.used + disk.free,
            free_bytes=disk.free,
            store_bytes=stored,
            policy=self.policy,
        )
        if limit is not None and stored > limit:
            return (
                f"the models take more than {quantity.show(limit)} (modelDiskLimit of a NodePool)"
            )
        return _DISK_FULL if excess else ""

    async def _in_use(self) -> frozenset[str]:
        users = await self._read_users()
        names = await asyncio.to_thread(self.store.manifest_names)
        return users.used(names)

    async def _collect(self, wanted_bytes: int | None, cause: str) -> CollectionPlan:
        in_use = await self._in_use()
        sizes = {
            model.name: model.size_bytes for model in await asyncio.to_thread(self.store.models)
        }
        plan = await asyncio.to_thread(
            collect, self.store, in_use, policy=self.policy, wanted_bytes=wanted_bytes
        )
        for name in plan.models:
            size = quantity.show(sizes.get(name, 0))
            log.info("model collected", extra={"model": name, "size": size})
            await self._recorder.record(
                self._node,
                "ModelCollected",
                f"{name} ({size}) was removed: {cause}, and nothing uses the model",
            )
        if plan.shortfall_bytes:
            log.warning(
                "unused models do not have the room that is wanted",
                extra={"shortfall_bytes": plan.shortfall_bytes, "freed_bytes": plan.freed_bytes},
            )
        return plan
