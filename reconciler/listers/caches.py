"""The reconciler's informers and indexes over the store, and the journal of changed keys."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from machinery.clock import Clock
from schemas import kinds
from schemas.deployment import ModelDeployment, Revision
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.model_snapshot import ModelSnapshot, PreloadAssignment
from schemas.node import NodeLease, NodeLifeStatus, NodeStatus
from schemas.replica import Endpoint, RankStatus, Replica, concerned_nodes
from store import codec, keys
from store.errors import UnavailableError
from store.informer import AnyInformer, Informer
from store.port import KeyValue, Transport

# Watches are at most seconds behind, and a process makes hundreds of writes a second.
_REMEMBERED: Final = 16_384


class OwnWrites:
    """The revisions that the reconcile of a deployment wrote, each with the name of the deployment.

    Such a reconcile has planned and computed statuses after its writes, so it need not run again because of them. A write
    whose answer is lost is never an own one: it may have been made, or may be made later.
    """

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}
        self._writing = 0
        """The number of writes that wait for their answer."""
        self._undecided: list[tuple[int, str, Callable[[], None]]] = []

    def report(self, revision: int, deployment: str, notify: Callable[[], None]) -> None:
        """Call `notify` unless the reconcile of the deployment itself made the change of that revision.

        The watch may be faster than the answer to the write. While one is being made, the call waits for it.
        """
        if self._owners.get(revision) == deployment:
            return
        if self._writing:
            self._undecided.append((revision, deployment, notify))
        else:
            notify()

    @contextmanager
    def writing(self, deployment: str) -> Iterator[Callable[[int], None]]:
        """Make a write; call what this yields with its revision. With an empty name it is no own write."""
        self._writing += 1
        try:
            yield lambda revision: self._note(revision, deployment)
        finally:
            self._writing -= 1
            undecided, self._undecided = self._undecided, []
            for one in undecided:
                self.report(*one)

    def _note(self, revision: int, deployment: str) -> None:
        if not deployment:
            return
        if len(self._owners) >= _REMEMBERED:
            self._owners.clear()
        self._owners[revision] = deployment


# Beyond this many changes, reading everything costs no more than reading what changed.
_LIMIT = 16_384
_CATCH_UP_S = 5.0


class ChangeJournal:
    """The last keys that changed, in order; it holds no values. Each reader keeps its own place in it.

    `note` is a handler for informers. A reader without a place, or with a place that was dropped, reads everything.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._keys: deque[str] = deque(maxlen=limit)
        self._noted = 0

    def note(self, key: str) -> None:
        """Record that a key changed or was deleted."""
        self._keys.append(key)
        self._noted += 1

    def since(self, place: int | None) -> tuple[set[str] | None, int]:
        """Return the keys that changed since a place, None if any may have, and the place for the next call."""
        missed = None if place is None else self._noted - place
        if missed is None or missed > len(self._keys):
            return None, self._noted
        return set(islice(reversed(self._keys), missed)), self._noted


