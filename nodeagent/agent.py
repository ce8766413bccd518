"""Wires one node's caches, lease, engines and loop together."""

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.control_loop import Requeue, WorkQueue, run_loop
from machinery.process_log import LogRing
from models import inspection
from models.split_options import SplitInspector
from nodeagent.api.machine_metrics import AgentView
from nodeagent.api.server import AgentApi
from nodeagent.dependencies import Dependencies
from nodeagent.engines import group_launch
from nodeagent.engines.engine_processes import EngineProcess, EngineProcesses
from nodeagent.engines.health_client import HealthClient
from nodeagent.engines.references import GoldenReferences, ReferenceTasks
from nodeagent.execute import ActionExecutor, BackgroundTasks, NodeState
from nodeagent.fabric.node_tests import NodeFabricTests
from nodeagent.hardware.probe import SystemMachineReader
from nodeagent.node import registration
from nodeagent.node.description import MachineStatus, fallback_models
from nodeagent.node.registration import LEASE_TTL_S, NodeRegistration
from nodeagent.plan import plan
from nodeagent.replicas.engine_tracker import EngineProber, EngineTracker
from nodeagent.replicas.observed import ObservedReplica, ReferenceState
from nodeagent.replicas.rank_reports import RankReports
from schemas.deployment import ModelDeployment
from schemas.node import AdapterReport, ModelReport, NodeStatus
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup
from store import codec, keys
from store.codec import NewerDocumentError
from store.errors import StoreError
from store.informer import Informer
from store.port import Transport

# While it is found out how a model can be split, which takes seconds: a group waits for it.
_SPLIT_POLL_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What an agent was told, and what it found out about its machine."""

    state_dir: Path
    models_dir: Path
    engine_host: str
    first_port: int
    session: str
    status: NodeStatus
    """The node's description; its models are filled in as they are looked at."""
    name: str
    casts_to_float32: bool
    inspect_every_s: float = 10.0
    """How often models' folders and the machine are looked at without a cause: a person may mend one."""
    lease_s: int = LEASE_TTL_S
    api_port: int | None = None
    """Where the agent answers over HTTP, 0 for any port; None: nowhere."""
    ring: LogRing = field(default_factory=LogRing)
    """The agent's own log."""


def real_dependencies(transport: Transport, clock: Clock, config: AgentConfig) -> Dependencies:
    """Return what an agent works with on a real Mac."""
    splitter = SplitInspector(config.state_dir / "splitting", clock)
    deployments = Informer(
        transport,
        keys.spec_prefix("ModelDeployment"),
        lambda item: codec.decode_object(ModelDeployment, item),
        clock,
    )

    shard_groups = Informer(
        transport,
        keys.spec_prefix("ShardGroup"),
        lambda item: codec.decode_object(ShardGroup, item),
        clock,
    )

    async def report_models(paths: set[str]) -> tuple[ModelReport, ...]:
        specs = [found.spec for found in deployments.items.values()]
        smaller = fallback_models(deployments.items.values(), shard_groups.items.values())
        return await asyncio.to_thread(
            inspection.report_models,
            paths,
            config.models_dir,
            casts_to_float32=config.casts_to_float32,
            splitter=splitter,
            split={spec.model.path for spec in specs if spec.sharding != "Never"} | smaller,
        )

    async def report_adapters(paths: set[str]) -> tuple[AdapterReport, ...]:
        return await asyncio.to_thread(
            inspection.report_adapters,
            paths,
            config.models_dir,
            casts_to_float32=config.casts_to_float32,
        )

    return Dependencies(
        engines=EngineProcesses(
            config.state_dir / "engines",
            node=config.name,
            host=config.engine_host,
            first_port=config.first_port,
        ),
        health=HealthClient(config.engine_host),
        references=GoldenReferences(config.state_dir),
        report_models=report_models,
        report_adapters=report_adapters,
        replicas=Informer(
            transport,
            keys.spec_prefix("Replica"),
            lambda item: codec.decode_object(Replica, item),
            clock,
        ),
        deployments=deployments,
        groups=shard_groups,
        is_looking=splitter.is_looking,
        readings=SystemMachineReader(config.models_dir),
        fabric=NodeFabricTests(
            transport, clock, node=config.name, folder=config.state_dir / "fabric"
        ),
    )


