"""The prefix that takes most space is found, whatever lies beside it."""

from hypothesis import given
from hypothesis import strategies as st

from store import keys
from store.memory import MemoryTransport
from store.port import Put
from store.usage import PrefixUsage, usage_by_prefix
from tests.support.clock import FakeClock


async def usage_of(sizes: dict[str, int]) -> list[PrefixUsage]:
    """Return the usage of a store with values of these sizes."""
    store = MemoryTransport(FakeClock())
    for key, size in sizes.items():
        await store.commit([], [Put(key=key, value=b"x" * size)])
    return await usage_by_prefix(store)


async def test_a_flood_of_one_nodes_events_is_named() -> None:
    flood = {keys.event_key("Node/mac-2", f"e{n}"): 1000 for n in range(20)}
    others = {
        keys.event_key("Node/mac-1", "e"): 5000,
        keys.spec_key("ModelDeployment", "qwen"): 3000,
        keys.rank_key("mac-1", "qwen-0", 0): 100,
        keys.RESTORING: 10,
    }
    usages = await usage_of({**others, **flood})
    assert (usages[0].prefix, usages[0].keys) == ("/mlx-fleet/v1/event/Node/mac-2/", 20)
    assert 20_000 < usages[0].size_bytes < 22_000
    assert [usage.prefix.removeprefix("/mlx-fleet/v1/") for usage in usages[1:]] == [
        "event/Node/mac-1/",
        "spec/ModelDeployment/",
        "rank/mac-1/qwen-0/",
        "",
    ]


@given(st.dictionaries(st.text("ab/", max_size=8), st.integers(0, 50), max_size=20))
async def test_every_byte_counts_once(given_sizes: dict[str, int]) -> None:
    sizes = {f"{keys.ROOT}/{key}": size for key, size in given_sizes.items()}
    usages = await usage_of(sizes)
    assert sum(usage.size_bytes for usage in usages) == sum(len(k) + n for k, n in sizes.items())
    assert sum(usage.keys for usage in usages) == len(sizes)
