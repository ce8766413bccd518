"""Tests of `store.namespace`: a prefix is a whole store to its user (test_port.py), and invisible to others."""

import pytest

from store import namespace
from store.errors import ConflictError
from store.memory import MemoryTransport
from store.port import CreateRevisionGuard, Delete, ModRevisionGuard, Put
from tests.support.store_informers import running


async def keys_of(memory: MemoryTransport) -> list[str]:
    return [item.key for item in (await memory.list("/")).items]


async def test_two_fleets_of_one_store_do_not_see_each_other(memory: MemoryTransport) -> None:
    blue, blue_2 = namespace.with_prefix(memory, "/blue"), namespace.with_prefix(memory, "/blue-2")
    await blue.commit([], [Put(key="/a", value=b"1")])
    revision = await blue_2.commit([], [Put(key="/a", value=b"2"), Put(key="/b", value=b"3")])
    await memory.commit([], [Put(key="/a", value=b"0")])
    assert [(item.key, item.value) for item in (await blue.list("/")).items] == [("/a", b"1")]
    assert [item.key for item in (await blue_2.list("/")).items] == ["/a", "/b"]
    assert await keys_of(memory) == ["/a", "/blue-2/a", "/blue-2/b", "/blue/a"]
    async with running(blue, "/") as informer:
        await blue_2.commit([], [Put(key="/a", value=b"4")])
        await informer.reached(await blue.commit([], [Put(key="/c", value=b"5")]))
        assert dict(informer.items) == {"/a": "1", "/c": "5"}
    with pytest.raises(ConflictError):
        await blue.commit([ModRevisionGuard(key="/a", mod_revision=revision)], [Delete(key="/a")])
    with pytest.raises(ConflictError):
        await blue.commit(
            [CreateRevisionGuard(key="/a", create_revision=revision)], [Delete(key="/a")]
        )
    await blue.commit([], [Delete(key="/a")])
    assert "/blue-2/a" in await keys_of(memory)


@pytest.mark.parametrize("prefix", ["blue", "/", "/blue/", "blue/"])
def test_an_invalid_prefix_is_refused(memory: MemoryTransport, prefix: str) -> None:
    with pytest.raises(ValueError, match="looks like /name"):
        namespace.with_prefix(memory, prefix)


async def test_an_empty_prefix_is_no_namespace(memory: MemoryTransport) -> None:
    assert namespace.with_prefix(memory, "") is memory
    with pytest.raises(ValueError, match="must begin with a slash"):
        await namespace.with_prefix(memory, "/blue").get("-2/a")
