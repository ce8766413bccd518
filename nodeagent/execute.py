"""Execution of the agent's actions: engine processes on this node, endpoints and rank status in the store."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, assert_never

from machinery.clock import Clock
from models import inspection
from nodeagent.actions import (
    Action,
    FetchModel,
    ForgetEngine,
    GiveUpEpoch,
    MakeReference,
    ProbeEngine,
    PublishEndpoint,
    ReleaseFetch,
    ReportRank,
    StartEngine,
    StopEngine,
    StopReference,
    WithdrawEndpoint,
)
from nodeagent.engines import engine_processes, group_launch
from nodeagent.engines.engine_processes import EngineOrder, EnginesPort, StoppedError
from nodeagent.engines.references import ReferenceTasks
from nodeagent.node.registration import NodeRegistration
from nodeagent.observe import NodeState, StartError
from nodeagent.replicas.engine_tracker import RESTART_BACKOFF, EngineProber, EngineTracker
from nodeagent.replicas.model_fetches import ModelFetches
from nodeagent.replicas.observation import EngineFault
from nodeagent.status import describe_end
from schemas.deployment import adapter_names
from schemas.formation import EpochSecret
from schemas.kv_cache import KvCache
from schemas.memory import Wired
from schemas.meta import ObjectMeta
from schemas.replica import Endpoint, EndpointHardware, EndpointSpec, RankStatus, Replica
from schemas.sampling import Sampling
from schemas.wire.engine_address import EngineAddress
from schemas.wire.engine_config import EngineConfig, PrefixFile
from store import codec, keys
from store.errors import StoreError, UnavailableError
from store.port import Delete, ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundTasks:
    """Tasks that take long and run beside the control loop."""

    prober: EngineProber
    references: ReferenceTasks
    fetches: ModelFetches | None = None


class ActionExecutor:
    """Executes one action after another; an unreachable store does not stop the local ones."""

    def __init__(
        self,
        node: NodeState,
        processes: EnginesPort,
        presence: NodeRegistration,
        transport: Transport,
        *,
        clock: Clock,
        background: BackgroundTasks,
    ) -> None:
        self._node = node
        self._processes = processes
        self._presence = presence
        self._transport = transport
        self._clock = clock
        self._background = background

    async def execute(self, name: str, replica: Replica | None, actions: Sequence[Action]) -> None:
        """Execute the actions for one replica, all of them even if some fail.

        Raises:
            StoreError: an action on the store failed.
            OSError: the engine could not be started.

        """
        failed: StoreError | OSError | None = None
        for action in actions:
            try:
                await self._execute(name, replica, action)
            except (StoreError, OSError) as error:
                failed = error
        if failed is not None:
            raise failed

    async def _execute(self, name: str, replica: Replica | None, action: Action) -> None:
        log.debug("action decided", extra={"replica": name, "action": type(action).__name__})
        match action:
            case StartEngine():
                assert replica is not None
                await self._start_with_model(replica)
            case StopEngine(kill=kill, fault=fault):
                self._stop(self._node.engines[name], kill=kill, fault=fault)
            case ProbeEngine():
                self._background.prober.start(self._node.engines[name])
            case ForgetEngine():
                self._node.engines.pop(name, None)
            case FetchModel() | ReleaseFetch():
                self._execute_for_fetch(name, replica, action)
            case GiveUpEpoch() | MakeReference() | StopReference():
                self._execute_for_rank(name, replica, action)
            case PublishEndpoint():
                assert replica is not None
                await self._publish(replica)
            case WithdrawEndpoint():
                key = keys.endpoint_key(self._node.name, name)
                current = await self._transport.get(key)
                if current is not None:
                    guard = ModRevisionGuard(key=key, mod_revision=current.mod_revision)
                    await self._transport.commit([guard], [Delete(key=key)])
                self._node.published.pop(name, None)
                log.info("endpoint withdrawn", extra={"replica": name})
            case ReportRank():
                assert replica is not None
                engine = self._node.engines.get(replica.name)
                formation = replica.spec.formation
                restarts = engine.failures if engine is not None else 0
                status = RankStatus(
                    replica_uid=replica.metadata.uid,
                    node=self._node.name,
                    epoch=group_launch.wanted_epoch(replica),
                    golden=action.golden,
                    restarts=restarts if formation is None else formation.epoch - 1,
                    peak_bytes=action.peak_bytes,
                    fetch=action.fetch,
                    conditions=action.conditions,
                )
                await self._node.reports.write(
                    replica, group_launch.rank_of_node(replica, self._node.name) or 0, status
                )
            case _:
                assert_never(action)

    def _execute_for_fetch(
        self, name: str, replica: Replica | None, action: FetchModel | ReleaseFetch
    ) -> None:
        fetches = self._background.fetches
        assert fetches is not None
        match action:
            case FetchModel():
                assert replica is not None
                fetches.start(replica)
            case ReleaseFetch():
                fetches.release(name)
            case _:
                assert_never(action)

    async def _start_with_model(self, replica: Replica) -> None:
        """Start the engine, unless a collection has just removed its model: then it is fetched again."""
        fetches = self._background.fetches
        if fetches is not None:
            if not await fetches.record_load(replica):
                return
            fetches.release(replica.name)
        secret = await self._epoch_secret(replica)
        before = self._node.engines.get(replica.name)
        taken = [engine.process.address for engine in self._node.engines.values()]
        now = self._clock.monotonic()
        order = self._order(replica, secret)
        try:
            process = self._processes.start(order, taken)
        except OSError as error:
            self._record_start_error(replica, error)
            raise
        self._node.start_errors.pop(replica.name, None)
        self._node.starts.remove(replica.name)
        log.info(
            "engine started",
            extra={
                "replica": replica.name,
                "pid": process.child.record.pid,
                "url": process.address.url,
            },
        )
        self._node.engines[replica.name] = EngineTracker(
            process=process,
            started_at=now,
            answered_at=now,
            failures=before.failures if before is not None else 0,
            last_end="" if before is None else describe_end(before.view(self._clock)),
        )

    async def _epoch_secret(self, replica: Replica) -> str:
        """Return the secret of a group's epoch; empty if it is not there, as after a restore: then the rank ends at once."""
        epoch = group_launch.wanted_epoch(replica)
        if not epoch:
            return ""
        item = await self._transport.get(keys.epoch_secret_key(self._node.name, replica.name))
        secret = None if item is None else codec.decode(EpochSecret, item)
        return secret.secret if secret is not None and secret.epoch == epoch else ""

    def _execute_for_rank(
        self,
        name: str,
        replica: Replica | None,
        action: GiveUpEpoch | MakeReference | StopReference,
    ) -> None:
        match action:
            case GiveUpEpoch(epoch_end=epoch_end):
                log.warning(
                    "epoch given up",
                    extra={"replica": name, "reason": epoch_end.reason, "why": epoch_end.message},
                )
                self._node.engines[name].give_up(epoch_end)
                assert replica is not None
                rank = group_launch.rank_of_node(replica, self._node.name)
                cables = replica.spec.ranks[rank].rdma if rank is not None else ()
                devices = [device for names in cables for device in names]
                self._node.leaked.record_devices(devices, self._clock.monotonic())
                if devices:
                    epoch = group_launch.wanted_epoch(replica)
                    self._node.leaked.record_end(name, epoch, epoch_end.message)
            case MakeReference():
                assert replica is not None
                self._background.references.start(self._order(replica))
            case StopReference():
                self._background.references.stop(name)
            case _:
                assert_never(action)

    def _order(self, replica: Replica, secret: str = "") -> EngineOrder:
        """Return the parameters of this node's engine. Raises OSError: its ranks cannot reach each other."""
        rank = group_launch.rank_of_node(replica, self._node.name)
        assert rank is not None
        try:
            wired = self._node.wiring.wired(replica.spec.memory)
            return engine_order(replica, self._node.models_dir, rank, secret, wired=wired)
        except ValueError as error:
            self._record_start_error(replica, error)
            raise OSError(str(error)) from error

    def _record_start_error(self, replica: Replica, error: Exception) -> None:
        """Record why the engine could not be started, and when the next attempt comes."""
        before = self._node.start_error(replica)
        failures = 1 if before is None else before.failures + 1
        delay_s = RESTART_BACKOFF.delay_s(failures, jitter=random.random())
        self._node.start_errors[replica.name] = StartError(
            replica_uid=replica.metadata.uid,
            epoch=group_launch.wanted_epoch(replica),
            message=str(error),
            failures=failures,
            is_stopped=isinstance(error, StoppedError),
            retry_at=self._clock.monotonic() + delay_s,
            retry_time=self._clock.now() + timedelta(seconds=delay_s),
        )

    def _stop(self, engine: EngineTracker, *, kill: bool, fault: EngineFault | None) -> None:
        now = self._clock.monotonic()
        engine.note_stop(now, fault)
        if fault is not None:
            extra = {"replica": engine.process.replica, "reason": fault.reason}
            log.warning("engine is ended", extra={**extra, "why": fault.message})
        if kill:
            log.warning(
                "engine ignored the request to stop; killing it",
                extra={"replica": engine.process.replica},
            )
            engine.note_kill(now)
            engine_processes.kill(engine.process)
        else:
            engine_processes.ask_to_stop(engine.process)

    async def _publish(self, replica: Replica) -> None:
        lease = self._presence.lease
        if lease is None:
            raise UnavailableError("no lease to publish under yet")
        engine = self._node.engines[replica.name]
        millions = await self._node.millions(replica.spec.model.folder)
        address = self._node.advertised(engine.process.address)
        start_s = engine.health.ready_after_s if engine.health is not None else 0.0
        endpoint = new_endpoint(
            replica, self._node, address, EngineTraits(millions=millions, start_s=start_s)
        )
        key = keys.endpoint_key(self._node.name, replica.name)
        put = Put(key=key, value=codec.encode(endpoint), lease=lease)
        # The guard fails if the replica was assigned elsewhere meanwhile.
        try:
            await self._transport.commit([codec.unchanged_guard(replica)], [put])
        except UnavailableError as error:
            if error.ambiguous:
                # It may have been written. None matches no engine, so it is published again, and withdrawn in the end.
                self._node.published[replica.name] = None
            raise
        self._node.published[replica.name] = address
        log.info("endpoint published", extra={"replica": replica.name, "url": endpoint.spec.url})


