"""Observation of one replica on this node, and the state that the agent keeps between observations."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from machinery.clock import Clock
from nodeagent.dependencies import Dependencies, ReportModels
from nodeagent.engines import group_launch
from nodeagent.engines.references import ReferenceState, ReferenceTasks
from nodeagent.engines.wired_memory import WiringPolicy
from nodeagent.node import registration
from nodeagent.node.leaked_resources import LeakedResources
from nodeagent.replicas.engine_tracker import EngineTracker
from nodeagent.replicas.observation import (
    FetchState,
    NextStart,
    ObservedFetch,
    ObservedReplica,
)
from nodeagent.replicas.rank_reports import RankReports
from nodeagent.replicas.start_queue import StartQueue, StartRequest
from schemas.node import ModelReport, NodeStatus
from schemas.replica import Replica
from schemas.wire.engine_address import EngineAddress
from store import keys
from store.port import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class StartError:
    """The error of an engine that could not be started."""

    replica_uid: str
    epoch: int
    """The epoch of its group; 0 for an engine that has the whole model."""
    message: str
    failures: int
    """Consecutive failures to start it."""
    is_stopped: bool
    """True if an order stopped the engines of this Mac: the replica stays."""
    retry_at: float
    """The next attempt, on the monotonic clock."""
    retry_time: datetime
    """The same time on the wall clock."""

    def next_start(self, now: float) -> NextStart | None:
        """Return the next attempt; None if it is due."""
        left_s = self.retry_at - now
        return NextStart(in_s=left_s, at=self.retry_time) if left_s > 0 else None


class NodeState:
    """The state of this node that observation and execution share: its engines, and what of them is in the store."""

    def __init__(
        self,
        name: str,
        status: NodeStatus,
        models_dir: Path,
        report_models: ReportModels,
        reports: RankReports,
    ) -> None:
        """`status` holds the machine's facts; `report_models` inspects models that were not inspected yet."""
        self.name = name
        self.status = status
        self.models_dir = models_dir
        self.reports = reports
        self._report_models = report_models
        self._millions: dict[str, int] = {}
        self.engines: dict[str, EngineTracker] = {}
        """Engines by replica name."""
        self.published: dict[str, EngineAddress | None] = {}
        """The addresses of our endpoints in the store, by replica name; None if it is not known what was written."""
        self.advertised: Callable[[EngineAddress], EngineAddress] = lambda address: address
        """Returns the address of an engine as gateways shall dial it."""
        self.leaked = LeakedResources()
        self.wiring = WiringPolicy()
        self.start_errors: dict[str, StartError] = {}
        """Errors of engines that could not be started, by replica name."""
        self.starts = StartQueue()
        """The engines that wait to load."""

    def learn(self, reports: Iterable[ModelReport]) -> None:
        """Record the sizes of models."""
        for report in reports:
            if report.geometry is not None:
                count = report.geometry.parameters
                self._millions[report.path] = max(1, round(count / 1e6)) if count else 0

    async def millions(self, path: str) -> int:
        """Return the model's parameters in millions; 0 if unknown.

        An agent that was restarted publishes the engines that it adopts before it has inspected models, and a published
        endpoint is not written again.
        """
        if path not in self._millions:
            self.learn(await self._report_models({path}))
        return self._millions.get(path, 0)

    def start_error(self, replica: Replica) -> StartError | None:
        """Return why the engine of this very replica and epoch could not be started; None if it could."""
        error = self.start_errors.get(replica.name)
        wanted = (replica.metadata.uid, group_launch.wanted_epoch(replica))
        is_current = error is not None and (error.replica_uid, error.epoch) == wanted
        return error if is_current else None

    def is_stale(self, name: str) -> bool:
        """Return whether the published endpoint leads to an earlier engine than the current one."""
        if name not in self.published:
            return False
        engine, published = self.engines.get(name), self.published[name]
        if engine is None or published is None:
            return True
        return engine.process.address._replace(node="") != published._replace(node="")

    def is_outdated(self, name: str) -> bool:
        """Return whether gateways shall dial the engine in another way than the published endpoint says."""
        engine, published = self.engines.get(name), self.published.get(name)
        if engine is None or published is None:
            return False
        return self.advertised(engine.process.address) != published

    def forget(self, name: str) -> None:
        """Drop the state of a replica that has no engine here any more."""
        self.reports.forget(name)
        self.start_errors.pop(name, None)
        self.starts.remove(name)


def start_request(
    node: NodeState, dependencies: Dependencies, replica: Replica
) -> StartRequest | None:
    """Return the request of a replica whose engine has the whole model and should be started; None for any other."""
    engine = node.engines.get(replica.name)
    is_wanted = replica.metadata.deletion_timestamp is None and replica.spec.formation is None
    if not is_wanted or (engine is not None and engine.process.child.running()):
        return None
    use = dependencies.uses.items.get(replica.spec.deployment)
    tail = replica.name.rpartition("-")[2]
    return StartRequest(
        replica=replica.name,
        priority=use.priority if use is not None else 0,
        restarts=engine.failures if engine is not None else 0,
        created_at=replica.metadata.creation_timestamp,
        ordinal=int(tail) if tail.isdigit() else 0,
    )


