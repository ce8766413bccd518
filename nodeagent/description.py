"""The description of the node in the store: its models, adapters and machine, kept up to date."""

import asyncio
import logging
from dataclasses import replace
from datetime import datetime

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from models import inspection
from nodeagent.api.server import AgentApi
from nodeagent.dependencies import AgentConfig, Dependencies
from nodeagent.engines.references import ReferenceTasks
from nodeagent.hardware.macos import gpu_memory_limit
from nodeagent.hardware.readings import MachineReader, MachineReading
from nodeagent.node import machine_conditions
from nodeagent.node.leaked_resources import RebootReason
from nodeagent.node.machine_conditions import MachineHistory
from nodeagent.node.registration import NodeRegistration
from nodeagent.observe import NodeState
from nodeagent.replicas.engine_tracker import EngineLife
from schemas.event import ObjectReference
from schemas.meta import is_true
from schemas.node import LocalModel, NodeFabric, NodeStatus
from store.codec import NewerDocumentError
from store.errors import PermissionDeniedError, StoreError
from store.events import EventRecorder

log = logging.getLogger(__name__)

# While a child process finds out how a model can be split, which takes seconds: a group waits for the answer.
_SPLIT_POLL_S = 0.5
_STORE_BACKOFF = Backoff(first_s=0.5, limit_s=4.0)
# Each part of a reader has its own limit; this is for one that exceeds it.
_READ_TIMEOUT_S = 20.0
_ANNOUNCE_S = 10.0