# Indexes of specs: objects by kind, replicas by deployment and by node. Of statuses: by kind, and nodes by
# hardware UUID.
BY_KIND, BY_DEPLOYMENT, BY_NODE, BY_HARDWARE = "kind", "deployment", "node", "hardware"
# Statuses of nodes that say that they sleep.
ASLEEP = "asleep"
# Revisions by deployment.
REVISIONS = "revisions"
# Deployments by priority, and those with antiAffinity: few have either, and each plan needs them.
BY_PRIORITY, BY_RULE = "priority", "rule"
ANTI_AFFINITY = "antiAffinity"
# Prefix in the hardware index for nodes that are parts of one machine on purpose: they are no clones of each other.
PART_OF = "part of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """The informers over the store, one per key prefix."""

    specs: Informer[ApiObject]
    statuses: Informer[Status]
    ranks: Informer[RankStatus]
    leases: Informer[NodeLease]
    endpoints: Informer[Endpoint]
    lives: Informer[NodeLifeStatus]
    snapshots: Informer[ModelSnapshot]
    preloads: Informer[PreloadAssignment]
    changed: ChangeJournal
    """Changes of specs, statuses, leases and rank reports."""

    def all(self) -> tuple[AnyInformer, ...]:
        return (
            *(self.specs, self.statuses, self.ranks, self.leases, self.endpoints, self.lives),
            *(self.snapshots, self.preloads),
        )


def _deployment_of(found: ApiObject) -> tuple[str, ...]:
    return (found.spec.deployment,) if isinstance(found, Replica) else ()


def _revised_deployment(found: ApiObject) -> tuple[str, ...]:
    return (found.spec.deployment,) if isinstance(found, Revision) else ()


def _priority_of(found: ApiObject) -> tuple[str, ...]:
    return (str(found.spec.priority),) if isinstance(found, ModelDeployment) else ()


def _rules_of(found: ApiObject) -> tuple[str, ...]:
    has_rule = isinstance(found, ModelDeployment) and found.spec.placement.anti_affinity
    return (ANTI_AFFINITY,) if has_rule else ()


def _nodes_of(found: ApiObject) -> tuple[str, ...]:
    """Return the nodes with memory of a replica."""
    return concerned_nodes(found) if isinstance(found, Replica) else ()


def _kind_of_status(found: Status) -> tuple[str, ...]:
    return ("Node",) if isinstance(found, NodeStatus) else ()


def _sleep_of(found: Status) -> tuple[str, ...]:
    return (ASLEEP,) if isinstance(found, NodeStatus) and found.asleep_since else ()


def _hardware_of(found: Status) -> tuple[str, ...]:
    if not isinstance(found, NodeStatus) or not found.hardware_uuid:
        return ()
    return (f"{PART_OF if found.is_part else ''}{found.hardware_uuid}",)


def decode_spec(item: KeyValue) -> ApiObject:
    """Decode the object under a spec key, of any kind."""
    return codec.decode_object(_kind_of(item).type, item)


def decode_status(item: KeyValue) -> Status:
    """Decode the document under a status key, of any kind."""
    model = codec.status_type(_kind_of(item).type)
    if model is None:
        raise codec.UndecodableError(f"{item.key}: objects of this kind have no status")
    return codec.decode(model, item)


def _kind_of(item: KeyValue) -> kinds.Kind:
    key = object_key(item.key)
    kind = None if key is None else kinds.by_name(key.kind)
    if kind is None:
        raise codec.UndecodableError(f"{item.key}: not the key of an object of a known kind")
    return kind


def object_key(key: str) -> ObjectKey | None:
    """Return the object that a key belongs to; None for a foreign key below our prefix."""
    try:
        return ObjectKey(*keys.kind_and_name(key))
    except ValueError:
        return None


def make_caches(transport: Transport, clock: Clock) -> Caches:
    """Return the caches; their informers do not run yet."""
    specs = Informer(transport, keys.SPEC_PREFIX, decode_spec, clock)
    specs.index(BY_KIND, lambda found: (found.kind,))
    specs.index(BY_DEPLOYMENT, _deployment_of)
    specs.index(BY_NODE, _nodes_of)
    specs.index(REVISIONS, _revised_deployment)
    specs.index(BY_PRIORITY, _priority_of)
    specs.index(BY_RULE, _rules_of)
    statuses = Informer(transport, keys.STATUS_PREFIX, decode_status, clock)
    statuses.index(BY_KIND, _kind_of_status)
    statuses.index(BY_HARDWARE, _hardware_of)
    statuses.index(ASLEEP, _sleep_of)
    leases = Informer(
        transport, keys.NODE_LEASE_PREFIX, lambda item: codec.decode(NodeLease, item), clock
    )
    preloads = Informer(
        transport, keys.PRELOAD_PREFIX, lambda item: codec.decode(PreloadAssignment, item), clock
    )
    preloads.index(BY_DEPLOYMENT, lambda found: (found.deployment,))
    preloads.index(BY_NODE, lambda found: (found.node,))
    changed = ChangeJournal()
    ranks = Informer(
        transport, keys.RANK_PREFIX, lambda item: codec.decode(RankStatus, item), clock
    )
    for informer in (specs, statuses, leases, ranks):
        informer.on_change(changed.note)
    return Caches(
        specs=specs,
        statuses=statuses,
        ranks=ranks,
        leases=leases,
        endpoints=Informer(
            transport, keys.ENDPOINT_PREFIX, lambda item: codec.decode_object(Endpoint, item), clock
        ),
        lives=Informer(
            transport, keys.NODE_LIFE_PREFIX, lambda item: codec.decode(NodeLifeStatus, item), clock
        ),
        snapshots=Informer(
            transport,
            keys.SNAPSHOT_PREFIX,
            lambda item: codec.decode(ModelSnapshot, item),
            clock,
        ),
        preloads=preloads,
        changed=changed,
    )


async def wait_for_revision(informer: Informer[Any], revision: int) -> None:
    """Wait until an informer has seen a revision, which is that of our own write.

    Raises:
        UnavailableError: the watch is more than five seconds behind.

    """
    try:
        async with asyncio.timeout(_CATCH_UP_S):
            await informer.reached(revision)
    except TimeoutError:
        raise UnavailableError("the watch does not keep up with our own writes") from None
