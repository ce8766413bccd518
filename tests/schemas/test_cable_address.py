"""The network of a cable: equal at both ends, with two hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.cable_address import NETWORKS, cable_interface

UUIDS = st.uuids().map(str)


@given(one=UUIDS, other=UUIDS, salt=st.sampled_from(["", "b"]))
def test_both_ends_derive_one_network_and_two_hosts(one: str, other: str, salt: str) -> None:
    here, there = (
        cable_interface(one, other, salt=salt),
        cable_interface(other.upper(), one.upper(), salt=salt),
    )
    assert here.network == there.network
    assert here.network.subnet_of(NETWORKS)
    assert {here.ip, there.ip} == set(here.network.hosts())


@given(one=UUIDS, other=UUIDS)
def test_a_salt_gives_another_network(one: str, other: str) -> None:
    assert cable_interface(one, other).network != cable_interface(one, other, salt="b").network


@pytest.mark.parametrize(("one", "other"), [("", "A"), ("A", ""), ("a", "A")])
def test_a_cable_needs_two_ports(one: str, other: str) -> None:
    with pytest.raises(ValueError, match="needs the UUIDs of two ports"):
        cable_interface(one, other)
