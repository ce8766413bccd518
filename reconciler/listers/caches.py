"""Which keys changed since somebody last asked: what need not be looked at again. Holds keys, never values.

What the reconciler knows of the store: its informers, and how their documents are read.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice

from machinery.clock import Clock
from schemas import kinds
from schemas.deployment import Revision
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.node import NodeLease, NodeLifeStatus, NodeStatus
from schemas.replica import Endpoint, RankStatus, Replica
from store import codec, keys
from store.informer import AnyInformer, Informer
from store.port import KeyValue, Transport

# Beyond this a look at everything costs no more than one at each change.
_LIMIT = 16_384


class ChangeJournal:
    """The last keys that changed, in order. Each reader keeps its own place in it.

    `note` is a handler of informers. A hint of where to look, never what to believe: who has no place yet, or
    was away for so long that the beginning is forgotten, has to look at everything.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._keys: deque[str] = deque(maxlen=limit)
        self._noted = 0

    def note(self, key: str) -> None:
        """Take note that a key changed, or is gone."""
        self._keys.append(key)
        self._noted += 1

    def since(self, place: int | None) -> tuple[set[str] | None, int]:
        """Return what changed since a place, None for anything; and the place to ask from next time."""
        missed = None if place is None else self._noted - place
        if missed is None or missed > len(self._keys):
            return None, self._noted
        return set(islice(reversed(self._keys), missed)), self._noted


# Indexes of the specs: objects by their kind, replicas by the deployment they belong to and by the nodes they
# are assigned to. Of the statuses: by their kind, those of nodes by the machine they speak of.
BY_KIND, BY_DEPLOYMENT, BY_NODE, BY_HARDWARE = "kind", "deployment", "node", "hardware"
# Revisions by the deployment that they are of.
REVISIONS = "revisions"
# Under what the nodes are found that are parts of a machine on purpose: a thousand of them are no thousand clones.
PART_OF = "part of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """What the reconciler knows of the store."""

    specs: Informer[ApiObject]
    statuses: Informer[Status]
    ranks: Informer[RankStatus]
    leases: Informer[NodeLease]
    endpoints: Informer[Endpoint]
    lives: Informer[NodeLifeStatus]
    changed: ChangeJournal
    """Which specs, statuses, leases and reports of ranks changed."""

    def all(self) -> tuple[AnyInformer, ...]:
        return (self.specs, self.statuses, self.ranks, self.leases, self.endpoints, self.lives)


def _deployment_of(found: ApiObject) -> tuple[str, ...]:
    return (found.spec.deployment,) if isinstance(found, Replica) else ()


def _revised(found: ApiObject) -> tuple[str, ...]:
    return (found.spec.deployment,) if isinstance(found, Revision) else ()


def _nodes_of(found: ApiObject) -> tuple[str, ...]:
    """Return where a replica has memory: the nodes of its ranks, and of those that have yet to end."""
    if not isinstance(found, Replica):
        return ()
    there = [rank.node for rank in found.spec.ranks]
    return tuple(dict.fromkeys((*there, *(left.node for left in found.spec.leaving))))


def _kind_of_status(found: Status) -> tuple[str, ...]:
    return ("Node",) if isinstance(found, NodeStatus) else ()


def _hardware_of(found: Status) -> tuple[str, ...]:
    if not isinstance(found, NodeStatus) or not found.hardware_uuid:
        return ()
    return (f"{PART_OF if found.is_part else ''}{found.hardware_uuid}",)


def decode_spec(item: KeyValue) -> ApiObject:
    """Return the object under a spec key, whatever its kind."""
    return codec.decode_object(_kind_of(item).type, item)


def decode_status(item: KeyValue) -> Status:
    """Return the document under a status key, whatever its kind."""
    model = codec.status_type(_kind_of(item).type)
    if model is None:
        raise codec.UndecodableError(f"{item.key}: objects of this kind have no status")
    return codec.decode(model, item)


def _kind_of(item: KeyValue) -> kinds.Kind:
    key = object_key(item.key)
    kind = None if key is None else kinds.by_name(key.kind)
    if kind is None:
        raise codec.UndecodableError(f"{item.key}: no key of an object of a known kind")
    return kind


def object_key(key: str) -> ObjectKey | None:
    """Return which object a key is about; None for what somebody else put below our prefix."""
    try:
        return ObjectKey(*keys.kind_and_name(key))
    except ValueError:
        return None


def make_caches(transport: Transport, clock: Clock) -> Caches:
    """Return the reconciler's caches, not yet running."""
    specs = Informer(transport, keys.SPEC_PREFIX, decode_spec, clock)
    specs.index(BY_KIND, lambda found: (found.kind,))
    specs.index(BY_DEPLOYMENT, _deployment_of)
    specs.index(BY_NODE, _nodes_of)
    specs.index(REVISIONS, _revised)
    statuses = Informer(transport, keys.STATUS_PREFIX, decode_status, clock)
    statuses.index(BY_KIND, _kind_of_status)
    statuses.index(BY_HARDWARE, _hardware_of)
    leases = Informer(
        transport, keys.NODE_LEASE_PREFIX, lambda item: codec.decode(NodeLease, item), clock
    )
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
        changed=changed,
    )
