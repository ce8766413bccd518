"""The keeper of a floating address: when it has the address, what it announces, and what it hears."""

import socket
import struct
from ipaddress import IPv4Address, IPv4Interface
from types import SimpleNamespace

import psutil
import pytest

from gateway.floating_address import arp, interfaces
from gateway.floating_address.interfaces import FloatingAddressError
from gateway.floating_address.keeper import AddressKeeper
from gateway.floating_address.links import missing_capabilities

ADDRESS, OWN, OTHER = IPv4Address("192.168.1.50"), b"\x02\0\0\0\0\1", b"\x02\0\0\0\0\2"


class RecordingLink:
    """A link whose address and announcements are only recorded."""

    def __init__(self) -> None:
        self.has_address = False
        self.lifetimes: list[int] = []
        self.announced = 0
        self.heard: list[str] = []
        self.refuses = ""

    def add(self, lifetime_s: int) -> None:
        if self.refuses:
            raise FloatingAddressError(self.refuses)
        self.has_address = True
        self.lifetimes.append(lifetime_s)

    def remove(self) -> None:
        self.has_address = False

    def announce(self) -> None:
        self.announced += 1

    def is_held(self) -> bool:
        return self.has_address

    def claims(self) -> list[str]:
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def link() -> RecordingLink:
    return RecordingLink()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(link: RecordingLink, said: list[str]) -> AddressKeeper:
    return AddressKeeper(link, said.append)


def test_the_address_goes_when_it_is_not_renewed(
    keeper: AddressKeeper, link: RecordingLink, said: list[str]
) -> None:
    keeper.handle("hold 2.5 lease", 0.0)
    keeper.tick(2.4)
    assert link.is_held()
    keeper.handle("hold 2.5 lease", 2.4)
    keeper.tick(4.8)
    assert link.is_held()
    keeper.tick(4.9)
    assert (link.is_held(), said) == (False, ["held", "released"])
    # The kernel's own timer is a little longer, for when the keeper is killed as well.
    assert link.lifetimes == [4, 4]


def test_the_end_of_the_gateway_removes_only_what_this_keeper_holds(
    keeper: AddressKeeper, link: RecordingLink
) -> None:
    link.has_address = True  # another gateway of this machine has it
    keeper.close()
    assert link.is_held()
    keeper.handle("release", 0.0)  # the gateway knows that nobody here has it
    assert not link.is_held()
    keeper.handle("hold 2 lease", 0.0)
    keeper.close()
    assert not link.is_held()


def test_without_a_lease_the_address_is_kept_but_never_taken(
    keeper: AddressKeeper, link: RecordingLink
) -> None:
    keeper.handle("hold 2 alone", 0.0)
    assert not link.is_held()
    keeper.handle("hold 2 lease", 0.0)
    keeper.handle("hold 2 alone", 1.0)
    keeper.tick(2.9)
    assert link.is_held()


def test_the_holder_without_a_lease_gives_way_to_another_machine(
    keeper: AddressKeeper, link: RecordingLink, said: list[str]
) -> None:
    keeper.handle("hold 3 lease", 0.0)
    before = link.announced
    link.heard = [OTHER.hex(":")]
    keeper.tick(0.5)
    assert (link.is_held(), link.announced) == (True, before + 1)
    keeper.handle("hold 3 alone", 0.6)
    keeper.tick(0.7)
    assert link.is_held()
    link.heard = [OTHER.hex(":")]
    keeper.tick(0.8)
    assert not link.is_held()
    assert said[-2:] == ["claimed 02:00:00:00:00:02", "released"]
    keeper.handle("hold 3 alone", 0.9)
    assert not link.is_held()


def test_a_new_holder_announces_itself_soon_and_then_every_second(
    keeper: AddressKeeper, link: RecordingLink
) -> None:
    for tenth in range(51):
        keeper.handle("hold 3 lease", tenth / 10)
        keeper.tick(tenth / 10)
    assert 7 <= link.announced <= 8
    keeper.handle("hold 9 alone", 5.1)
    before = link.announced
    keeper.tick(8.0)
    assert link.announced == before


