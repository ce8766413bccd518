"""Tests of `store.keys`: disjoint prefixes, and keys that are parsed back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.meta import NAME_PATTERN
from store import keys

names = st.from_regex(NAME_PATTERN, fullmatch=True)


@given(names)
def test_object_keys_are_read_back(name: str) -> None:
    for key in (keys.spec_key("Replica", name), keys.status_key("Replica", name)):
        assert keys.kind_and_name(key) == ("Replica", name)
    assert keys.kind_and_name(keys.rank_key("mac-1", name, 3)) == ("mac-1", f"{name}/3")
    assert keys.kind_and_name(keys.node_lease_key(name)) == ("Node", name)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        keys.ROOT,
        f"{keys.ROOT}/spec",
        f"{keys.ROOT}/spec/",
        f"{keys.ROOT}/spec/Node",
        f"{keys.ROOT}/spec/Node/",
        f"{keys.ROOT}/spec//a",
        "/elsewhere/spec/Node/a",
        "/mlx-fleet/v2/spec/Node/a",
    ],
)
def test_a_key_of_no_object_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="not the key of an object"):
        keys.kind_and_name(key)


def test_prefixes_are_disjoint() -> None:
    """Each has its own writer and informer, which must not see other documents."""
    found = [
        keys.SPEC_PREFIX,
        keys.STATUS_PREFIX,
        keys.RANK_PREFIX,
        keys.LEASE_PREFIX,
        keys.ENDPOINT_PREFIX,
        keys.EVENT_PREFIX,
        keys.ELECTION_PREFIX,
        keys.SECRET_PREFIX,
    ]
    assert not [(a, b) for a in found for b in found if a is not b and a.startswith(b)]
    assert not keys.spec_key("NodePool", "a").startswith(keys.spec_prefix("Node"))
    assert keys.status_key("Node", "a").startswith(keys.status_prefix("Node"))
    assert keys.endpoint_key("mac-1", "r-0") == f"{keys.ENDPOINT_PREFIX}mac-1/r-0"
    assert keys.event_key("reconciler", "e") == f"{keys.EVENT_PREFIX}reconciler/e"


# Short names of few letters: mistakes would be in common beginnings.
alike = st.from_regex(r"[a1]([-a1.]{0,2}[a1])?", fullmatch=True)


@given(alike, alike, alike)
def test_an_agents_keys_are_below_its_own_prefixes(own: str, other: str, name: str) -> None:
    """etcd's permissions are ranges of keys: mac-1 has no access to mac-10."""
    assert keys.rank_key(own, name, 0).startswith(keys.rank_prefix(own))
    assert keys.endpoint_key(own, name).startswith(keys.endpoint_prefix(own))
    assert keys.replica_of(keys.rank_key(own, name, 0)) == name
    assert keys.replica_of(keys.endpoint_key(own, name)) == name
    if own != other:
        assert not keys.rank_key(other, name, 0).startswith(keys.rank_prefix(own))
        assert not keys.endpoint_key(other, name).startswith(keys.endpoint_prefix(own))
        mine, theirs = keys.event_key(f"Node/{own}", name), keys.event_prefix(f"Node/{other}")
        assert not mine.startswith(theirs)


@pytest.mark.parametrize("key", ["", keys.RANK_PREFIX, keys.ENDPOINT_PREFIX + "x", "/spec/a/b"])
def test_other_keys_have_no_replica(key: str) -> None:
    assert keys.replica_of(key) == ""


@given(st.text(st.characters(max_codepoint=0xD000), min_size=1), st.text())
def test_the_end_of_a_prefix_follows_all_its_keys(prefix: str, rest: str) -> None:
    end = keys.prefix_end(prefix).encode()
    inside = (prefix + rest).encode("utf-8", "surrogatepass")
    assert prefix.encode() <= inside < end
    other = rest.encode("utf-8", "surrogatepass")
    if prefix.encode() <= other < end:
        assert other.startswith(prefix.encode())
