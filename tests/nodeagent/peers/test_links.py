"""The choice of the link to another Mac: a cable, then a wire, then Wi-Fi, as far as both are on the network."""

import pytest
from pydantic import ValidationError

from nodeagent.peers.links import Route, link_rate, own_links, routes, without_cables
from schemas.blob_share import ModelLink, ModelOffer
from schemas.node import FabricInterface, NodeFabric, ThunderboltPort

WIFI = FabricInterface(name="en0", address="192.168.1.5", prefix_length=24, is_wireless=True)
WIRE = FabricInterface(name="en7", address="10.0.0.5", prefix_length=16)
CABLE = FabricInterface(
    name="bridge0", address="169.254.9.5", prefix_length=16, is_thunderbolt=True
)
OTHER_CABLE = FabricInterface(name="en3", address="169.254.8.8", prefix_length=16)
PORTS = (ThunderboltPort(receptacle="1", interface="en3"),)

WIFI_URL, WIRE_URL = "https://192.168.1.9:4001", "https://10.0.3.9:4001"
CABLE_URL = "https://169.254.77.9:4001"
LINKS = (
    ModelLink(url=WIFI_URL, medium="Wireless"),
    ModelLink(url=WIRE_URL, medium="Wired"),
    ModelLink(url=CABLE_URL, medium="Thunderbolt"),
)


def chosen(own: tuple[FabricInterface, ...], url: str = WIFI_URL, failed: str = "") -> list[Route]:
    offer = ModelOffer(url=url, links=LINKS)
    return routes(offer, NodeFabric(interfaces=own, ports=PORTS), lambda one: one == failed)


@pytest.mark.parametrize(("own", "expected"), [
    pytest.param((WIFI,), [Route(WIFI_URL, 2)], id="Wi-Fi alone"),
    pytest.param((WIFI, WIRE), [Route(WIRE_URL, 1), Route(WIFI_URL, 2)], id="a wire first"),
    pytest.param((WIFI, CABLE, WIRE), [Route(CABLE_URL, 0), Route(WIRE_URL, 1), Route(WIFI_URL, 2)], id="a cable before all"),
    pytest.param((WIFI, CABLE, OTHER_CABLE), [Route(WIFI_URL, 2)], id="two cables that could lead there"),
    pytest.param((), [Route(WIFI_URL, 1)], id="the offer's address if nothing is known"),
])  # fmt: skip
def test_the_best_link_that_both_have_is_taken(
    own: tuple[FabricInterface, ...], expected: list[Route]
) -> None:
    assert chosen(own) == expected


def test_a_cable_that_failed_is_left_out_and_the_offers_address_never_is() -> None:
    assert chosen((WIFI, CABLE), failed=CABLE_URL) == [Route(WIFI_URL, 2)]
    assert chosen((WIFI, CABLE), failed=WIFI_URL) == [Route(CABLE_URL, 0), Route(WIFI_URL, 2)]


def test_a_shard_group_keeps_its_cables() -> None:
    fabric = NodeFabric(interfaces=(WIFI, CABLE, OTHER_CABLE, WIRE), ports=PORTS)
    assert without_cables(fabric).interfaces == (WIFI, WIRE)


def test_a_node_offers_the_addresses_whose_interface_it_knows() -> None:
    fabric = NodeFabric(interfaces=(WIFI, OTHER_CABLE), ports=PORTS)
    urls = ("https://192.168.1.5:4001", "https://169.254.8.8:4001", "https://127.0.0.1:4001")
    assert [(link.url, link.medium) for link in own_links(fabric, urls)] == [
        (urls[0], "Wireless"),
        (urls[1], "Thunderbolt"),
    ]


FAST = FabricInterface(name="en8", address="10.0.0.6", prefix_length=16, speed_mbps=10_000)


@pytest.mark.parametrize(("address", "bytes_per_s"), [
    pytest.param(FAST.address, 1.25e9, id="as the interface says"),
    pytest.param(WIRE.address, 125e6, id="gigabit Ethernet"),
    pytest.param(WIFI.address, 50e6, id="Wi-Fi"),
    pytest.param(CABLE.address, None, id="a bridge of cables"),
    pytest.param(OTHER_CABLE.address, None, id="a cable"),
    pytest.param("127.0.0.1", None, id="nothing is known"),
])  # fmt: skip
def test_requests_have_a_claim_to_networks_that_are_no_cables(
    address: str, bytes_per_s: float | None
) -> None:
    fabric = NodeFabric(interfaces=(WIFI, WIRE, FAST, CABLE, OTHER_CABLE), ports=PORTS)
    assert link_rate(fabric, address) == bytes_per_s


@pytest.mark.parametrize("url", [
    "https://mac-1:4001", "http://10.0.0.1:4001", "https://10.0.0.1:4001/x", "https://1.2.3.256:1",
    "https://1.2.3.04:1",
])  # fmt: skip
def test_a_link_is_an_https_address_of_four_numbers(url: str) -> None:
    with pytest.raises(ValidationError):
        ModelLink(url=url, medium="Wired")
