"""Observation of one replica on this node, and the state that the agent keeps between observations."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from machinery.clock import Clock
from nodeagent.dependencies import Dependencies, ReportModels
from nodeagent.engines import group_launch
from nodeagent.engines.references import ReferenceState, ReferenceTasks
from nodeagent.node import registration
from nodeagent.node.machine_conditions import LeakedResources
from nodeagent.replicas.engine_tracker import EngineTracker
from nodeagent.replicas.observation import ObservedReplica
from nodeagent.replicas.rank_reports import RankReports
from schemas.node import ModelReport, NodeStatus
from schemas.replica import Replica
from store import keys
from store.port import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class StartError:
    """The error of an engine that could not be started."""

    epoch: int
    """The epoch of its group; 0 for an engine that has the whole model."""
    message: str


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
        self.published: dict[str, int] = {}
        """The ports of our endpoints in the store, by replica name."""
        self.leaked = LeakedResources()
        self.start_errors: dict[str, StartError] = {}
        """Errors of engines that could not be started, by replica name."""

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

    def start_error(self, name: str, epoch: int) -> str:
        """Return why the engine of this epoch could not be started; "" if it could."""
        found = self.start_errors.get(name)
        return found.message if found is not None and found.epoch == epoch else ""

    def is_stale(self, name: str) -> bool:
        """Return whether the published endpoint leads to an earlier engine than the current one."""
        published, engine = self.published.get(name), self.engines.get(name)
        return published is not None and (engine is None or engine.process.port != published)

    def forget(self, name: str) -> None:
        """Drop the state of a replica that has no engine here any more."""
        self.reports.forget(name)
        self.start_errors.pop(name, None)


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
            return None
        if engine is not None:
            await engine.observe(self._dependencies.health, self._clock)
        return ObservedReplica(
            replica=replica,
            is_unknown=cached is None and await self._is_unknown(name, engine),
            engine=engine.view(self._clock) if engine is not None else None,
            is_published=name in self._node.published,
            is_stale=self._node.is_stale(name),
            start_error=self._start_error(replica),
            reported=await self._node.reports.read(replica, rank or 0)
            if replica is not None
            else None,
            rank=rank or 0,
            used_epoch=self._used_epoch(replica, engine),
            reference=reference,
            found_reference=found_reference,
        )

    async def _is_unknown(self, name: str, engine: EngineTracker | None) -> bool:
        """Return whether a replica that is missing in the cache may exist; not asked while its engine is stopping."""
        is_stopping = engine is not None and engine.stopping_since is not None
        return not is_stopping and not await registration.is_replica_deleted(self._transport, name)

    def _start_error(self, replica: Replica | None) -> str:
        if replica is None:
            return ""
        return self._node.start_error(replica.name, group_launch.wanted_epoch(replica))

    def _used_epoch(self, replica: Replica | None, engine: EngineTracker | None) -> int:
        """Return the last epoch for which a rank was started here; read only if no engine tells it."""
        if replica is None or replica.spec.formation is None or engine is not None:
            return 0
        return self._dependencies.engines.last_epoch(replica.name, replica.metadata.uid)
