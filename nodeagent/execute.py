"""Carries out the agent's actions: engine processes here, endpoint and rank status in the store."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from machinery.clock import Clock
from models import inspection
from nodeagent.actions import (
    Action,
    ForgetEngine,
    GiveUpEpoch,
    MakeReference,
    ProbeEngine,
    PublishEndpoint,
    ReportRank,
    StartEngine,
    StopEngine,
    StopReference,
    WithdrawEndpoint,
)
from nodeagent.dependencies import EnginesPort, ReportModels
from nodeagent.engines import engine_processes, group_launch
from nodeagent.engines.engine_processes import EngineOrder
from nodeagent.engines.references import ReferenceTasks
from nodeagent.node.machine_conditions import LeakedResources
from nodeagent.node.registration import NodeRegistration
from nodeagent.replicas.engine_tracker import EngineProber, EngineTracker
from nodeagent.replicas.rank_reports import RankReports
from schemas import quantity
from schemas.deployment import KvCache
from schemas.meta import ObjectMeta
from schemas.node import ModelReport, NodeStatus
from schemas.replica import Endpoint, EndpointHardware, EndpointSpec, RankStatus, Replica
from store import codec, keys
from store.errors import StoreError, UnavailableError
from store.port import Delete, ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartError:
    """Why an engine could not be started."""

    epoch: int
    """The epoch of its group; 0 where there is one rank."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundTasks:
    """What takes long, and runs beside the loop."""

    prober: EngineProber
    references: ReferenceTasks


class NodeState:
    """What the executor acts on: this node's engines, and what of them is in the store."""

    def __init__(
        self,
        name: str,
        status: NodeStatus,
        models_dir: Path,
        report_models: ReportModels,
        reports: RankReports,
    ) -> None:
        """`status`: what the machine is; `report_models` looks at models that nobody has looked at yet."""
        self.name = name
        self.status = status
        self.models_dir = models_dir
        self.reports = reports
        self._report_models = report_models
        self._millions: dict[str, int] = {}
        self.engines: dict[str, EngineTracker] = {}
        self.published: dict[str, int] = {}
        """The ports that our endpoints in the store lead to, by replica name."""
        self.breakages = LeakedResources()
        self.start_errors: dict[str, StartError] = {}
        """Why engines could not be started, by replica name."""

    def learn(self, reports: Iterable[ModelReport]) -> None:
        """Remember how large models are."""
        for report in reports:
            if report.geometry is not None:
                count = report.geometry.parameters
                self._millions[report.path] = max(1, round(count / 1e6)) if count else 0

    async def millions(self, path: str) -> int:
        """Return how many million weights the model has; 0 if nobody counted.

        An agent that was started again publishes what it adopts before it has looked at models, and what is
        published once is not written again.
        """
        if path not in self._millions:
            self.learn(await self._report_models({path}))
        return self._millions.get(path, 0)

    def start_error(self, name: str, epoch: int) -> str:
        """Return why the engine could not be started; of another epoch it says nothing."""
        found = self.start_errors.get(name)
        return found.message if found is not None and found.epoch == epoch else ""

    def is_stale(self, name: str) -> bool:
        """Return whether the published endpoint leads to an earlier engine than there is now."""
        published, engine = self.published.get(name), self.engines.get(name)
        return published is not None and (engine is None or engine.process.port != published)