class MachineStatus:
    """The readings of the machine, turned into conditions of the node's status."""

    def __init__(
        self,
        readings: MachineReader,
        clock: Clock,
        *,
        every_s: float,
        limit_s: float = _READ_TIMEOUT_S,
        is_memory_chosen: bool = False,
    ) -> None:
        """Read at most every `every_s`; `is_memory_chosen` says that the agent has `--memory`."""
        self._is_memory_chosen = is_memory_chosen
        self._readings = readings
        self._clock = clock
        self._every_s = every_s
        self._limit_s = limit_s
        self._past = MachineHistory()
        self._fabric: NodeFabric | None = None
        self._local_models: tuple[LocalModel, ...] | None = None
        self._metal_bytes: int | None = None
        """Metal's recommendation without a wired limit, 0 if unknown; None before the first report."""
        self.is_resumed = False
        self._taken_at = float("-inf")
        self._unreadable: tuple[str, ...] = ()

    def resume(self, described: NodeStatus | None) -> None:
        """Continue from the status that an earlier run of this agent wrote, if there is one."""
        self.is_resumed = True
        if described is None:
            return
        self._fabric = described.fabric
        self._local_models = described.local_models
        self._past = replace(
            self._past,
            conditions=tuple(
                c
                for c in described.conditions
                if c.type in (*machine_conditions.CONDITION_TYPES, machine_conditions.KERNEL_PANICS)
            ),
            disk_bytes=described.disk_bytes,
            disk_free_bytes=described.disk_free_bytes if described.disk_bytes else None,
            power=described.power,
            is_owner_active=described.is_owner_active,
            is_in_meeting=described.is_in_meeting,
            is_lid_shut=described.is_lid_shut,
            wakes_on_lan=described.wakes_on_lan,
            runs_etcd=described.runs_etcd,
            wired_limit=described.wired_limit,
            panics=described.panics,
        )

    @property
    def fabric(self) -> NodeFabric | None:
        """The machine's cables at their last reading; None before the first."""
        return self._fabric

    @property
    def is_owner_present(self) -> bool:
        """True if the owner uses keyboard, mouse, camera or microphone."""
        return self._past.is_owner_active or self._past.is_in_meeting

    async def update(self, *, has_engines: bool, reboot_reason: RebootReason | None = None) -> None:
        """Take a reading, unless the last one is recent; `reboot_reason` is one that engines caused."""
        if self._clock.monotonic() - self._taken_at < self._every_s:
            return
        reading = await self._take()
        self._taken_at = self._clock.monotonic()
        self._fabric = reading.fabric or self._fabric
        if reading.local_models is not None:
            self._local_models = reading.local_models
        self._past = machine_conditions.next_history(
            reading,
            self._past,
            self._clock.now(),
            has_engines=has_engines,
            reboot_reason=reboot_reason,
        )
        self._log_unreadable(
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

    def _log_unreadable(self, unreadable: tuple[str, ...]) -> None:
        if unreadable and unreadable != self._unreadable:
            log.warning(
                "parts of the machine cannot be read", extra={"parts": ", ".join(unreadable)}
            )
        self._unreadable = unreadable

    def fill(self, status: NodeStatus) -> NodeStatus:
        """Return the status with the machine's conditions, and without the memory that others wired."""
        past, source = self._past, status.allocatable_source
        is_raised = past.wired_limit is not None and past.wired_limit.mebibytes > 0
        if status.metal_device is not None and self._metal_bytes is None:
            # With a wired limit Metal recommends that limit, which may be lowered again.
            self._metal_bytes = 0 if is_raised else status.metal_device.recommended_bytes
        metal_bytes = self._metal_bytes or 0
        recommended, _ = gpu_memory_limit(status.memory_bytes, None, metal_bytes)
        configured = status.allocatable_bytes
        if past.wired_limit is not None or metal_bytes:
            configured, source = machine_conditions.memory_limit(
                configured,
                status.memory_bytes,
                past.wired_limit,
                metal_bytes,
                is_chosen=self._is_memory_chosen,
            )
        return status.model_copy(
            update={
                "fabric": self._fabric or status.fabric,
                "conditions": tuple(
                    sorted((*status.conditions, *past.conditions), key=lambda each: each.type)
                ),
                "allocatable_bytes": machine_conditions.allocatable_bytes(
                    configured, recommended, past
                ),
                "allocatable_source": source,
                "wired_limit": past.wired_limit,
                "panics": past.panics,
                "disk_bytes": past.disk_bytes,
                "disk_free_bytes": past.disk_free_bytes or 0,
                "power": past.power,
                "is_owner_active": past.is_owner_active,
                "is_in_meeting": past.is_in_meeting,
                "is_lid_shut": past.is_lid_shut,
                "wakes_on_lan": past.wakes_on_lan,
                "runs_etcd": past.runs_etcd,
                "local_models": self._local_models,
            }
        )


class NodeDescriber:
    """Writes the node's status whenever one of its parts changes."""

    def __init__(
        self,
        config: AgentConfig,
        dependencies: Dependencies,
        node: NodeState,
        registration: NodeRegistration,
        clock: Clock,
        recorder: EventRecorder,
    ) -> None:
        """Record events by `recorder`, which is that of this node."""
        self._recorder = recorder
        self._config = config
        self._dependencies = dependencies
        self._node = node
        self._registration = registration
        self._clock = clock
        self._requested = asyncio.Event()
        self._written = asyncio.Event()
        self._asleep_since: datetime | None = None
        self._written_asleep_since: datetime | None = None
        readings = dependencies.readings
        # Models are inspected in bursts; the machine need not be read at each inspection.
        every_s = config.inspect_every_s / 2
        self._machine = (
            MachineStatus(
                readings, clock, every_s=every_s, is_memory_chosen=config.is_memory_chosen
            )
            if readings is not None
            else None
        )

    def request(self) -> None:
        """Request that the status is written again soon."""
        self._requested.set()

    async def announce(self, asleep_since: datetime | None) -> bool:
        """Write since when the machine sleeps, None for awake; return whether it was written in time."""
        self._asleep_since = asleep_since
        self.request()
        try:
            async with asyncio.timeout(_ANNOUNCE_S):
                while self._written_asleep_since != asleep_since:
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            return False
        return True

    @property
    def is_owner_present(self) -> bool:
        """True if the owner uses the machine, by its last reading."""
        return self._machine is not None and self._machine.is_owner_present

    @property
    def fabric(self) -> NodeFabric:
        """The machine's networks and cables at their last reading."""
        node_fabric = None if self._machine is None else self._machine.fabric
        return node_fabric or self._config.status.fabric

    async def run(self, references: ReferenceTasks, api: AgentApi | None) -> None:
        """Inspect deployed models and the machine, and write the status when it changes, forever."""
        await self._dependencies.uses.wait_synced()
        if self._dependencies.metal is not None:
            # Placement by an estimate would be corrected within seconds, after replicas were placed by it.
            await self._dependencies.metal.wait()
        last_error = ""
        retries = Retries(_STORE_BACKOFF, self._clock)
        while True:
            self._requested.clear()
            try:
                dependencies = self._dependencies
                uses = tuple(dependencies.uses.items.values())
                models = await dependencies.report_models(inspection.named_models(uses))
                self._node.learn(models)
                adapters = await dependencies.report_adapters(inspection.named_adapters(uses))
                status = self._config.status.model_copy(
                    update={"models": models, "adapters": adapters}
                )
                if dependencies.metal is not None:
                    status = dependencies.metal.fill(status, await self._registration.described())
                status = await self._with_machine_status(status, references)
                if dependencies.disk_rate is not None:
                    before = await self._registration.described()
                    status = await dependencies.disk_rate.fill(status, before)
                if dependencies.fabric is not None:
                    status = await dependencies.fabric.fill(status, self._registration)
                if api is not None:
                    status = api.fill(status)
                asleep_since = self._asleep_since
                status = status.model_copy(update={"asleep_since": asleep_since})
                before = await self._registration.described()
                await self._registration.describe(status)
                self._written_asleep_since = asleep_since
                self._written.set()
                await self._announce_panics(status, before)
                retries.reset()
                last_error, wait_s = "", self._config.inspect_every_s
                if self._dependencies.is_inspecting():
                    wait_s = min(wait_s, _SPLIT_POLL_S)
            except NewerDocumentError as error:
                log.warning("status not written", extra={"why": str(error)})
                wait_s = self._config.inspect_every_s
            except StoreError as error:
                if str(error) != last_error:
                    log.info("status not written; will retry", extra={"why": str(error)})
                is_refused = isinstance(error, PermissionDeniedError)
                last_error, wait_s = str(error), retries.next_delay_s(is_refused=is_refused)
            try:
                async with asyncio.timeout(wait_s):
                    await self._requested.wait()
            except TimeoutError:
                continue

    async def _announce_panics(self, status: NodeStatus, before: NodeStatus | None) -> None:
        """Record an event for each recent panic that the status in the store did not have."""
        known = () if before is None else before.panics
        about = ObjectReference(kind="Node", name=self._config.name)
        for panic in machine_conditions.recent_panics(status.panics, self._clock.now()):
            if panic in known:
                continue
            log.error("the kernel panicked", extra={"at": panic.at.isoformat(), "why": panic.text})
            message = f"the kernel panicked at {panic.at:%Y-%m-%d %H:%M:%S} UTC: {panic.text or 'its report cannot be read'}"
            await self._recorder.record(about, "MacPanicked", message, type_="Warning")

    async def _with_machine_status(
        self, status: NodeStatus, references: ReferenceTasks
    ) -> NodeStatus:
        """Return the status with the conditions of the machine."""
        if self._machine is None:
            return status
        if not self._machine.is_resumed:
            self._machine.resume(await self._registration.described())
        engines = self._node.engines
        # Agents that share one machine do not know each other's engines.
        has_engines = (
            self._config.status.is_part
            or references.is_busy
            or any(engine.process.child.running() for engine in engines.values())
        )
        unkillable = [name for name, one in engines.items() if one.is_unkillable(self._clock)]
        for name, engine in engines.items():
            if engine.life is EngineLife.READY:
                self._node.leaked.record_ready(name)
        now = self._clock.monotonic()
        reboot_reason = self._node.leaked.find(self._machine.fabric, unkillable, now)
        await self._machine.update(has_engines=has_engines, reboot_reason=reboot_reason)
        filled = self._machine.fill(status)
        self._node.wiring.has_panics = is_true(filled.conditions, machine_conditions.KERNEL_PANICS)
        return filled