def test_an_address_that_cannot_be_added_is_reported(
    keeper: AddressKeeper, link: RecordingLink, said: list[str]
) -> None:
    link.refuses = "`ip address replace` failed: Operation not permitted"
    keeper.handle("hold 3 lease", 0.0)
    keeper.handle("dance", 0.0)
    assert said == [f"failed {link.refuses}", "failed the keeper does not know: dance"]


def test_claims_are_read_from_arp_frames() -> None:
    for frame in arp.announcements(ADDRESS, OTHER):
        assert arp.claimant(frame, ADDRESS, OWN) == "02:00:00:00:00:02"
        assert arp.claimant(frame + b"\0" * 18, ADDRESS, OWN) == "02:00:00:00:00:02"
        assert arp.claimant(frame, ADDRESS, OTHER) == ""
        assert arp.claimant(frame, IPv4Address("192.168.1.51"), OWN) == ""
        assert [arp.claimant(frame[:at], ADDRESS, OWN) for at in range(42)] == [""] * 42


def test_frames_are_read_from_a_packet_filter_buffer_of_macos() -> None:
    frames = [*arp.announcements(ADDRESS, OTHER), b"short"]
    buffer = b""
    for frame in frames:
        head = struct.pack("=iiIIH", 1, 2, len(frame), len(frame), 20).ljust(20, b"\0")
        buffer += (head + frame).ljust((20 + len(frame) + 3) // 4 * 4, b"\0")
    assert list(arp.bpf_frames(buffer)) == frames
    assert list(arp.bpf_frames(buffer[:80])) == frames[:1]
    assert list(arp.bpf_frames(b"\xff" * 64)) == []


def test_the_interface_is_the_one_in_whose_network_the_address_is() -> None:
    loopback, tunnel, up, down = "lo", "tun0", "en0", "en5"
    addresses = {
        loopback: [nic("127.0.0.1", "255.0.0.0"), link_address("00:00:00:00:00:00")],
        tunnel: [nic("10.9.0.2", "255.255.255.255")],
        up: [
            link_address("02:00:00:00:00:01"),
            nic("192.168.1.7", "255.255.255.0"),
            nic("192.168.1.50", "255.255.255.255"),
        ],
        down: [link_address("02:00:00:00:00:09")],
    }
    known = interfaces.ethernet_interfaces(addresses, {loopback, tunnel, up})
    address = interfaces.parse_address("192.168.1.50/24")
    chosen = interfaces.choose_interface(known, address, "")
    assert (chosen.name, chosen.mac, len(known)) == (up, OWN, 1)
    assert chosen.addresses[0] == IPv4Interface("192.168.1.7/24")
    with pytest.raises(FloatingAddressError, match=f"that are up: {up}"):
        interfaces.choose_interface(known, interfaces.parse_address("10.0.0.1"), "")
    with pytest.raises(FloatingAddressError, match="--floating-interface en9: there is no such"):
        interfaces.choose_interface(known, address, "en9")


def nic(address: str, netmask: str) -> SimpleNamespace:
    return SimpleNamespace(family=socket.AF_INET, address=address, netmask=netmask)


def link_address(address: str) -> SimpleNamespace:
    return SimpleNamespace(family=psutil.AF_LINK, address=address, netmask=None)


@pytest.mark.parametrize(
    "text",
    ["", "gateway", "192.168.1.0/24", "192.168.1.255/24", "127.0.0.1", "224.0.0.1", "fd00::5/64"],
)
def test_what_is_no_address_of_one_machine_is_refused(text: str) -> None:
    with pytest.raises(FloatingAddressError, match=r"192\.168\.1\.50/24"):
        interfaces.parse_address(text)


@pytest.mark.parametrize(
    ("effective", "missing"),
    [
        ("000001ffffffffff", []),
        ("0000000000003000", []),
        ("0000000000001000", ["CAP_NET_RAW"]),
        ("0000000000000000", ["CAP_NET_ADMIN", "CAP_NET_RAW"]),
    ],
)
def test_missing_capabilities_are_named(effective: str, missing: list[str]) -> None:
    status = f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{effective}\n"
    assert missing_capabilities(status) == missing