class ActionExecutor:
    """Does one action after the other; the store being away stops none of the local ones."""

    def __init__(
        self,
        node: NodeState,
        processes: EnginesPort,
        presence: NodeRegistration,
        transport: Transport,
        *,
        clock: Clock,
        beside: BackgroundTasks,
    ) -> None:
        self._node = node
        self._processes = processes
        self._presence = presence
        self._transport = transport
        self._clock = clock
        self._beside = beside

    async def do(self, name: str, replica: Replica | None, actions: Sequence[Action]) -> None:
        """Carry out the actions for one replica.

        Raises:
            StoreError: what concerned the store could not be done; the rest was.
            OSError: the engine could not be started; the rest was done.

        """
        failed: StoreError | OSError | None = None
        for action in actions:
            try:
                await self._do(name, replica, action)
            except (StoreError, OSError) as error:
                failed = error
        if failed is not None:
            raise failed

    async def _do(self, name: str, replica: Replica | None, action: Action) -> None:
        match action:
            case StartEngine():
                assert replica is not None
                self._start(replica)
            case StopEngine(kill=kill):
                self._stop(self._node.engines[name], kill=kill)
            case ProbeEngine():
                self._beside.prober.start(self._node.engines[name])
            case ForgetEngine():
                self._node.engines.pop(name, None)
            case GiveUpEpoch() | MakeReference() | StopReference():
                self._do_of_rank(name, replica, action)
            case PublishEndpoint():
                assert replica is not None
                await self._publish(replica)
            case WithdrawEndpoint():
                await self._withdraw(name)
            case ReportRank():
                assert replica is not None
                await self._report(replica, action)
            case _:
                assert_never(action)

    def _do_of_rank(
        self,
        name: str,
        replica: Replica | None,
        action: GiveUpEpoch | MakeReference | StopReference,
    ) -> None:
        match action:
            case GiveUpEpoch(over=over):
                log.warning(
                    "epoch given up",
                    extra={"replica": name, "reason": over.reason, "why": over.message},
                )
                self._node.engines[name].give_up(over)
                assert replica is not None
                rank = group_launch.rank_of_node(replica, self._node.name)
                cables = replica.spec.ranks[rank].rdma if rank is not None else ()
                devices = [device for towards in cables for device in towards]
                self._node.breakages.ended_badly(devices, self._clock.monotonic())
            case MakeReference():
                assert replica is not None
                self._beside.references.start(self._order(replica))
            case StopReference():
                self._beside.references.stop(name)
            case _:
                assert_never(action)

    def _start(self, replica: Replica) -> None:
        before = self._node.engines.get(replica.name)
        taken = [engine.process.port for engine in self._node.engines.values()]
        now = self._clock.monotonic()
        order = self._order(replica)
        try:
            process = self._processes.start(order, taken)
        except OSError as error:
            self._note(replica, error)
            raise
        self._node.start_errors.pop(replica.name, None)
        log.info(
            "engine started",
            extra={"replica": replica.name, "pid": process.child.record.pid, "port": process.port},
        )
        self._node.engines[replica.name] = EngineTracker(
            process=process,
            started_at=now,
            heard_at=now,
            failures=before.failures if before is not None else 0,
        )

    def _order(self, replica: Replica) -> EngineOrder:
        """Return what this node's engine is started with. Raises OSError: its ranks cannot meet."""
        rank = group_launch.rank_of_node(replica, self._node.name)
        assert rank is not None
        try:
            return engine_order(replica, self._node.models_dir, rank)
        except ValueError as error:
            self._note(replica, error)
            raise OSError(str(error)) from error

    def _note(self, replica: Replica, error: Exception) -> None:
        """Remember why the engine could not be started."""
        noted = StartError(epoch=group_launch.wanted_epoch(replica), message=str(error))
        self._node.start_errors[replica.name] = noted

    def _stop(self, engine: EngineTracker, *, kill: bool) -> None:
        if engine.stopping_since is None:
            engine.stopping_since = self._clock.monotonic()
        if kill:
            log.warning(
                "engine ignored the request to stop; killing it",
                extra={"replica": engine.process.replica},
            )
            if engine.killed_at is None:
                engine.killed_at = self._clock.monotonic()
            engine_processes.kill(engine.process)
        else:
            engine_processes.ask_to_stop(engine.process)

    async def _publish(self, replica: Replica) -> None:
        lease = self._presence.lease
        if lease is None:
            raise UnavailableError("no lease to publish under yet")
        engine = self._node.engines[replica.name]
        millions = await self._node.millions(replica.spec.model.path)
        endpoint = new_endpoint(replica, self._node, engine.process.port, millions)
        key = keys.endpoint_key(self._node.name, replica.name)
        put = Put(key=key, value=codec.encode(endpoint), lease=lease)
        # If the replica was assigned elsewhere meanwhile, it is not ours to publish.
        try:
            await self._transport.commit([codec.unchanged_guard(replica)], [put])
        except UnavailableError as error:
            if error.ambiguous:
                # It may be there: port 0 is nobody's, so it is published again, and withdrawn in the end.
                self._node.published[replica.name] = 0
            raise
        self._node.published[replica.name] = engine.process.port
        log.info("endpoint published", extra={"replica": replica.name, "url": endpoint.spec.url})

    async def _withdraw(self, name: str) -> None:
        key = keys.endpoint_key(self._node.name, name)
        there = await self._transport.get(key)
        if there is not None:
            guard = ModRevisionGuard(key=key, mod_revision=there.mod_revision)
            await self._transport.commit([guard], [Delete(key=key)])
        self._node.published.pop(name, None)
        log.info("endpoint withdrawn", extra={"replica": name})

    async def _report(self, replica: Replica, report: ReportRank) -> None:
        engine = self._node.engines.get(replica.name)
        formation = replica.spec.formation
        restarts = engine.failures if engine is not None else 0
        status = RankStatus(
            replica_uid=replica.metadata.uid,
            node=self._node.name,
            epoch=group_launch.wanted_epoch(replica),
            golden=report.golden,
            restarts=restarts if formation is None else formation.epoch - 1,
            peak_bytes=report.peak_bytes,
            conditions=report.conditions,
        )
        await self._node.reports.write(
            replica, group_launch.rank_of_node(replica, self._node.name) or 0, status
        )


