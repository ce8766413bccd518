"""The limits that the pools of a node set: bytes a second of model files, bytes on its disk, wired memory of engines."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from machinery.clock import Clock
from models.hub.bandwidth import BandwidthLimit
from nodeagent.engines.wired_memory import WiringPolicy
from nodeagent.hardware.machine_sleep import PowerAssertion
from nodeagent.model_store.collector import ModelCollector
from nodeagent.peers.uploads import Uploads
from schemas import quantity
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeStatus
from schemas.pools import NodePool, in_pool
from store import codec, keys
from store.errors import StoreError
from store.informer import Informer
from store.port import Transport

log = logging.getLogger(__name__)

# A person may give the node other labels, by which it belongs to other pools.
_LOOK_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Applies the limits of the pools that one node is in.

    The last ones hold while the store is away, or the node in it is of a newer mlx-fleet.
    """

    transport: Transport
    clock: Clock
    node: str
    status: NodeStatus
    """The node's chip, memory and own labels."""
    download: BandwidthLimit
    """The limit of all that the node receives."""
    uploads: Uploads | None
    """Its uploads; None if it sends nothing."""
    collector: ModelCollector
    """The collection of its models."""
    wiring: WiringPolicy
    """The wiring of its engines."""
    assertion: PowerAssertion | None = None
    """The assertion against idle sleep, which pools with AlwaysOn ask for."""
    is_applied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the pools were read for the first time."""

    async def run(self) -> None:
        """Follow the pools, forever."""
        changed = asyncio.Event()
        pools = Informer(
            self.transport,
            keys.spec_prefix(NodePool.__name__),
            lambda item: codec.decode_object(NodePool, item),
            self.clock,
        )
        pools.on_change(lambda _: changed.set())
        async with asyncio.TaskGroup() as group:
            group.create_task(pools.run())
            await pools.wait_synced()
            while True:
                changed.clear()
                try:
                    self._apply(pools.items.values(), await self._read_node())
                except (StoreError, codec.UndecodableError) as error:
                    log.info("limits of pools not applied", extra={"why": str(error)})
                self.is_applied.set()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await changed.wait()
                except TimeoutError:
                    continue

    async def _read_node(self) -> Node:
        """Return this node with the labels that its owner gave it. Raises StoreError, UndecodableError."""
        item = await self.transport.get(keys.spec_key(Node.__name__, self.node))
        metadata = (
            ObjectMeta(name=self.node) if item is None else codec.decode_object(Node, item).metadata
        )
        return Node(metadata=metadata, status=self.status)

    def _apply(self, pools: Iterable[NodePool], node: Node) -> None:
        own = [pool.spec for pool in pools if in_pool(pool, node)]
        self.download.set_rate(_lowest(spec.download_limit for spec in own))
        limit = _lowest(spec.model_disk_limit for spec in own)
        self.collector.policy = replace(self.collector.policy, limit_bytes=limit)
        memories = [spec.memory for spec in own if spec.memory is not None]
        if self.assertion is not None:
            powers = [spec.power for spec in own if spec.power is not None]
            self.assertion.is_forced = any(power.mode == "AlwaysOn" for power in powers)
        self.wiring.pools = "Off" if any(each.wired == "Off" for each in memories) else "Auto"
        if self.uploads is not None:
            self.uploads.set_pool_limit(_lowest(spec.upload_limit for spec in own))


def _lowest(limits: Iterable[str | None]) -> int | None:
    return min((quantity.parse(limit) for limit in limits if limit), default=None)
