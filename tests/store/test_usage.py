"""The prefix that takes most space is found, whatever lies beside it."""

from hypothesis import given
from hypothesis import strategies as st

from store import keys
from store.port import KeyValue
from store.usage import usage_by_prefix


def item(key: str, size: int) -> KeyValue:
    return KeyValue(key=key, value=b"x" * size, create_revision=1, mod_revision=1)


def test_a_flood_of_one_nodes_events_is_named() -> None:
    flood = [item(keys.event_key("Node/mac-2", f"e{n}"), 1000) for n in range(20)]
    others = [
        item(keys.event_key("Node/mac-1", "e"), 5000),
        item(keys.spec_key("ModelDeployment", "qwen"), 3000),
        item(keys.rank_key("mac-1", "qwen-0", 0), 100),
        item(keys.RESTORING, 10),
    ]
    found = usage_by_prefix([*others, *flood])
    assert (found[0].prefix, found[0].keys) == ("/mlx-fleet/v1/event/Node/mac-2/", 20)
    assert 20_000 < found[0].size_bytes < 22_000
    assert [one.prefix.removeprefix("/mlx-fleet/v1/") for one in found[1:]] == [
        "event/Node/mac-1/",
        "spec/ModelDeployment/",
        "rank/mac-1/qwen-0/",
        "",
    ]


@given(st.lists(st.tuples(st.text("ab/", max_size=8), st.integers(0, 50)), max_size=20))
def test_every_byte_counts_once(given_items: list[tuple[str, int]]) -> None:
    items = [item(f"{keys.ROOT}/{key}", size) for key, size in given_items]
    found = usage_by_prefix(items)
    assert sum(one.size_bytes for one in found) == sum(len(i.key) + len(i.value) for i in items)
    assert sum(one.keys for one in found) == len(items)
