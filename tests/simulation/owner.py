"""The owner of the fleet: edits deployments, nodes and pools as fleetctl does, guarded by the versions that it read."""

from typing import Any

from machinery.virtual_time import VirtualClock
from manifests.diff import new_object
from schemas.autoscaling import Autoscaling
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ApiObject, ObjectMeta
from schemas.node import Node, NodeSpec, Taint
from schemas.pools import NodePool, NodePoolSpec, ReservedResources
from schemas.replica import Replica
from store import codec
from store.errors import ConflictError
from tests.simulation.history import History

_CONTEXTS = (512, 1024, 2048, 3072, 4096)
_LIMITS: tuple[dict[str, Any], ...] = (
    {"max_surge": 1, "max_unavailable": 0},
    {"max_surge": 0, "max_unavailable": 1},
    {"max_surge": 2, "max_unavailable": "50%"},
    {"max_surge": "50%", "max_unavailable": 0},
    {"max_surge": 0, "max_unavailable": "100%"},
)
_MIN_AVAILABLE: tuple[int | str, ...] = (0, 1, 2, "50%", "100%")
_PRIORITIES = (-5, 0, 0, 5, 10)
_RESERVED = ("0", "1Gi", "2Gi", "4Gi", "6Gi")
_SPEC = ModelDeploymentSpec(model=ModelSource(path="qwen"), context_length=1024, concurrency=1)


class Owner:
    """Writes the owner's edits; a write that conflicts is dropped, because another edit follows."""

    def __init__(self, store: History, clock: VirtualClock) -> None:
        self._store = store
        self._clock = clock

    async def want(self, name: str, **changes: Any) -> None:
        """Change fields of the deployment's spec, or create it; a deployment that is being deleted stays as it is."""
        there = self._store.state.deployments.get(name)
        if there is not None and there.metadata.deletion_timestamp is not None:
            return
        spec = (there.spec if there is not None else _SPEC).model_copy(update=changes)
        wish = ModelDeployment(metadata=ObjectMeta(name=name), spec=spec)
        await self._write(there, self._changed(there, wish))

    async def roll(self, name: str, **changes: Any) -> None:
        """Change fields of the deployment's rollout, if it is there."""
        there = self._store.state.deployments.get(name)
        if there is not None:
            rollout = there.spec.rollout.model_copy(update=changes)
            await self.want(name, rollout=rollout)

    async def context(self, name: str, number: int) -> None:
        if name in self._store.state.deployments:
            await self.want(name, context_length=_CONTEXTS[number])

    async def limits(self, name: str, number: int) -> None:
        await self.roll(name, **_LIMITS[number])

    async def priority(self, name: str, number: int) -> None:
        if name in self._store.state.deployments:
            await self.want(name, priority=_PRIORITIES[number])

    async def min_available(self, name: str, number: int) -> None:
        if name in self._store.state.deployments:
            await self.want(name, min_available=_MIN_AVAILABLE[number])

    async def autoscale(self, name: str, number: int | None) -> None:
        """Leave the number of replicas to the autoscaler, within bounds; or take it back."""
        if name in self._store.state.deployments:
            bounds = (
                None
                if number is None
                else Autoscaling(min_replicas=number // 2, max_replicas=max(1, number))
            )
            await self.want(name, autoscaling=bounds)

    async def delete(self, name: str) -> None:
        """Mark the deployment deleted."""
        await self._mark(self._store.state.deployments.get(name))

    async def delete_replica(self, number: int) -> None:
        """Mark some replica deleted, as a person may."""
        replicas = sorted(self._store.state.replicas.values(), key=lambda r: r.name)
        await self._mark(replicas[number % len(replicas)] if replicas else None)

    async def _mark(self, there: ModelDeployment | Replica | None) -> None:
        if there is None or there.metadata.deletion_timestamp is not None:
            return
        marked = {"deletion_timestamp": self._clock.now()}
        metadata = there.metadata.model_copy(update=marked)
        await self._write(there, there.model_copy(update={"metadata": metadata}))

    async def node(self, name: str, **changes: Any) -> None:
        """Change fields of the node's spec."""
        there = self._store.state.nodes.get(name)
        spec = (there.spec if there is not None else NodeSpec()).model_copy(update=changes)
        wish = Node(metadata=ObjectMeta(name=name), spec=spec)
        await self._write(there, self._changed(there, wish))

    async def taint(self, name: str, effect: Any) -> None:
        await self.node(name, taints=(Taint(key="owner-active", effect=effect),))

    async def free(self, name: str) -> None:
        """Take back everything that keeps replicas off the node."""
        if name in self._store.state.nodes:
            await self.node(name, unschedulable=False, draining=False, taints=())

    async def reserve(self, node: str, number: int) -> None:
        """Keep memory of one node for its owner."""
        there = self._store.state.pools.get("desk")
        spec = NodePoolSpec(nodes=(node,), reserved=ReservedResources(memory=_RESERVED[number]))
        wish = NodePool(metadata=ObjectMeta(name="desk"), spec=spec)
        await self._write(there, self._changed(there, wish))

    def _changed(self, there: Any, wish: Any) -> Any:
        """Return the object to write: the existing one with the edited spec, or a new one."""
        if there is None:
            uid = f"uid-{wish.name}-{self._store.revision}"
            return new_object(wish, now=self._clock.now(), uid=uid)
        generation = there.metadata.generation + (there.spec != wish.spec)
        metadata = there.metadata.model_copy(update={"generation": generation})
        return there.model_copy(update={"metadata": metadata, "spec": wish.spec, "status": None})

    async def _write(self, there: ApiObject | None, new: ApiObject) -> None:
        try:
            await self._store.commit([codec.unchanged_guard(there or new)], [codec.put_spec(new)])
        except ConflictError:
            return
