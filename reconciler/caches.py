"""What the reconciler knows of the store: its informers, and how their documents are read."""

from dataclasses import dataclass

from machinery.clock import Clock
from schemas import kinds
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.node import NodeLease
from schemas.replica import Endpoint, RankStatus, Replica
from store import codec, keys
from store.cache.informer import Cache, Informer
from store.port import KeyValue, Transport

# Indexes of the specs: objects by their kind, replicas by the deployment they belong to.
BY_KIND, BY_DEPLOYMENT = "kind", "deployment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """What the reconciler knows of the store."""

    specs: Informer[ApiObject]
    statuses: Informer[Status]
    ranks: Informer[RankStatus]
    leases: Informer[NodeLease]
    endpoints: Informer[Endpoint]

    def all(self) -> tuple[Cache, ...]:
        return (self.specs, self.statuses, self.ranks, self.leases, self.endpoints)


def _deployment_of(found: ApiObject) -> tuple[str, ...]:
    return (found.spec.deployment,) if isinstance(found, Replica) else ()


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
    return Caches(
        specs=specs,
        statuses=Informer(transport, keys.STATUS_PREFIX, decode_status, clock),
        ranks=Informer(
            transport, keys.RANK_PREFIX, lambda item: codec.decode(RankStatus, item), clock
        ),
        leases=Informer(
            transport, keys.NODE_LEASE_PREFIX, lambda item: codec.decode(NodeLease, item), clock
        ),
        endpoints=Informer(
            transport, keys.ENDPOINT_PREFIX, lambda item: codec.decode_object(Endpoint, item), clock
        ),
    )
