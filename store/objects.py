"""Typed reading of objects: joins spec and status. Writes are guarded transactions (`store.codec`, `store.mutate`)."""

from collections.abc import Iterable
from typing import TypeVar

from machinery.gc_pause import pause_collection
from schemas.meta import ApiObject
from store import codec, keys
from store.port import KeyValue, Transport

Obj = TypeVar("Obj", bound=ApiObject)

_LEASED = {
    "Endpoint": keys.ENDPOINT_PREFIX,
    "Event": keys.EVENT_PREFIX,
    "FabricTest": keys.FABRIC_TEST_PREFIX,
}


async def get(transport: Transport, kind: type[Obj], name: str) -> Obj | None:
    """Return the object with its status; None if it does not exist."""
    if kind.__name__ in _LEASED:
        # Their keys begin with the writer's name, which the object's name does not tell.
        found = [obj for obj in await list_all(transport, kind) if obj.name == name]
        return max(found, key=_written_at, default=None)
    item = await transport.get(keys.spec_key(kind.__name__, name))
    if item is None:
        return None
    there = codec.decode_object(kind, item)
    if codec.status_type(kind) is None:
        return there
    return codec.with_status(there, await transport.get(keys.status_key(kind.__name__, name)))


async def list_all(transport: Transport, kind: type[Obj]) -> list[Obj]:
    """Return all objects of a kind with their statuses, by name."""
    found = decode_all(kind, (await transport.list(_prefix(kind))).items)
    if codec.status_type(kind) is not None:
        statuses = await transport.list(keys.status_prefix(kind.__name__))
        by_name = {keys.kind_and_name(item.key)[1]: item for item in statuses.items}
        found = [codec.with_status(obj, by_name.get(obj.name)) for obj in found]
    return sorted(found, key=lambda obj: obj.name)


def decode_all(kind: type[Obj], items: Iterable[KeyValue]) -> list[Obj]:
    """Return the objects under these keys."""
    # The garbage collector would traverse tens of thousands of objects repeatedly, at twice the cost of decoding.
    with pause_collection():
        return [codec.decode_object(kind, item) for item in items]


def _prefix(kind: type[ApiObject]) -> str:
    """Return the prefix of a kind's objects; leased kinds are beside the specs."""
    return _LEASED.get(kind.__name__) or keys.spec_prefix(kind.__name__)


def _written_at(obj: ApiObject) -> int:
    return int(obj.metadata.resource_version or 0)
