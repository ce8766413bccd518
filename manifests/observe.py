"""Reading of the store for an apply: the declared objects, and the names that they may refer to.

It makes one list per kind: a thousand deployments are two pages, not a thousand gets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from machinery.gc_pause import pause_collection
from manifests.validate import StoreNames
from schemas import kinds
from schemas.meta import ApiObject, ObjectKey
from schemas.route import ModelRoute
from store import codec, keys
from store.port import KeyValue, Transport

# The kinds that an object of a kind may refer to, or conflict with.
_RELATED: Mapping[str, tuple[str, ...]] = {
    "ModelDeployment": ("NodePool", "ShardGroup", "ModelRoute"),
    "ModelRoute": ("ModelDeployment",),
    "ModelPolicy": ("NodePool",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedObjects:
    """The store as it was read."""

    objects: Mapping[ObjectKey, ApiObject]
    """The requested objects that exist, without status."""
    known: StoreNames


async def observe(transport: Transport, wanted: Iterable[ObjectKey]) -> ObservedObjects:
    """Return the requested objects in the store, and the names of objects they may refer to."""
    requested = frozenset(wanted)
    names = sorted({kind for kind, _ in requested})
    related = [other for kind in names for other in _RELATED.get(kind, ())]
    every = list(dict.fromkeys((*names, *related)))
    items = {kind: (await transport.list(keys.spec_prefix(kind))).items for kind in every}
    # Other objects are not decoded: one broken document must not prevent every apply.
    with pause_collection():
        objects = {
            key: decode(kind, item)
            for kind in names
            for item in items[kind]
            if (key := keys.kind_and_name(item.key)) in requested
        }
    return ObservedObjects(objects=objects, known=_known(items))


def decode(kind: str, item: KeyValue) -> ApiObject:
    """Return the object under a spec key of that kind."""
    found = kinds.by_name(kind)
    assert found is not None
    return codec.decode_object(found.type, item)


def _known(items: Mapping[str, tuple[KeyValue, ...]]) -> StoreNames:
    def names(kind: str) -> frozenset[str]:
        return frozenset(keys.kind_and_name(item.key)[1] for item in items.get(kind, ()))

    routes = items.get("ModelRoute", ())
    return StoreNames(
        node_pools=names("NodePool"),
        model_deployments=names("ModelDeployment"),
        shard_groups=names("ShardGroup"),
        model_routes=tuple(codec.decode_object(ModelRoute, item) for item in routes),
    )