def engine_runs(engine: EngineTracker | None) -> bool:
    """Return whether the replica has an engine process."""
    return engine is not None and engine.process.child.running()


def is_fetching(fetch: ObservedFetch | None) -> bool:
    """Return whether the model is not whole on this disk yet."""
    return fetch is not None and fetch.state is not FetchState.PRESENT


class ReplicaObserver:
    """Observes replicas: the cache, the engine's health, our endpoint and our report in the store."""

    def __init__(
        self,
        node: NodeState,
        dependencies: Dependencies,
        references: ReferenceTasks,
        transport: Transport,
        clock: Clock,
    ) -> None:
        self._node = node
        self._dependencies = dependencies
        self._references = references
        self._transport = transport
        self._clock = clock

    async def observe(self, name: str) -> ObservedReplica | None:
        """Return the observation of a replica; None if it is not assigned to this node and nothing of it is left.

        Raises:
            StoreError: the store could not be read.

        """
        cached = self._dependencies.replicas.items.get(keys.spec_key("Replica", name))
        rank = group_launch.rank_of_node(cached, self._node.name) if cached is not None else None
        replica = cached if rank is not None else None
        engine = self._node.engines.get(name)
        uid = replica.metadata.uid if replica is not None else None
        reference, found_reference = self._references.observe(name, uid)
        is_making = reference is ReferenceState.RUNNING
        if not (replica or engine or is_making or name in self._node.published):
            if cached is not None and cached.spec.formation is not None:
                await self._node.reports.retract(name)
            self._node.forget(name)
            if self._dependencies.fetches is not None:
                self._dependencies.fetches.release(name)
            return None
        if engine is not None:
            await engine.observe(self._dependencies.health, self._clock)
        is_unknown = cached is None and await self._is_unknown(name, engine)
        reported = None
        if replica is not None:
            reported = await self._node.reports.read(replica, rank or 0)
        error = self._node.start_error(replica) if replica is not None else None
        fetch = await self._observe_fetch(replica, engine)
        return ObservedReplica(
            replica=replica,
            is_unknown=is_unknown,
            engine=engine.view(self._clock) if engine is not None else None,
            is_published=name in self._node.published,
            is_stale=self._node.is_stale(name),
            is_outdated=self._node.is_outdated(name),
            start_error=error.message if error is not None else "",
            start_failures=error.failures if error is not None and not error.is_stopped else 0,
            next_start=error.next_start(self._clock.monotonic()) if error is not None else None,
            start_place=0 if is_fetching(fetch) else self._start_place(name, replica, engine),
            fetch=fetch,
            reported=reported,
            rank=rank or 0,
            used_epoch=self._used_epoch(replica, engine),
            reference=reference,
            found_reference=found_reference,
        )

    async def _observe_fetch(
        self, replica: Replica | None, engine: EngineTracker | None
    ) -> ObservedFetch | None:
        """Return the fetch of the replica's model; not looked at while an engine runs, which has read it."""
        fetches = self._dependencies.fetches
        if replica is None or engine_runs(engine):
            return None
        if fetches is None:
            is_asked = replica.spec.formation is not None and replica.spec.formation.awaits_files
            return ObservedFetch(state=FetchState.PRESENT) if is_asked else None
        fetch = await fetches.observe(replica)
        if is_fetching(fetch):
            self._node.starts.remove(replica.name)  # others may load meanwhile
        return fetch

    async def _is_unknown(self, name: str, engine: EngineTracker | None) -> bool:
        """Return whether a replica that is missing in the cache may exist; not asked while its engine is stopping."""
        is_stopping = engine is not None and engine.stopping_since is not None
        if is_stopping:
            return False
        return not await registration.is_withdrawn(self._transport, name, self._node.name)

    def _start_place(self, name: str, replica: Replica | None, engine: EngineTracker | None) -> int:
        """Return the place in the queue of an engine that is due to start; 0 if it may start, or waits for another reason."""
        request = None
        if replica is not None:
            error = self._node.start_error(replica)
            is_waiting = error is not None and error.retry_at > self._clock.monotonic()
            is_backing_off = engine is not None and engine.view(self._clock).start_again_in_s > 0
            if not is_waiting and not is_backing_off:
                request = start_request(self._node, self._dependencies, replica)
        if request is None:
            self._node.starts.remove(name)
            return 0
        loading = sum(tracker.is_loading(self._clock) for tracker in self._node.engines.values())
        return self._node.starts.place(request, loading=loading)

    def _used_epoch(self, replica: Replica | None, engine: EngineTracker | None) -> int:
        """Return the last epoch for which a rank was started here; read only if no engine tells it."""
        if replica is None or replica.spec.formation is None or engine is not None:
            return 0
        return self._dependencies.engines.last_epoch(replica.name, replica.metadata.uid)
