"""One node's agent: watches the replicas that are assigned to the node, and reconciles each of them."""

import asyncio
import logging

from identity.credentials import no_report
from identity.names import Role
from identity.renewal import Applicant
from identity.upkeep import IdentityUpkeep
from machinery import log_rotation
from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.control_loop import Requeue, WorkQueue, run_loop
from nodeagent.api.blobs import BlobRoutes
from nodeagent.api.cable_listeners import CableListeners
from nodeagent.api.hub_mirror import HubMirrorRoutes
from nodeagent.api.machine_metrics import AgentView
from nodeagent.api.prompt_routes import PromptRoutes
from nodeagent.api.server import AgentApi
from nodeagent.dependencies import AgentConfig, Dependencies, real_dependencies
from nodeagent.description import NodeDescriber
from nodeagent.doctor.readers import CollectionScope
from nodeagent.engines import engine_logs, group_launch
from nodeagent.engines.engine_processes import EngineProcess
from nodeagent.engines.references import ReferenceTasks
from nodeagent.execute import ActionExecutor, BackgroundTasks
from nodeagent.hardware.metal import MetalVerdict
from nodeagent.node.load_report import LoadReport
from nodeagent.node.power import NodePower
from nodeagent.node.registration import NodeRegistration
from nodeagent.observe import NodeState, ReplicaObserver, start_request
from nodeagent.peers.links import link_rate, without_cables
from nodeagent.plan import plan
from nodeagent.replicas.deployment_replicas import StoredSiblings
from nodeagent.replicas.engine_tracker import EngineLife, EngineProber, EngineTracker
from nodeagent.replicas.last_assignment import ALONE_AFTER_S
from nodeagent.replicas.observation import ProbeState
from nodeagent.replicas.rank_reports import RankReports
from schemas.node import NodeFabric, NodeLease
from schemas.replica import Replica
from store import keys
from store.errors import StoreError
from store.events import EventRecorder
from store.metrics import MeasuredTransport, StoreMetrics
from store.port import Transport

log = logging.getLogger(__name__)