def new_endpoint(replica: Replica, node: NodeState, port: int, millions: int) -> Endpoint:
    """Return what gateways are told of the replica's engine, which listens on the port."""
    spec, status = replica.spec, node.status
    return Endpoint(
        metadata=ObjectMeta(name=replica.name, labels=replica.metadata.labels),
        spec=EndpointSpec(
            deployment=spec.deployment,
            replica_uid=replica.metadata.uid,
            node=node.name,
            template=spec.template,
            url=f"http://{status.address}:{port}",
            served_names=spec.served_names,
            site=status.labels.get("site", ""),
            concurrency=spec.concurrency,
            parameters=millions,
            hardware=EndpointHardware(
                chip=status.chip, gpu_cores=status.gpu_cores, memory_bytes=status.memory_bytes
            ),
        ),
    )


def engine_order(replica: Replica, models_dir: Path, rank: int = 0) -> EngineOrder:
    """Return what the replica's engine is started with: every field of its spec that an engine can be told.

    Raises:
        ValueError: its ranks cannot meet.

    """
    spec, model = replica.spec, replica.spec.model
    kept = spec.kv_cache or KvCache()
    draft = model.draft
    return EngineOrder(
        replica=replica.name,
        replica_uid=replica.metadata.uid,
        model_dir=inspection.resolve_path(model.path, models_dir),
        served_names=spec.served_names,
        context_length=spec.context_length,
        concurrency=spec.concurrency,
        memory_limit_bytes=spec.ranks[rank].memory.total_bytes,
        queue_depth=spec.queue_depth,
        kv_bits=kept.bits,
        kv_window=kept.window,
        prefix_cache_bytes=None if kept.prefix_bytes is None else quantity.parse(kept.prefix_bytes),
        adapter=None
        if model.adapter is None
        else inspection.resolve_path(model.adapter, models_dir),
        draft_model=None if draft is None else inspection.resolve_path(draft.path, models_dir),
        draft_tokens=None if draft is None else draft.tokens,
        group=group_launch.group_order(replica, rank),
    )