class Agent:
    """One node: looks at what is assigned to it, and makes it so."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        config: AgentConfig,
        parts: Dependencies | None = None,
    ) -> None:
        self._parts = parts or real_dependencies(transport, clock, config)
        self._transport = transport
        self._clock = clock
        self._config = config
        self._reports = RankReports(transport, clock, config.name)
        self._node = NodeState(
            config.name,
            config.status,
            config.models_dir,
            self._parts.report_models,
            self._reports,
        )
        self._presence = NodeRegistration(
            transport, clock, node=config.name, uid=config.status.uid, session=config.session
        )
        # While etcd is away every look fails at its end; engines must be tended all the same.
        self._queue: WorkQueue[str] = WorkQueue(clock, Backoff(first_s=0.05, limit_s=1.0))
        self._replicas, self._deployments = self._parts.replicas, self._parts.deployments
        readings = self._parts.readings
        # Looks at models come in bursts; the machine need not be asked at each.
        every_s = config.inspect_every_s / 2
        self._vitals = (
            MachineStatus(readings, clock, every_s=every_s) if readings is not None else None
        )
        self._models_wanted = asyncio.Event()
        self._named = asyncio.Event()
        self._api = self._door(config.api_port) if config.api_port is not None else None

    def _door(self, port: int) -> AgentApi:
        """Return the agent's API."""
        config = self._config
        view = AgentView(
            name=config.name,
            status=config.status,
            clock=self._clock,
            started_at=self._clock.monotonic(),
            engines=self._node.engines,
            replicas=self._replicas,
            has_lease=lambda: self._presence.lease is not None,
            folder=config.state_dir / "engines",
            host=config.engine_host,
            ring=config.ring,
        )
        return AgentApi(view, self._transport, port=port, on_change=self._models_wanted.set)

    async def run(self) -> None:
        """Run for ever. Ends engines only when told so by the store, never because it ends."""
        self._parts.references.sweep()
        for found in self._parts.engines.find():
            self._adopt(found)
        self._replicas.on_change(self._replica_changed)
        self._deployments.on_change(lambda _: self._models_wanted.set())
        try:
            async with asyncio.TaskGroup() as group:
                making = ReferenceTasks(self._parts.references, group)
                prober = EngineProber(self._parts.health, group, self._clock)
                executor = ActionExecutor(
                    self._node,
                    self._parts.engines,
                    self._presence,
                    self._transport,
                    clock=self._clock,
                    beside=BackgroundTasks(prober=prober, references=making),
                )
                group.create_task(self._replicas.run())
                group.create_task(self._deployments.run())
                if self._parts.groups is not None:
                    self._parts.groups.on_change(lambda _: self._models_wanted.set())
                    group.create_task(self._parts.groups.run())
                group.create_task(
                    self._presence.keep(self._new_session, ttl_s=self._config.lease_s)
                )
                group.create_task(self._describe(making))
                if self._parts.fabric is not None:
                    group.create_task(
                        self._parts.fabric.run(self._presence, self._models_wanted.set)
                    )
                if self._api is not None:
                    group.create_task(self._api.run())
                group.create_task(self._tend(executor, making))
        finally:
            await self._parts.health.close()

    def _adopt(self, found: EngineProcess) -> None:
        now = self._clock.monotonic()
        self._node.engines[found.replica] = EngineTracker(
            process=found, started_at=now, heard_at=now
        )
        log.info("engine adopted", extra={"replica": found.replica, "pid": found.child.record.pid})

    def _replica_changed(self, key: str) -> None:
        self._queue.add(key.removeprefix(keys.spec_prefix("Replica")))

    def _new_session(self) -> None:
        """Everything of ours in the store hangs on the lease: publish it anew."""
        self._node.published.clear()
        self._models_wanted.set()
        self._named.set()
        if self._replicas.synced:
            for name in sorted({*self._node.engines, *self._assigned()}):
                self._queue.add(name)

    def _assigned(self) -> list[str]:
        return [r.name for r in self._replicas.items.values() if self._is_ours(r)]

    def _is_ours(self, replica: Replica) -> bool:
        return group_launch.rank_of_node(replica, self._config.name) is not None

    async def _tend(self, executor: ActionExecutor, making: ReferenceTasks) -> None:
        # Until the name is known to be ours, its replicas may be another agent's to run.
        await self._named.wait()
        # Before the first list, an engine without a replica is no orphan: we do not know yet.
        await self._replicas.wait_synced()
        for name in self._node.engines:
            self._queue.add(name)

        async def look(name: str) -> Requeue | None:
            seen = await self._look(name, making)
            if seen is None:
                return None
            decided = plan(seen)
            await executor.do(name, seen.replica, decided.actions)
            return (
                None
                if decided.requeue_after_s is None
                else Requeue(after_s=decided.requeue_after_s)
            )

        await run_loop(self._queue, look, transient=(StoreError, OSError))

    async def _look(self, name: str, making: ReferenceTasks) -> ObservedReplica | None:
        """Return what is seen of a replica; None once it is none of ours, and nothing of it is left."""
        there = self._replicas.items.get(keys.spec_key("Replica", name))
        rank = group_launch.rank_of_node(there, self._config.name) if there is not None else None
        replica = there if rank is not None else None
        engine = self._node.engines.get(name)
        uid = replica.metadata.uid if replica is not None else None
        reference, found_reference = making.look(name, uid)
        is_making = reference is ReferenceState.RUNNING
        if not (replica or engine or is_making or name in self._node.published):
            if there is not None and there.spec.formation is not None:
                await self._reports.retract(name)
            self._reports.forget(name)
            self._node.start_errors.pop(name, None)
            return None
        if engine is not None:
            await engine.look(self._parts.health, self._clock)
        is_stopping = engine is not None and engine.stopping_since is not None
        return ObservedReplica(
            replica=replica,
            is_unknown=there is None
            and not is_stopping
            and not await registration.is_replica_deleted(self._transport, name),
            engine=engine.view(self._clock) if engine is not None else None,
            is_published=name in self._node.published,
            is_stale=self._node.is_stale(name),
            start_error=self._start_error(replica),
            reported=await self._reports.said(replica, rank or 0) if replica is not None else None,
            rank=rank or 0,
            used_epoch=self._used_epoch(replica, engine),
            reference=reference,
            found_reference=found_reference,
        )

    def _start_error(self, replica: Replica | None) -> str:
        if replica is None:
            return ""
        return self._node.start_error(replica.name, group_launch.wanted_epoch(replica))

    def _used_epoch(self, replica: Replica | None, engine: EngineTracker | None) -> int:
        """Return the last epoch of which a rank was started here; asked only where no engine says it."""
        if replica is None or replica.spec.formation is None or engine is not None:
            return 0
        return self._parts.engines.last_epoch(replica.name, replica.metadata.uid)

    async def _describe(self, making: ReferenceTasks) -> None:
        """Look at deployed models and write the node's status, whenever either is news."""
        await self._deployments.wait_synced()
        told = ""
        while True:
            self._models_wanted.clear()
            try:
                await self._describe_once(making)
                told, wait_s = "", self._config.inspect_every_s
                if self._parts.is_looking():
                    wait_s = min(wait_s, _SPLIT_POLL_S)
            except NewerDocumentError as error:
                log.warning("status not written", extra={"why": str(error)})
                wait_s = self._config.inspect_every_s
            except StoreError as error:
                if str(error) != told:
                    log.info("status not written yet", extra={"why": str(error)})
                told, wait_s = str(error), 0.5
            try:
                async with asyncio.timeout(wait_s):
                    await self._models_wanted.wait()
            except TimeoutError:
                continue

    async def _describe_once(self, making: ReferenceTasks) -> None:
        sources = [found.spec.model for found in self._deployments.items.values()]
        models_named = {one.path for one in sources} | {
            one.draft.path for one in sources if one.draft
        }
        if self._parts.groups is not None:
            named = self._deployments.items.values()
            models_named |= fallback_models(named, self._parts.groups.items.values())
        adapters_named = {one.adapter for one in sources if one.adapter is not None}
        found = await self._parts.report_models(models_named)
        self._node.learn(found)
        seen = {
            "models": found,
            "adapters": await self._parts.report_adapters(adapters_named),
        }
        status = self._config.status.model_copy(update=seen)
        status = await self._felt(status, making)
        if self._parts.fabric is not None:
            status = await self._parts.fabric.fill(status, self._presence)
        if self._api is not None:
            status = self._api.fill(status)
        await self._presence.describe(status)

    async def _felt(self, status: NodeStatus, making: ReferenceTasks) -> NodeStatus:
        """Return the status with how the machine is."""
        if self._vitals is None:
            return status
        if not self._vitals.is_resumed:
            self._vitals.resume(await self._presence.described())
        # Parts of one machine do not know of each other's engines.
        has_engines = (
            self._config.status.is_part
            or making.is_busy
            or any(engine.process.child.running() for engine in self._node.engines.values())
        )
        undying = [n for n, one in self._node.engines.items() if one.is_undying(self._clock)]
        now = self._clock.monotonic()
        broken = self._node.breakages.look(self._vitals.fabric, undying, now)
        await self._vitals.look(has_engines=has_engines, broken=broken)
        return self._vitals.fill(status)