class Agent:
    """Runs one node: lease, status, API, and the control loop over its replicas.

    agent = Agent(transport, SystemClock(), config)
    await agent.run()
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        config: AgentConfig,
        dependencies: Dependencies | None = None,
    ) -> None:
        """`dependencies` are those of a real machine unless given."""
        self._store_metrics = StoreMetrics(clock)
        transport = MeasuredTransport(transport, self._store_metrics)
        self._dependencies = dependencies or real_dependencies(transport, clock, config)
        self._transport = transport
        self._clock = clock
        self._config = config
        self._node = NodeState(
            config.name,
            config.status,
            config.models_dir,
            self._dependencies.report_models,
            RankReports(transport, clock, config.name),
        )
        self._node.wiring = self._dependencies.wiring
        self._node.starts.limit = config.start_concurrency
        if self._dependencies.tls is not None:
            self._node.advertised = self._dependencies.tls.advertised
        lease = NodeLease(
            uid=config.status.uid,
            session=config.session,
            has_store_password=config.has_store_password,
            insecure_flags=config.insecure_flags,
        )
        credentials = config.credentials
        tls = no_report if credentials is None else credentials.report
        self._registration = NodeRegistration(
            transport,
            clock,
            node=config.name,
            lease=lease,
            tls=tls,
            check_s=6 * config.inspect_every_s,
        )
        # While etcd is unreachable every reconcile fails at its end; engines must be tended all the same.
        self._queue: WorkQueue[str] = WorkQueue(clock, Backoff(first_s=0.05, limit_s=1.0))
        self._replicas = self._dependencies.replicas
        self._recorder = EventRecorder(transport, clock, source=f"Node/{config.name}")
        self._describer = NodeDescriber(
            config,
            self._dependencies,
            self._node,
            self._registration,
            clock,
            self._recorder,
        )
        self._registered = asyncio.Event()
        self._upkeep = self._new_upkeep()
        self._api = self._new_api(config.api_port) if config.api_port is not None else None

    def _new_api(self, port: int) -> AgentApi:
        config, blobs = self._config, self._blob_routes()
        view = AgentView(
            name=config.name,
            status=config.status,
            clock=self._clock,
            started_at=self._clock.monotonic(),
            engines=self._node.engines,
            replicas=self._replicas,
            has_lease=lambda: self._registration.lease is not None,
            folder=config.state_dir / "engines",
            ring=config.ring,
            tls=self._dependencies.tls,
            collector=self._dependencies.collector,
            pulls=self._dependencies.pulls,
            quantizations=self._dependencies.quantizations,
            more=tuple(
                one
                for one in (
                    self._store_metrics,
                    self._upkeep,
                    self._dependencies.fetches,
                    self._dependencies.load,
                )
                if one is not None
            ),
            load=self._dependencies.load,
            blobs=blobs,
            prompts=self._prompt_routes(),
            mirror=HubMirrorRoutes(blobs) if blobs is not None and config.serves_hub else None,
            scope=CollectionScope(
                models_dir=config.models_dir,
                engine_folders=(config.state_dir / "engines",),
                engine_ports=config.addresses.ports,
                api_port=port or None,
                metal=self._metal_verdict,
            ),
        )
        return AgentApi(
            view,
            self._transport,
            port=port,
            on_change=self._describer.request,
            security=config.api_security,
            credentials=config.credentials,
        )

    def _blob_routes(self) -> BlobRoutes | None:
        """Return the route of the files for other agents; None if this one shares none."""
        fetches = self._dependencies.fetches
        if fetches is None or fetches.exchange is None:
            return None
        uploads = fetches.exchange.uploads
        uploads.is_busy = self._is_generating
        uploads.link_rate = lambda address: link_rate(self._describer.fabric, address)
        return BlobRoutes(
            node=self._config.name,
            store=fetches.store,
            uploads=uploads,
            piece_lists=fetches.exchange.piece_lists,
        )

    def _prompt_routes(self) -> PromptRoutes | None:
        """Return the route of the prompts for other agents; None if this one cannot prove its identity."""
        if self._dependencies.warmup is None:
            return None
        return PromptRoutes(
            node=self._config.name,
            siblings=StoredSiblings(self._transport),
            engines=self._node.engines,
            tls=self._dependencies.tls,
        )

    def _is_generating(self) -> bool:
        return any(engine.is_generating for engine in self._node.engines.values())

    async def _metal_verdict(self) -> MetalVerdict | None:
        """Return the preflight's last result; None before it, and where there is no Metal."""
        metal = self._dependencies.metal
        return None if metal is None else metal.verdict

    def _new_upkeep(self) -> IdentityUpkeep | None:
        """Return the upkeep of the node's certificate; None without a folder for it."""
        config = self._config
        if config.identity_folder is None:
            return None
        applicant = Applicant(
            role=Role.NODE, name=config.name, hardware_uuid=config.status.hardware_uuid
        )
        return IdentityUpkeep(
            self._transport, self._clock, config.identity_folder, applicant, config.credentials
        )

    async def run(self) -> None:
        """Run forever. Engines are stopped only when the store says so, never because the agent ends.

        Raises:
            NameTakenError: another live agent has the node's name.

        """
        dependencies = self._dependencies
        dependencies.references.sweep()
        for process in dependencies.engines.find():
            self._adopt(process)
        self._replicas.on_change(self._replica_changed)
        dependencies.uses.on_change(lambda _: self._describer.request())
        try:
            async with asyncio.TaskGroup() as group:
                references = ReferenceTasks(dependencies.references, group)
                if self._config.credentials is not None:
                    self._config.credentials.on_change(self._trust_changed)
                if self._upkeep is not None:
                    group.create_task(self._upkeep.run())
                group.create_task(self._replicas.run())
                group.create_task(dependencies.uses.run())
                if dependencies.snapshots is not None:
                    dependencies.snapshots.on_change(lambda _: self._describer.request())
                    group.create_task(dependencies.snapshots.run())
                self._run_model_store(group)
                group.create_task(
                    self._registration.keep(self._new_session, ttl_s=self._config.lease_s)
                )
                group.create_task(self._describer.run(references, self._api))
                group.create_task(self._new_power(references).run())
                load, preflight = self._dependencies.load, self._dependencies.metal
                if load is not None:
                    group.create_task(load.run())
                    report = LoadReport(
                        self._transport, self._clock, node=self._config.name, latest=load.latest
                    )
                    group.create_task(report.run(lambda: self._registration.lease))
                if preflight is not None:
                    group.create_task(preflight.run(self._describer.request))
                if dependencies.fabric is not None:
                    group.create_task(
                        dependencies.fabric.run(self._registration, self._describer.request)
                    )
                if self._api is not None:
                    group.create_task(self._api.run())
                engines = self._config.state_dir / "engines"
                group.create_task(
                    log_rotation.keep_bounded(lambda: engine_logs.rotate_all(engines), self._clock)
                )
                group.create_task(self._run_loop(references, group))
        finally:
            await dependencies.health.close()
            if dependencies.warmup is not None:
                await dependencies.warmup.engines.close()

    def _new_power(self, references: ReferenceTasks) -> NodePower:
        """Return the follower of the leader's orders to sleep and wake."""
        parts = self._dependencies
        return NodePower(
            transport=self._transport,
            clock=self._clock,
            node=self._config.name,
            registration=self._registration,
            recorder=self._recorder,
            send=parts.send_packets,
            work=lambda: self._work(references),
            keeps_awake=lambda: bool(self._node.engines) or bool(self._assigned()),
            announce=self._describer.announce,
            on_wake=self._on_wake,
            sleeper=parts.sleeper,
            assertion=parts.assertion,
        )

    def _on_wake(self) -> None:
        """Bring every endpoint back, after a first token: the GPU was without power."""
        for engine in self._node.engines.values():
            if engine.rank is None and engine.probe is ProbeState.PASSED:
                engine.probe = ProbeState.NOT_TRIED
        self._new_session()

    def _work(self, references: ReferenceTasks) -> str:
        """Return what the machine must not sleep for; empty if nothing."""
        parts, engines = self._dependencies, self._node.engines.values()
        running = [engine for engine in engines if engine.process.child.running()]
        work = {
            "its owner uses it": self._describer.is_owner_present,
            "an engine generates": any(engine.is_generating for engine in running),
            "an engine starts or ends": any(e.life is not EngineLife.READY for e in running),
            "a group's answer is computed": references.is_busy,
            "a model is fetched": any(
                p is not None and p.is_busy for p in (parts.fetches, parts.pulls)
            ),
            "a model is quantized": parts.quantizations is not None and parts.quantizations.is_busy,
        }
        return next((name for name, is_so in work.items() if is_so), "")

    def _run_model_store(self, group: asyncio.TaskGroup) -> None:
        parts = self._dependencies
        for part in (
            parts.fetches,
            parts.pulls,
            parts.quantizations,
            parts.limits,
            parts.prefixes,
            parts.collector,
        ):
            if part is not None:
                group.create_task(part.run())
        if parts.preloads is not None:
            group.create_task(parts.preloads.run(self._describer.request))
        api, exchange = self._api, None if parts.fetches is None else parts.fetches.exchange
        if exchange is not None and api is not None:
            config, blobs = self._config, self._blob_routes()
            assert blobs is not None
            assert config.credentials is not None
            cables = CableListeners(
                blobs=blobs,
                credentials=config.credentials,
                clock=self._clock,
                address=config.status.address,
                port=config.api_port or 0,
                fabric=self._file_networks,
            )
            exchange.cable_urls, exchange.share.fabric = cables.urls, cables.fabric
            group.create_task(cables.run())
            group.create_task(exchange.run(lambda: self._registration.lease, lambda: api.tls_url))

    def _file_networks(self) -> NodeFabric:
        """Return the networks for files: the cables are those of a shard group while one of its ranks runs here."""
        fabric = self._describer.fabric
        has_rank = any(engine.process.epoch for engine in self._node.engines.values())
        return without_cables(fabric) if has_rank else fabric

    def _adopt(self, found: EngineProcess) -> None:
        now = self._clock.monotonic()
        engine = EngineTracker(process=found, started_at=now, answered_at=now, is_adopted=True)
        self._node.engines[found.replica] = engine
        log.info("engine adopted", extra={"replica": found.replica, "pid": found.child.record.pid})

    def _replica_changed(self, key: str) -> None:
        self._queue.add(key.removeprefix(keys.spec_prefix("Replica")))
        replica = self._replicas.items.get(key)
        if replica is not None and self._is_ours(replica):
            # Before any of those that came together is reconciled: the one that comes first may have to wait.
            request = start_request(self._node, self._dependencies, replica)
            if request is not None:
                self._node.starts.add(request)

    def _trust_changed(self) -> None:
        """Look at every endpoint: the fleet's TLS mode decides how gateways dial engines."""
        for name in self._node.engines:
            self._queue.add(name)

    def _new_session(self) -> None:
        """Publish everything again: all our keys in the store depend on the lease."""
        self._node.published.clear()
        self._describer.request()
        self._registered.set()
        if self._replicas.synced:
            for name in sorted({*self._node.engines, *self._assigned()}):
                self._queue.add(name)

    def _assigned(self) -> list[str]:
        return [r.name for r in self._replicas.items.values() if self._is_ours(r)]

    def _is_ours(self, replica: Replica) -> bool:
        return group_launch.rank_of_node(replica, self._config.name) is not None

    async def _run_loop(self, references: ReferenceTasks, group: asyncio.TaskGroup) -> None:
        observer = ReplicaObserver(
            self._node, self._dependencies, references, self._transport, self._clock
        )
        executor = ActionExecutor(
            self._node,
            self._dependencies.engines,
            self._registration,
            self._transport,
            clock=self._clock,
            background=BackgroundTasks(
                prober=self._prober(group),
                references=references,
                fetches=self._dependencies.fetches,
            ),
        )
        await self._wait_for_assignment(group)

        async def reconcile(name: str) -> Requeue | None:
            seen = await observer.observe(name)
            if seen is None:
                return None
            step = plan(seen)
            await executor.execute(name, seen.replica, step.actions)
            after_s = step.requeue_after_s
            return None if after_s is None else Requeue(after_s=after_s)

        await run_loop(self._queue, reconcile, transient=(StoreError, OSError))

    def _prober(self, group: asyncio.TaskGroup) -> EngineProber:
        warmup = self._dependencies.warmup
        warm = None if warmup is None else warmup.warm
        return EngineProber(self._dependencies.health, group, self._clock, warm)

    async def _wait_for_assignment(self, group: asyncio.TaskGroup) -> None:
        """Wait until the store tells what is assigned; if it does not answer, serve what was assigned last."""
        if self._dependencies.metal is not None:
            await self._dependencies.metal.wait()
        store = group.create_task(self._wait_for_store())
        last = self._dependencies.last_assignment
        if last is not None:
            await asyncio.wait((store,), timeout=ALONE_AFTER_S)
            if not store.done() and last.stand_alone():
                return
        await store

    async def _wait_for_store(self) -> None:
        # Until the name is registered, its replicas may be another agent's to run.
        await self._registered.wait()
        # Before the cache is synced, an engine without a replica is not yet known to be an orphan.
        await self._replicas.wait_synced()
        # They have the priorities by which engines start.
        await self._dependencies.uses.wait_synced()
        if self._dependencies.limits is not None:
            await self._dependencies.limits.is_applied.wait()
        for name in self._node.engines:
            self._queue.add(name)