class EngineTraits(NamedTuple):
    """Properties of an engine that gateways are told besides its replica."""

    millions: int
    """Parameters of its model, in millions; 0 if unknown."""
    start_s: float
    """Seconds in which it started; 0 if unknown."""


def new_endpoint(
    replica: Replica, node: NodeState, address: EngineAddress, engine: EngineTraits
) -> Endpoint:
    """Return the endpoint of the replica's engine for gateways."""
    spec, status = replica.spec, node.status
    return Endpoint(
        metadata=ObjectMeta(name=replica.name, labels=replica.metadata.labels),
        spec=EndpointSpec(
            deployment=spec.deployment,
            replica_uid=replica.metadata.uid,
            node=node.name,
            template=spec.template,
            url=address.url,
            served_names=(*spec.served_names, *adapter_names(spec.served_names, spec.model)),
            site=status.labels.get("site", ""),
            concurrency=spec.concurrency,
            parameters=engine.millions,
            start_seconds=round(engine.start_s, 1),
            hardware=EndpointHardware(
                chip=status.chip, gpu_cores=status.gpu_cores, memory_bytes=status.memory_bytes
            ),
        ),
    )


def engine_order(
    replica: Replica,
    models_dir: Path,
    rank: int = 0,
    secret: str = "",
    *,
    wired: Wired = "Auto",
) -> EngineOrder:
    """Return the parameters of the replica's engine: every field of its spec that an engine takes.

    Raises:
        ValueError: its ranks cannot reach each other.

    """
    spec, model = replica.spec, replica.spec.model
    resolve = partial(inspection.resolve_path, models_dir=models_dir)
    launch, draft = group_launch.group_launch(replica, rank, secret), model.draft
    config = EngineConfig(
        model_dir=resolve(model.folder),
        replica=replica.name,
        replica_uid=replica.metadata.uid,
        served_names=spec.served_names,
        context_length=spec.context_length,
        concurrency=spec.concurrency,
        queue_depth=spec.queue_depth,
        memory_limit_bytes=spec.ranks[rank].memory.total_bytes,
        wired=wired,
        sampling=spec.sampling or Sampling(),
        unknown_parameters=spec.unknown_parameters,
        performance=spec.performance,
        vision=model.vision,
        kv_cache=spec.kv_cache or KvCache(),
        prefixes=tuple(
            PrefixFile(name=prefix.name, path=resolve(prefix.file), tokens=prefix.tokens)
            for prefix in spec.prefixes
        ),
        adapter=None if model.adapter is None else resolve(model.adapter),
        adapters={
            name: resolve(adapter.path)
            for name, adapter in adapter_names(spec.served_names, model).items()
        },
        draft_model=None if draft is None else resolve(draft.path),
        draft_tokens=0 if draft is None else draft.tokens,
        ngram_tokens=0 if model.ngram is None else model.ngram.tokens,
        mtp_tokens=0 if model.mtp is None else model.mtp.tokens,
        group=None if launch is None else launch.group,
    )
    return EngineOrder(config=config, deployment=spec.deployment, launch=launch)
