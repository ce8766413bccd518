"""Which models are named in the store beside those that deployments name themselves. Pure.

Takes readings of the machine and puts what is true into the node's status. Judging is conditions.py's job.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace

from machinery.clock import Clock
from nodeagent.hardware.readings import MachineReader, MachineReading
from nodeagent.node import machine_conditions
from nodeagent.node.machine_conditions import MachineHistory, RebootReason
from schemas.deployment import ModelDeployment
from schemas.node import NodeFabric, NodeStatus
from schemas.shardgroup import ShardGroup


def fallback_models(
    deployments: Iterable[ModelDeployment], groups: Iterable[ShardGroup]
) -> set[str]:
    """Return the models that deployments may fall back on, on the groups that they are split over."""
    wishes = {found.spec.sharding for found in deployments}
    return {
        one.model
        for group in groups
        if "Auto" in wishes or group.name in wishes
        for one in group.spec.fallbacks
        if one.model is not None
    }


log = logging.getLogger(__name__)

# Readers bound each of their own parts; this is for one that does not.
_READ_TIMEOUT_S = 20.0


class MachineStatus:
    """How one machine is, from reading to reading."""

    def __init__(
        self,
        readings: MachineReader,
        clock: Clock,
        *,
        every_s: float,
        limit_s: float = _READ_TIMEOUT_S,
    ) -> None:
        self._readings = readings
        self._clock = clock
        self._every_s = every_s
        self._limit_s = limit_s
        self._past = MachineHistory()
        self._fabric: NodeFabric | None = None
        self.is_resumed = False
        self._taken_at = float("-inf")
        self._told: tuple[str, ...] = ()

    def resume(self, said: NodeStatus | None) -> None:
        """Go on from what an earlier run of this agent said of the same machine, if it did."""
        self.is_resumed = True
        if said is None:
            return
        self._fabric = said.fabric
        self._past = replace(
            self._past,
            conditions=tuple(
                c for c in said.conditions if c.type in machine_conditions.CONDITION_TYPES
            ),
            disk_bytes=said.disk_bytes,
            disk_free_bytes=said.disk_free_bytes if said.disk_bytes else None,
            power=said.power,
            is_owner_active=said.is_owner_active,
        )

    @property
    def fabric(self) -> NodeFabric | None:
        """The machine's cables as they were last read; None before."""
        return self._fabric

    async def look(self, *, has_engines: bool, broken: RebootReason | None = None) -> None:
        """Take a reading, unless there is one of a moment ago; `broken` is what engines left behind."""
        if self._clock.monotonic() - self._taken_at < self._every_s:
            return
        reading = await self._take()
        self._taken_at = self._clock.monotonic()
        self._fabric = reading.fabric or self._fabric
        self._past = machine_conditions.next_history(
            reading, self._past, self._clock.now(), has_engines=has_engines, broken=broken
        )
        self._tell(
            tuple(
                part
                for part in machine_conditions.unreadable_parts(reading)
                if part in machine_conditions.CONDITION_TYPES
            )
        )

    async def _take(self) -> MachineReading:
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._readings.take()
        except (OSError, TimeoutError):
            return MachineReading()

    def _tell(self, unread: tuple[str, ...]) -> None:
        if unread and unread != self._told:
            log.warning("the machine does not say how it is", extra={"parts": ", ".join(unread)})
        self._told = unread

    def fill(self, status: NodeStatus) -> NodeStatus:
        """Return the status with what is true of the machine in it."""
        past = self._past
        return status.model_copy(
            update={
                "fabric": self._fabric or status.fabric,
                "conditions": past.conditions,
                "disk_bytes": past.disk_bytes,
                "disk_free_bytes": past.disk_free_bytes or 0,
                "power": past.power,
                "is_owner_active": past.is_owner_active,
            }
        )
