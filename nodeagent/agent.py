"""Wires one node's caches, lease, engines and loop together."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.loop import Again, run_loop
from machinery.workqueue import WorkQueue
from nodeagent import models, restoring
from nodeagent.engines import EngineProcess, Engines
from nodeagent.execute import Executor, Node
from nodeagent.hardware.machine import Machine
from nodeagent.health import HealthClient
from nodeagent.local import Engine, Prober
from nodeagent.observe import LocalState
from nodeagent.parts import Parts
from nodeagent.plan import plan
from nodeagent.presence import LEASE_TTL_S, Presence
from nodeagent.vitals import Vitals
from schemas.deployment import ModelDeployment
from schemas.node import AdapterReport, ModelReport, NodeStatus
from schemas.replica import RankStatus, Replica
from store import codec, keys
from store.cache.informer import Informer
from store.codec import NewerDocumentError, UndecodableError
from store.errors import StoreError
from store.port import Transport

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


def real_parts(transport: Transport, clock: Clock, config: AgentConfig) -> Parts:
    """Return what an agent works with on a real Mac."""

    async def report_models(paths: set[str]) -> tuple[ModelReport, ...]:
        return await asyncio.to_thread(
            models.report_all,
            paths,
            config.models_dir,
            casts_to_float32=config.casts_to_float32,
        )

    async def report_adapters(paths: set[str]) -> tuple[AdapterReport, ...]:
        return await asyncio.to_thread(
            models.report_all_adapters,
            paths,
            config.models_dir,
            casts_to_float32=config.casts_to_float32,
        )

    return Parts(
        engines=Engines(
            config.state_dir / "engines",
            node=config.name,
            host=config.engine_host,
            first_port=config.first_port,
        ),
        health=HealthClient(config.engine_host),
        report_models=report_models,
        report_adapters=report_adapters,
        replicas=Informer(
            transport,
            keys.spec_prefix("Replica"),
            lambda item: codec.decode_object(Replica, item),
            clock,
        ),
        deployments=Informer(
            transport,
            keys.spec_prefix("ModelDeployment"),
            lambda item: codec.decode_object(ModelDeployment, item),
            clock,
        ),
        readings=Machine(config.models_dir),
    )


class Agent:
    """One node: looks at what is assigned to it, and makes it so."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        config: AgentConfig,
        parts: Parts | None = None,
    ) -> None:
        self._parts = parts or real_parts(transport, clock, config)
        self._transport = transport
        self._clock = clock
        self._config = config
        self._node = Node(config.name, config.status, config.models_dir, self._parts.report_models)
        self._presence = Presence(
            transport, clock, node=config.name, uid=config.status.uid, session=config.session
        )
        # While etcd is away every look fails at its end; engines must be tended all the same.
        self._queue: WorkQueue[str] = WorkQueue(clock, Backoff(first_s=0.05, limit_s=1.0))
        self._replicas, self._deployments = self._parts.replicas, self._parts.deployments
        readings = self._parts.readings
        # Looks at models come in bursts; the machine need not be asked at each.
        every_s = config.inspect_every_s / 2
        self._vitals = Vitals(readings, clock, every_s=every_s) if readings is not None else None
        self._models_wanted = asyncio.Event()
        self._named = asyncio.Event()

    async def run(self) -> None:
        """Run for ever. Ends engines only when told so by the store, never because it ends."""
        for found in self._parts.engines.find():
            self._adopt(found)
        self._replicas.on_change(self._replica_changed)
        self._deployments.on_change(lambda _: self._models_wanted.set())
        try:
            async with asyncio.TaskGroup() as group:
                executor = Executor(
                    self._node,
                    self._parts.engines,
                    self._presence,
                    self._transport,
                    clock=self._clock,
                    prober=Prober(self._parts.health, group, self._clock),
                )
                group.create_task(self._replicas.run())
                group.create_task(self._deployments.run())
                group.create_task(
                    self._presence.keep(self._new_session, ttl_s=self._config.lease_s)
                )
                group.create_task(self._describe())
                group.create_task(self._tend(executor))
        finally:
            await self._parts.health.close()

    def _adopt(self, found: EngineProcess) -> None:
        now = self._clock.monotonic()
        self._node.engines[found.replica] = Engine(process=found, started_at=now, heard_at=now)
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
        return any(rank.node == self._config.name for rank in replica.spec.ranks)

    async def _tend(self, executor: Executor) -> None:
        # Until the name is known to be ours, its replicas may be another agent's to run.
        await self._named.wait()
        # Before the first list, an engine without a replica is no orphan: we do not know yet.
        await self._replicas.wait_synced()
        for name in self._node.engines:
            self._queue.add(name)

        async def look(name: str) -> Again | None:
            return await self._reconcile(name, executor)

        await run_loop(self._queue, look, transient=(StoreError, OSError))

    async def _reconcile(self, name: str, executor: Executor) -> Again | None:
        key = keys.spec_key("Replica", name)
        replica = self._replicas.items.get(key)
        if replica is not None and not self._is_ours(replica):
            replica = None
        engine = self._node.engines.get(name)
        if replica is None and engine is None and name not in self._node.published:
            self._node.reported.pop(name, None)
            self._node.muted.discard(name)
            self._node.unread.discard(name)
            self._node.start_errors.pop(name, None)
            return None
        if engine is not None:
            await engine.look(self._parts.health, self._clock)
        is_stopping = engine is not None and engine.stopping_since is not None
        is_absent = self._replicas.items.get(key) is None
        seen = LocalState(
            replica=replica,
            is_unknown=is_absent
            and not is_stopping
            and not await restoring.is_gone(self._transport, name),
            engine=engine.view(self._clock) if engine is not None else None,
            is_published=name in self._node.published,
            is_stale=self._node.is_stale(name),
            start_error=self._node.start_errors.get(name, ""),
            reported=await self._reported(name) if replica is not None else None,
        )
        decided = plan(seen)
        await executor.do(name, replica, decided.actions)
        return None if decided.look_again_s is None else Again(after_s=decided.look_again_s)

    async def _reported(self, name: str) -> RankStatus | None:
        """Return what we last said; asked of the store once, after a restart of ours."""
        if name not in self._node.reported:
            try:
                there = await self._transport.get(keys.rank_key(self._config.name, name, 0))
            except StoreError:
                self._node.unread.add(name)
                return None
            was_muted = name in self._node.muted
            self._node.muted.discard(name)
            self._node.unread.discard(name)
            if there is not None:
                try:
                    self._node.reported[name] = codec.decode(RankStatus, there)
                except NewerDocumentError as error:
                    self._node.muted.add(name)
                    if not was_muted:
                        log.warning("rank not reported", extra={"why": str(error)})
                except UndecodableError:
                    return None  # somebody wrote it by hand: say anew what is so
        return self._node.reported.get(name)

    async def _describe(self) -> None:
        """Look at deployed models and write the node's status, whenever either is news."""
        await self._deployments.wait_synced()
        told = ""
        while True:
            self._models_wanted.clear()
            try:
                await self._describe_once()
                told, wait_s = "", self._config.inspect_every_s
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

    async def _describe_once(self) -> None:
        sources = [found.spec.model for found in self._deployments.items.values()]
        models_named = {one.path for one in sources} | {
            one.draft.path for one in sources if one.draft
        }
        adapters_named = {one.adapter for one in sources if one.adapter is not None}
        found = await self._parts.report_models(models_named)
        self._node.learn(found)
        seen = {
            "models": found,
            "adapters": await self._parts.report_adapters(adapters_named),
        }
        status = self._config.status.model_copy(update=seen)
        await self._presence.describe(await self._felt(status))

    async def _felt(self, status: NodeStatus) -> NodeStatus:
        """Return the status with how the machine is."""
        if self._vitals is None:
            return status
        if not self._vitals.is_resumed:
            self._vitals.resume(await self._presence.described())
        # Parts of one machine do not know of each other's engines.
        has_engines = self._config.status.is_part or any(
            engine.process.child.running() for engine in self._node.engines.values()
        )
        await self._vitals.look(has_engines=has_engines)
        return self._vitals.fill(status)
