"""The contract of `store.objects` and `store.object_trees`: both read the same objects, typed or as trees."""

from collections.abc import Sequence
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from machinery.clock import SystemClock
from manifests.trees import Tree, object_tree
from schemas import kinds
from schemas.kinds import KINDS, Kind
from schemas.meta import ApiObject
from store import codec, keys, object_trees, objects, versions
from store.errors import NewerDocumentError, UndecodableError
from store.memory import MemoryTransport
from store.port import Put
from tests.support import schemas_strategies
from tests.support.sampling import samples
from tests.support.world import deployment, replica

LEASED = {
    "Endpoint": keys.ENDPOINT_PREFIX,
    "Event": keys.EVENT_PREFIX,
    "FabricTest": keys.FABRIC_TEST_PREFIX,
}
# A tree of a Node has conditions from its lease, which a typed Node has not.
PLAIN_KINDS = [kind for kind in KINDS if kind.name != "Node"]
every_kind = pytest.mark.parametrize("kind", PLAIN_KINDS, ids=lambda kind: kind.name)
slowly = settings(
    max_examples=samples(6, quick=2),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class ObjectReader(Protocol):
    """One of the two modules, with trees as results."""

    async def list_all(self, transport: MemoryTransport, kind: Kind) -> list[Tree]: ...

    async def get(self, transport: MemoryTransport, kind: Kind, name: str) -> Tree: ...


class TypedReader:
    async def list_all(self, transport: MemoryTransport, kind: Kind) -> list[Tree]:
        return [object_tree(obj) for obj in await objects.list_all(transport, kind.type)]

    async def get(self, transport: MemoryTransport, kind: Kind, name: str) -> Tree:
        obj = await objects.get(transport, kind.type, name)
        return None if obj is None else object_tree(obj)


class TreeReader:
    async def list_all(self, transport: MemoryTransport, kind: Kind) -> list[Tree]:
        return [*await object_trees.list_all(transport, kind.name)]

    async def get(self, transport: MemoryTransport, kind: Kind, name: str) -> Tree:
        return await object_trees.get(transport, kind.name, name)


@pytest.fixture(params=[TypedReader, TreeReader])
def reader(request: pytest.FixtureRequest) -> ObjectReader:
    made: ObjectReader = request.param()
    return made


async def stored(found: Sequence[ApiObject]) -> MemoryTransport:
    """Return a store with the objects, their statuses under keys of their own."""
    transport = MemoryTransport(SystemClock())
    for obj in found:
        prefix = LEASED.get(obj.kind)
        key = keys.spec_key(obj.kind, obj.name) if prefix is None else f"{prefix}w/{obj.name}"
        puts = [Put(key=key, value=codec.encode_spec(obj))]
        status = getattr(obj, "status", None)
        if codec.status_type(type(obj)) is not None and status is not None:
            puts.append(Put(key=keys.status_key(obj.kind, obj.name), value=codec.encode(status)))
        await transport.commit([], puts)
    return transport


@every_kind
@slowly
@given(data=st.data())
async def test_both_readers_return_the_same_objects(kind: Kind, data: st.DataObject) -> None:
    api_objects = {
        obj.name: obj
        for obj in data.draw(st.lists(schemas_strategies.objects(kind.type), max_size=3))
        if isinstance(obj, ApiObject)
    }
    transport = await stored([*api_objects.values()])
    typed = await TypedReader().list_all(transport, kind)
    trees = await TreeReader().list_all(transport, kind)
    by_name = sorted(trees, key=lambda tree: str(object_trees.name_of(tree)))  # type: ignore[arg-type]
    assert by_name == typed
    assert [object_trees.name_of(tree) for tree in typed] == sorted(api_objects)  # type: ignore[arg-type]
    for name in api_objects:
        one = await TypedReader().get(transport, kind, name)
        assert one == await TreeReader().get(transport, kind, name)
        assert one in typed


@every_kind
async def test_an_object_that_does_not_exist_is_none(reader: ObjectReader, kind: Kind) -> None:
    transport = MemoryTransport(SystemClock())
    assert await reader.list_all(transport, kind) == []
    assert await reader.get(transport, kind, "missing") is None


async def test_the_resource_version_is_that_of_the_spec(reader: ObjectReader) -> None:
    transport = await stored([deployment()])
    kind = kinds.by_name("ModelDeployment")
    assert kind is not None
    item = await transport.get(keys.spec_key("ModelDeployment", deployment().name))
    assert item is not None
    found = await reader.get(transport, kind, deployment().name)
    assert isinstance(found, dict)
    metadata = found["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["resourceVersion"] == str(item.mod_revision)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        pytest.param(b"{", UndecodableError, id="not-json"),
        pytest.param(b"[]", UndecodableError, id="not-an-object"),
        pytest.param(b'{"metadata": {}}', UndecodableError, id="without-a-name"),
        pytest.param(
            versions.stamp_version(b'{"metadata": {"name": "a"}}', 99),
            NewerDocumentError,
            id="of-a-newer-release",
        ),
    ],
)
async def test_an_unreadable_document_is_refused(
    reader: ObjectReader, value: bytes, error: type[Exception]
) -> None:
    kind = kinds.by_name("NodePool")
    assert kind is not None
    transport = MemoryTransport(SystemClock())
    await transport.commit([], [Put(key=keys.spec_key("NodePool", "a"), value=value)])
    with pytest.raises(error, match="NodePool/a"):
        await reader.list_all(transport, kind)
    with pytest.raises(error):
        await reader.get(transport, kind, "a")


@pytest.mark.parametrize("spoiled", [b"", b"{}", b"{},{}", b'{"a":1', b'"b":2}', b"1", b"\xff"])
async def test_trees_that_are_parsed_together_are_refused_one_by_one(spoiled: bytes) -> None:
    """A damaged document is named, whatever it would be in the middle of an array."""
    key, current = keys.spec_key("Replica", "b"), versions.version_of("Replica")
    transport = await stored([replica(0).replica, replica(1).replica])
    await transport.commit([], [Put(key=key, value=b'{"storedVersion":%d,' % current + spoiled)])
    with pytest.raises(UndecodableError, match=key):
        await object_trees.list_all(transport, "Replica")
