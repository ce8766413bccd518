"""One look at one object, whatever its kind. Called by the loop, one key at a time."""

from machinery.clock import Clock
from machinery.loop import Again
from reconciler import status, views
from reconciler.deployments import Deployments, Senses
from reconciler.execute import Executor
from reconciler.known import groups
from reconciler.known.caches import Caches
from reconciler.known.fleet import Fleet
from reconciler.nodes.look import Nodes
from reconciler.telling import Teller
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.pools import NodePool
from schemas.route import ModelRoute
from schemas.shardgroup import ShardGroup
from store import keys
from store.events import EventRecorder


class Reconciler:
    """Brings one object nearer to its spec at a time. Needs leadership."""

    def __init__(
        self,
        caches: Caches,
        senses: Senses,
        executor: Executor,
        recorder: EventRecorder,
        clock: Clock,
    ) -> None:
        self._caches = caches
        self._fleet = Fleet(caches)
        self._executor = executor
        self._clock = clock
        self._deployments = Deployments(
            caches, senses, executor, Teller(self._fleet, recorder), clock
        )
        self._nodes = Nodes(caches, senses, executor, recorder, clock)

    async def reconcile(self, key: ObjectKey) -> Again | None:
        """Look at one object and act."""
        if not self._fleet.is_readable(key):
            return None  # the informer has said so; acting on an old copy could undo an edit
        if key.kind == "ModelDeployment":
            return await self._deployments.reconcile(key)
        if key.kind == "Node":
            return await self._nodes.reconcile(key)
        found = self._fleet.spec(key)
        if found is not None:
            await self._simple_status(key, found)
        return None

    def _around(self, group: ShardGroup, ready: set[str]) -> status.GroupSurroundings:
        return status.GroupSurroundings(
            members=groups.members_of(self._fleet, group),
            known=set(self._fleet.node_names()),
            ready=ready,
            replicas=[one.name for one in groups.replicas_on(self._fleet, group.name)],
        )

    async def _write_if_changed(self, key: ObjectKey, old: Status | None, new: Status) -> bool:
        if old == new or self._fleet.is_newer(key):
            return False  # a newer reconciler's words are not ours to overwrite
        version = self._caches.specs.version(keys.spec_key(*key))
        await self._executor.write_status(key, new, version=version)
        return True

    async def _simple_status(self, key: ObjectKey, found: ApiObject) -> None:
        old, now, ready = self._fleet.status(key), self._clock.now(), self._fleet.ready_nodes()
        new: Status
        if isinstance(found, NodePool):
            new = status.of_pool(
                found, views.pool_members(self._fleet, found), ready, old=old, now=now
            )
        elif isinstance(found, ShardGroup):
            new = status.of_group(found, self._around(found, ready), old=old, now=now)
        elif isinstance(found, ModelRoute):
            names = {deployment.name for deployment in self._fleet.of_kind("ModelDeployment")}
            new = status.of_route(found, names, old=old, now=now)
        else:
            return
        await self._write_if_changed(key, old, new)
