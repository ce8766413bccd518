"""The store of a simulated fleet: every write is checked against the laws as it happens."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import override

from machinery.clock import Clock
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import ApiObject
from schemas.node import Node, NodeStatus
from schemas.pools import NodePool
from schemas.replica import Endpoint, Replica
from store import codec, keys
from store.memory import MemoryTransport
from store.port import KeyValue, Operation

Obj = TypeVar("Obj", bound=ApiObject)
_REPLICA, _DEPLOYMENT = keys.spec_prefix("Replica"), keys.spec_prefix("ModelDeployment")
_NODE, _MACHINE = keys.spec_prefix("Node"), keys.status_prefix("Node")
_STATUS = keys.status_prefix("ModelDeployment")
_POOL = keys.spec_prefix("NodePool")


@dataclass(slots=True)
class State:
    """The decoded content of the store, kept up to date key by key."""

    now: float = 0.0
    """Seconds since the beginning."""
    replicas: dict[str, Replica] = field(default_factory=dict)
    deployments: dict[str, ModelDeployment] = field(default_factory=dict)
    versions: dict[str, list[tuple[float, ModelDeployment]]] = field(default_factory=dict)
    """Every version of each deployment, with the time at which another replaced it."""
    statuses: dict[str, ModelDeploymentStatus] = field(default_factory=dict)
    """Of deployments."""
    nodes: dict[str, Node] = field(default_factory=dict)
    machines: dict[str, NodeStatus] = field(default_factory=dict)
    pools: dict[str, NodePool] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """By key."""
    leases: set[str] = field(default_factory=set)
    """The keys of the nodes that are there."""
    answered_at: dict[str, float] = field(default_factory=dict)
    """The time when the replica of a uid last had an endpoint."""
    runs: Callable[[str, str], bool] = lambda _node, _uid: False
    """True if an engine of the replica with the uid really runs on the node."""
    changed_at: dict[str, float] = field(default_factory=dict)
    """The time of the last change by a user or an agent, by key."""

    def answers(self, replica: Replica) -> bool:
        """Return whether the replica has an endpoint."""
        key = keys.endpoint_key(replica.spec.ranks[0].node, replica.name)
        endpoint = self.endpoints.get(key)
        return endpoint is not None and endpoint.spec.replica_uid == replica.metadata.uid

    def answered(self, replica: Replica, within_s: float) -> bool:
        """Return whether it has an endpoint, or had one lately."""
        at = self.answered_at.get(replica.metadata.uid, float("-inf"))
        return self.answers(replica) or self.now - at < within_s

    def lately(self, deployment: str, within_s: float) -> list[ModelDeployment]:
        """Return the versions of the deployment that a lagging cache may show."""
        since = self.now - within_s
        deployments = [one for until, one in self.versions.get(deployment, ()) if until > since]
        now = self.deployments.get(deployment)
        return deployments if now is None else [*deployments, now]

    def is_news(self, key: str, within_s: float) -> bool:
        """Return whether the key changed lately."""
        return self.now - self.changed_at.get(key, float("-inf")) < within_s

    def take(self, key: str, item: KeyValue | None) -> "Step | None":
        """Take over one key; return what happened to a replica or a deployment."""
        self.changed_at[key] = self.now
        if key.startswith(_REPLICA):
            return Step(self, *_move(self.replicas, key.removeprefix(_REPLICA), Replica, item))
        if key.startswith(_DEPLOYMENT):
            name = key.removeprefix(_DEPLOYMENT)
            before, now = _move(self.deployments, name, ModelDeployment, item)
            if before is not None:
                self.versions.setdefault(name, []).append((self.now, before))
            return Step(self, before, now)
        if key.startswith(keys.NODE_LEASE_PREFIX):
            (self.leases.discard if item is None else self.leases.add)(key)
        elif key.startswith(keys.ENDPOINT_PREFIX):
            for endpoint in _move(self.endpoints, key, Endpoint, item):
                if endpoint is not None:
                    self.answered_at[endpoint.spec.replica_uid] = self.now
        elif key.startswith(_NODE):
            _move(self.nodes, key.removeprefix(_NODE), Node, item)
        elif key.startswith(_POOL):
            _move(self.pools, key.removeprefix(_POOL), NodePool, item)
        else:
            self._hear(key, item)
        return None

    def _hear(self, key: str, item: KeyValue | None) -> None:
        """Take over a status."""
        if key.startswith(_MACHINE) and item is not None:
            self.machines[key.removeprefix(_MACHINE)] = codec.decode(NodeStatus, item)
        elif key.startswith(_STATUS) and item is not None:
            name = key.removeprefix(_STATUS)
            self.statuses[name] = codec.decode(ModelDeploymentStatus, item)
        elif key.startswith(_STATUS):
            self.statuses.pop(key.removeprefix(_STATUS), None)


def _move(
    kept: dict[str, Obj], name: str, type_: type[Obj], item: KeyValue | None
) -> tuple[Obj | None, Obj | None]:
    """Put the object into `kept`, or remove it; return the old and the new one."""
    before = kept.get(name)
    if item is None:
        kept.pop(name, None)
        return before, None
    now = kept[name] = codec.decode_object(type_, item)
    return before, now


@dataclass(frozen=True, slots=True)
class Step:
    """One object's change, with everything as it is after the transaction."""

    state: State
    before: Replica | ModelDeployment | None
    now: Replica | ModelDeployment | None


Law = Callable[[Step], str]
"""Says what is wrong with a step; empty: nothing."""


class History(MemoryTransport):
    """A store that holds every step against the laws, and notes what breaks one."""

    def __init__(self, clock: Clock, laws: Sequence[Law]) -> None:
        super().__init__(clock, expires_by_itself=False)
        self.state = State()
        self.broken: list[str] = []
        """Note a breach of a law, with its time and revision. Not raised: its writer would just try again."""
        self._laws = laws

    @property
    def revision(self) -> int:
        return self._revision

    @override
    def _apply(self, operations: Sequence[Operation]) -> None:
        super()._apply(operations)
        self.state.now = self._clock.monotonic()
        taken = [self.state.take(op.key, self._keys.get(op.key)) for op in operations]
        for step in taken:
            if step is None:
                continue
            for law in self._laws:
                wrong = law(step)
                if wrong:
                    self.broken.append(f"{self.state.now:.3f} s, revision {self.revision}: {wrong}")

    def keys_below(self, prefix: str) -> list[str]:
        """Return the keys that are there now."""
        return sorted(key for key in self._keys if key.startswith(prefix))

    def since(self, revision: int) -> list[str]:
        """Return the writes after the revision, one line each."""
        return [
            f"{change.key} {change.now.value.decode() if change.now else '(deleted)'}"
            for change in self._history
            if change.mod_revision > revision
        ]

    def digest(self) -> str:
        """Return the last revision, and a hash of what there is: equal runs have equal digests."""
        text = "\n".join(f"{key} {self._keys[key]}" for key in sorted(self._keys))
        return f"{self.revision} revisions, {hashlib.sha256(text.encode()).hexdigest()[:12]}"
