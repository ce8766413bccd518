"""The fabric of a group: faults of cables and settings, and the devices of each rank."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.groups.fabric import (
    FabricFault,
    assign_seats,
    find_faults,
    find_ring,
    group_cables,
    ring_pairs,
)
from schemas.formation import Formation, Seat, rendezvous
from schemas.node import FabricInterface, MlxBuild, NodeFabric, ThunderboltPort
from schemas.shardgroup import Backend, GroupMember, ShardGroupSpec
from tests.support.golden_cases import Golden
from tests.support.reconciler_fabric import (
    Mac,
    group,
    mac,
    meshed,
    ringed,
    with_device,
    with_fabric,
    with_port,
    with_status,
)
from tests.support.sampling import samples

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def seated(backend: Backend, macs: list[Mac]) -> tuple[Seat, ...]:
    seats = assign_seats(group(backend, macs), macs)
    assert not isinstance(seats, FabricFault), seats.message
    return seats


def test_a_ring_has_the_members_addresses_or_the_agents() -> None:
    macs = [mac("a", [], number=1), mac("b", [], number=2)]
    spec = ShardGroupSpec(
        members=(GroupMember(node="a", addresses=("192.168.1.1",)), GroupMember(node="b")),
        allow_unencrypted_ring=True,
    )
    assert assign_seats(spec, macs) == (
        Seat(node="a", addresses=("192.168.1.1",)),
        Seat(node="b", addresses=("192.168.1.2",)),
    )


def test_two_macs_of_jaccl() -> None:
    assert seated("jaccl", meshed(2)) == (
        Seat(node="mac-0", addresses=("192.168.1.0",), rdma=((), ("rdma_en2",))),
        Seat(node="mac-1", addresses=("192.168.1.1",), rdma=(("rdma_en2",), ())),
    )


def with_own_address(macs: list[Mac]) -> list[Mac]:
    """Return the Macs with the same address on both ends of a cable."""
    ethernet, _, *others = macs[0][1].fabric.interfaces
    same = FabricInterface(name="en2", address="10.1.1.1")
    return with_fabric(macs, 0, interfaces=(ethernet, same, *others))


OLD_BUILD = MlxBuild(tag="macosx_14_0_arm64", minimum_system="14.0")
BREAKS: dict[str, Callable[[list[Mac]], list[Mac]]] = {
    "Linux": lambda m: with_status(m, 1, os="Linux"),
    "no report": lambda m: with_status(m, 1, fabric=NodeFabric()),
    "Thunderbolt 4": lambda m: with_fabric(m, 1, thunderbolt=4),
    "an old macOS": lambda m: with_fabric(m, 1, is_rdma_enabled=None, rdma=()),
    "RDMA is off": lambda m: with_fabric(m, 1, is_rdma_enabled=False, rdma=()),
    "no device at all": lambda m: with_fabric(m, 1, rdma=()),
    "MLX for macOS 14": lambda m: with_status(m, 1, mlx_build=OLD_BUILD),
    "RDMA is off, and MLX for macOS 14": lambda m: with_fabric(
        with_status(m, 1, mlx_build=OLD_BUILD), 1, is_rdma_enabled=False, rdma=()
    ),
    "Thunderbolt 4, and MLX for macOS 14": lambda m: with_fabric(
        with_status(m, 1, mlx_build=OLD_BUILD), 1, thunderbolt=4
    ),
    "another build": lambda m: with_fabric(m, 2, os_build="25C56"),
    "an unknown build": lambda m: with_fabric(m, 2, os_build=""),
    "a slow cable": lambda m: with_port(m, 0, speed_gbps=40),
    "a port is down": lambda m: with_device(m, 0, state="Down"),
    "the port of a Studio": lambda m: with_status(with_device(m, 0, state="Down"), 0, machine="Mac15,14"),
    "a bridge": lambda m: with_port(m, 0, is_bridged=True),
    "no address on a cable": lambda m: with_fabric(m, 0, interfaces=m[0][1].fabric.interfaces[:1]),
    "a port without device": lambda m: with_fabric(m, 0, rdma=m[0][1].fabric.rdma[1:]),
    "both ends the same": with_own_address,
}  # fmt: skip
CROSSED = [ringed(4)[at] for at in (0, 2, 1, 3)]
CABLES: dict[str, tuple[Backend, list[Mac]]] = {
    "jaccl on a ring of four": ("jaccl", ringed(4)),
    "a ring in another order": ("jaccl-ring", CROSSED),
    "no cable": ("jaccl", [mac("a", ["z"], number=1), mac("b", ["z"], number=2)]),
}


def faults(backend: Backend, macs: list[Mac]) -> list[str]:
    spec = group(backend, macs)
    found = list(find_faults(spec, macs))
    assert assign_seats(spec, macs) == found[0]
    return [f"{fault.reason}: {fault.message}" for fault in found]


def test_missing_settings_and_cables_are_named(golden: Golden) -> None:
    mesh = [(case, faults("jaccl", change(meshed(3)))) for case, change in BREAKS.items()]
    ring = [(case, faults("jaccl-ring", change(ringed(3)))) for case, change in BREAKS.items()]
    cables = [(case, faults(backend, macs)) for case, (backend, macs) in CABLES.items()]
    sections = {"A mesh of three Macs": mesh, "A ring of three Macs": ring, "Cables": cables}
    golden.check("reconciler/fabric_faults.txt", sections)


def test_a_chip_that_is_not_listed_does_rdma_if_rdma_ctl_says_so() -> None:
    macs = with_fabric(meshed(2), 1, thunderbolt=0)
    assert seated("jaccl", macs) == seated("jaccl", meshed(2))
    off = with_fabric(macs, 1, is_rdma_enabled=None, rdma=())
    assert faults("jaccl", off)[0].startswith("NoRdma: mac-1 has no working rdma_ctl")


def test_one_end_that_saw_the_cable_is_enough() -> None:
    macs = with_port(meshed(2), 0, peer="")
    assert seated("jaccl", macs)[0].rdma == ((), ("rdma_en2",))


def test_a_dead_cable_besides_a_good_one_is_skipped() -> None:
    macs = with_device(ringed(2, wires=2), 1, state="Down")
    assert [seat.rdma for seat in seated("jaccl", macs)] == [
        ((), ("rdma_en3",)),
        (("rdma_en3",), ()),
    ]


def test_a_ring_uses_as_many_cables_everywhere() -> None:
    three = ringed(3, wires=2)
    for seat, rank in zip(seated("jaccl-ring", three), range(3), strict=True):
        assert [len(devices) for devices in seat.rdma] == [2 * (at != rank) for at in range(3)]
    for seat in seated("jaccl-ring", with_device(three, 0, state="Down")):
        assert sorted(map(len, seat.rdma)) == [0, 1, 1]
    assert max(len(some) for some in seated("jaccl-ring", ringed(2, wires=6))[0].rdma) == 4


GIVEN = (
    pytest.param("rdma_en2", "rdma_en2", [], id="as-cabled"),
    pytest.param("rdma_en9", "rdma_en2", ["NoDevice"], id="renamed-at-a-restart"),
    pytest.param("rdma_en3", "rdma_en2", ["WrongCable", "WrongCable"], id="another-port"),
    pytest.param("rdma_en2", "", ["DevicesDiffer"], id="one-end-only"),
)  # fmt: skip


@pytest.mark.parametrize(("here", "there", "reasons"), GIVEN)
def test_devices_that_a_person_named(here: str, there: str, reasons: list[str]) -> None:
    macs = meshed(3)
    spec = ShardGroupSpec(
        backend="jaccl",
        members=(
            GroupMember(node="mac-0", rdma={"mac-1": (here,)}),
            GroupMember(node="mac-1", rdma={"mac-0": (there,)} if there else {}),
            GroupMember(node="mac-2"),
        ),
        allow_unencrypted_ring=True,
    )
    assert [fault.reason for fault in find_faults(spec, macs)] == reasons
    if not reasons:
        assert assign_seats(spec, macs) == seated("jaccl", macs)


@pytest.mark.parametrize(
    ("changes", "member", "reason"),
    [
        pytest.param({"address": ""}, {}, "NoAddress", id="none"),
        pytest.param({"address": "10.9.9.9"}, {}, "NotItsAddress", id="moved"),
        pytest.param({}, {"addresses": ("10.9.9.9",)}, "NotItsAddress", id="misspelt"),
        pytest.param({"address": "127.0.0.1", "hardware_uuid": "x"}, {}, "LoopbackAddress", id="loopback"),
        pytest.param({"address": "127.0.0.1"}, {}, "", id="loopback-of-one-machine"),
        pytest.param({"address": "mac-0.local"}, {}, "", id="a-name"),
        pytest.param({"address": "fe80::1"}, {}, "", id="ipv6-is-not-reported"),
    ],
)  # fmt: skip
def test_addresses_that_no_rank_could_take(
    changes: dict[str, object], member: dict[str, object], reason: str
) -> None:
    macs = with_status(meshed(2), 0, **changes)
    spec = group("ring", macs, **member)
    assert [fault.reason for fault in find_faults(spec, macs)] == [reason] * bool(reason)


@pytest.mark.parametrize(
    ("backend", "count", "own", "meeting"),
    [
        pytest.param("ring", 3, "10.0.1.1", "192.168.1.0", id="a-cable-is-no-place-for-three"),
        pytest.param("ring", 2, "10.0.1.1", "", id="two-are-both-at-the-cable"),
        pytest.param("jaccl", 2, "10.0.1.1", "192.168.1.0", id="rdma-does-not-share-its-cable"),
        pytest.param("ring", 3, "192.168.1.0", "", id="ethernet-is"),
    ],
)
def test_where_all_ranks_meet(backend: Backend, count: int, own: str, meeting: str) -> None:
    macs = meshed(count)
    spec = group(backend, macs, addresses=(own,))
    found = assign_seats(spec, macs)
    assert not isinstance(found, FabricFault)
    assert [seat.meeting for seat in found] == [meeting] + [""] * (count - 1)
    made = rendezvous("uid", Formation(group="g", backend=backend, formed_at=NOW), found)
    assert made.control[0] == made.coordinator[0] == (meeting or own)
    assert made.hosts[0][0].startswith(own)
    if meeting:
        lonely = with_status(macs, 0, address="127.0.0.1")
        assert [fault.reason for fault in find_faults(spec, lonely)] == ["NoMeetingPlace"]


BRIDGE = FabricInterface(name="bridge0", address="10.7.0.1", is_thunderbolt=True)


@pytest.mark.parametrize(
    ("backend", "count", "address", "changes", "shared"),
    [
        pytest.param("ring", 2, "10.0.1.1", {}, "", id="a-cable"),
        pytest.param("ring", 2, "", {}, "192.168.1.0", id="the-agents-address"),
        pytest.param("ring", 2, "192.168.1.0", {}, "192.168.1.0", id="ethernet"),
        pytest.param("ring", 3, "10.0.1.1", {}, "192.168.1.0", id="three-meet-on-the-ethernet"),
        pytest.param("jaccl", 2, "10.0.1.1", {}, "192.168.1.0", id="jaccl-meets-on-the-ethernet"),
        pytest.param("ring", 3, "10.7.0.1", {"fabric": NodeFabric(interfaces=(BRIDGE,))}, "", id="a-bridge"),
        pytest.param(
            "ring", 2, "169.254.3.4", {"fabric": NodeFabric(interfaces=(FabricInterface(name="en0", address="169.254.3.4"),))},
            "169.254.3.4", id="link-local-on-an-ethernet",
        ),
        pytest.param("ring", 2, "169.254.3.4", {"fabric": NodeFabric()}, "", id="link-local"),
        pytest.param("ring", 2, "10.0.0.9", {"fabric": NodeFabric()}, "10.0.0.9", id="unknown"),
        pytest.param("ring", 2, "", {"address": "mac-0.local"}, "mac-0.local", id="a-name"),
        pytest.param("ring", 2, "", {"address": "fe80::1"}, "fe80::1", id="ipv6"),
    ],
)  # fmt: skip
def test_ranks_listen_on_point_to_point_addresses_only(
    backend: Backend, count: int, address: str, changes: dict[str, object], shared: str
) -> None:
    macs = with_status(meshed(count), 0, **changes)
    allowed = group(backend, macs, addresses=(address,) if address else ())
    others = tuple(
        member.model_copy(update={"addresses": (f"10.{at}.1.1",)})
        for at, member in enumerate(allowed.members)
        if at
    )
    allowed = allowed.model_copy(update={"members": (allowed.members[0], *others)})
    assert not list(find_faults(allowed, macs))
    refused = allowed.model_copy(update={"allow_unencrypted_ring": False})
    faults = list(find_faults(refused, macs))
    assert [fault.reason for fault in faults] == ["NotPointToPoint"] * bool(shared)
    if shared:
        assert f"{shared} of mac-0 is not known" in faults[0].message
        assert "addresses" in faults[0].message
        assert "allowUnencryptedRing" in faults[0].message
        assert assign_seats(refused, macs) == faults[0]
    if shared == "192.168.1.0":
        assert "(mac-0 has 10.0.1.1" in faults[0].message


def test_ranks_on_one_machine_use_loopback() -> None:
    macs = [
        (name, status.model_copy(update={"address": "127.0.0.1"})) for name, status in meshed(2)
    ]
    spec = group("ring", macs).model_copy(update={"allow_unencrypted_ring": False})
    assert not list(find_faults(spec, macs))


def test_sizes_that_jaccl_does_not_take() -> None:
    selecting = ShardGroupSpec.model_validate_json(
        '{"selector": {}, "size": 2, "backend": "jaccl", "allowUnencryptedRing": true}'
    )
    assert [fault.reason for fault in find_faults(selecting, meshed(1))] == ["TooFew"]
    assert [fault.reason for fault in find_faults(selecting, meshed(9))] == ["TooMany"]


@settings(max_examples=samples(100))
@given(count=st.integers(2, 8), ring=st.booleans(), wires=st.integers(1, 3), order=st.randoms())
def test_every_device_leads_to_the_rank_it_is_named_for(
    count: int, ring: bool, wires: int, order: random.Random
) -> None:
    macs = ringed(count, wires=wires) if ring else meshed(count)
    backend: Backend = "jaccl-ring" if ring else "jaccl"
    if not ring:
        order.shuffle(macs)
    seats = seated(backend, macs)
    by_name = dict(macs)
    ends: dict[str, dict[str, ThunderboltPort]] = {
        name: {f"rdma_{port.interface}": port for port in status.fabric.ports}
        for name, status in macs
    }
    neighbours = {frozenset(pair) for pair in ring_pairs([name for name, _ in macs])}
    for (i, one), (j, other) in combinations(enumerate(seats), 2):
        here, there = one.rdma[j], other.rdma[i]
        assert len(here) == len(there)
        assert bool(here) == (not ring or frozenset((one.node, other.node)) in neighbours)
        for a, b in zip(here, there, strict=True):
            assert ends[one.node][a].peer == ends[other.node][b].domain
    assert all(seat.rdma[rank] == () for rank, seat in enumerate(seats))
    assert len(group_cables(group(backend, macs), macs)) == (
        len(neighbours) if ring else count * (count - 1) // 2
    )
    assert {seat.node for seat in seats} == set(by_name)
    made = rendezvous("uid", Formation(group="g", backend=backend, formed_at=NOW), seats)
    assert made.devices == tuple(seat.rdma for seat in seats)


@given(count=st.integers(3, 7), data=st.data())
def test_a_circle_is_found_wherever_there_is_one(count: int, data: st.DataObject) -> None:
    names = [str(number) for number in range(count)]
    ring = data.draw(st.permutations(names))
    extra = data.draw(st.sets(st.sampled_from(list(map(frozenset, combinations(names, 2))))))
    cabled = {frozenset(pair) for pair in ring_pairs(ring)}
    found = find_ring(names, cabled | extra)
    assert all(frozenset(pair) in cabled | extra for pair in ring_pairs(found))
    assert find_ring(names, cabled - {frozenset(ring[:2])}) == ()
