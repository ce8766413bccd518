"""Tests of `schemas.formation`: every rank derives the same ports, no two share one, and each epoch takes others."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.formation import WIDTH, WINDOWS, Formation, Seat, rendezvous
from schemas.shardgroup import MOST_RANKS, Backend
from tests.support.sampling import samples

FORMED = datetime(2026, 11, 1, tzinfo=UTC)
UID = "6f1c0f6e-1111-4222-8333-444455556666"


def formation(epoch: int = 1, *, port: int = 20_000, backend: Backend = "ring") -> Formation:
    return Formation(group="pair", epoch=epoch, port=port, backend=backend, formed_at=FORMED)


def seat(at: int, *, links: int = 1) -> Seat:
    addresses = tuple(f"10.{link}.0.{at + 1}" for link in range(links))
    return Seat(node=f"mac-{at}", addresses=addresses)


PAIR = (seat(0), seat(1))


def ports(hosts: tuple[tuple[str, ...], ...]) -> list[int]:
    return [int(address.rpartition(":")[2]) for rank in hosts for address in rank]


def test_two_macs_get_the_same_addresses() -> None:
    found = rendezvous(UID, formation(), PAIR)
    first = found.control[1]
    assert found.control == ("10.0.0.1", first)
    assert found.coordinator == ("10.0.0.1", first + 1)
    assert found.hosts == ((f"10.0.0.1:{first + 2}",), (f"10.0.0.2:{first + 3}",))
    assert found.devices is None


def test_rdma_devices_are_listed_where_there_are_some() -> None:
    seats = (
        PAIR[0].model_copy(update={"rdma": ((), ("rdma_en5",))}),
        PAIR[1].model_copy(update={"rdma": (("rdma_en2",), ())}),
    )
    devices = (((), ("rdma_en5",)), (("rdma_en2",), ()))
    assert rendezvous(UID, formation(backend="jaccl"), seats).devices == devices
    assert rendezvous(UID, formation(backend="ring"), seats).devices is None


def test_a_mac_without_an_address_and_too_many_links_are_refused() -> None:
    with pytest.raises(ValueError, match="no address"):
        rendezvous(UID, formation(), (PAIR[0], Seat(node="b")))
    with pytest.raises(ValueError, match=f"32 links need 34 ports, and an epoch has {WIDTH}"):
        rendezvous(UID, formation(), [seat(at, links=2) for at in range(MOST_RANKS)])


@st.composite
def tables(draw: st.DrawFn) -> list[Seat]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=MOST_RANKS))
    while sum(sizes) > WIDTH - 2:
        sizes = [max(1, links - 1) for links in sizes]
    return [seat(at, links=links) for at, links in enumerate(sizes)]


@settings(max_examples=samples(300))
@given(
    seats=tables(),
    uid=st.uuids().map(str),
    epoch=st.integers(1, 10**9),
    port=st.integers(1024, 57_000),
)
def test_every_rank_derives_the_same_ports_without_overlaps(
    seats: list[Seat], uid: str, epoch: int, port: int
) -> None:
    found = rendezvous(uid, formation(epoch, port=port), seats)
    assert found == rendezvous(uid, formation(epoch, port=port), list(seats))
    taken = [found.control[1], found.coordinator[1], *ports(found.hosts)]
    assert len(set(taken)) == len(taken)
    window = (found.control[1] - port) // WIDTH
    assert 0 <= window < WINDOWS
    assert {(one - port) // WIDTH for one in taken} == {window}
    assert max(taken) < 2**16
    assert [len(rank) for rank in found.hosts] == [len(one.addresses) for one in seats]
    for rank, one in zip(found.hosts, seats, strict=True):
        assert tuple(address.rpartition(":")[0] for address in rank) == one.addresses


@settings(max_examples=samples(200))
@given(uid=st.uuids().map(str), epoch=st.integers(1, 10**6), later=st.integers(1, WINDOWS - 1))
def test_the_next_epochs_take_other_ports(uid: str, epoch: int, later: int) -> None:
    now, after = (rendezvous(uid, formation(epoch + more), PAIR) for more in (0, later))
    assert set(ports(now.hosts)).isdisjoint(ports(after.hosts))
    assert now.control != after.control
