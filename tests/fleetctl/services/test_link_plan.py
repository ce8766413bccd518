"""The plan of `fabric setup`: ports that cannot get the network of their cable."""

from dataclasses import replace
from ipaddress import IPv4Network

import pytest

from fleetctl.services.changes import NetworkServiceChange
from fleetctl.services.link_plan import LinkState, plan_links
from nodeagent.hardware.macos_network import NetworkService
from schemas.cable_address import cable_interface
from schemas.node import ThunderboltPort

PORT = ThunderboltPort(receptacle="1", interface="en1", domain="A", peer="B")
STATE = LinkState(ports=(PORT,), services=(), running={}, stored={})
NETWORK = cable_interface("A", "B").network
BRIDGED = replace(STATE, running={"bridge1": ("en1", "en9")})
BY_HAND = NetworkService(name="Bridge", port="Bridge", device="bridge0", method="Manual", address="10.0.0.1")  # fmt: skip
# Two cables of one Mac for which the hash has one network would need a search; one cable twice is the same.
TWICE = replace(STATE, ports=(PORT, PORT.model_copy(update={"receptacle": "2", "interface": "en2"})))  # fmt: skip


@pytest.mark.parametrize(
    ("state", "note", "addresses"),
    [
        pytest.param(STATE, "", [f"{NETWORK[1]}/30"], id="free"),
        pytest.param(
            replace(STATE, networks=(("en0", IPv4Network("10.0.0.0/8")),)),
            "en0 is in the network 10.0.0.0/8 already. Run `sudo fleetctl fabric setup --salt WORD`",
            [""], id="of-another-network",
        ),
        pytest.param(
            replace(STATE, networks=(("en1", NETWORK),)), "", [f"{NETWORK[1]}/30"], id="its-own"
        ),
        pytest.param(TWICE, f"en1 is in the network {NETWORK} already", [f"{NETWORK[1]}/30", ""], id="two-cables"),
        pytest.param(
            replace(STATE, ports=(PORT, PORT.model_copy(update={"domain": "B", "peer": "A", "interface": "en2"}))),
            "its cable leads to this Mac itself", ["", ""], id="loop",
        ),
        pytest.param(
            replace(STATE, running={"bridge0": ("en1",)}, services=(BY_HAND,)),
            'bridge0 of en1 stays: its network service "Bridge" has the address 10.0.0.1 by hand',
            [], id="of-a-bridge-by-hand",
        ),
        pytest.param(BRIDGED, "bridge1 of en1, en9 stays: it also has en9", [], id="of-another-bridge"),
    ],
)  # fmt: skip
def test_a_port_without_its_network_is_named(
    state: LinkState, note: str, addresses: list[str]
) -> None:
    plan = plan_links(state, (), salt=None, is_replacing=False)
    assert note in " ".join(plan.notes)
    assert bool(note) == bool(plan.notes)
    services = [change for change in plan.changes if isinstance(change, NetworkServiceChange)]
    assert [service.address for service in services] == addresses
    networks = [link.here.network for link in plan.links]
    assert len(set(networks)) == len(networks)


def test_a_salt_is_kept_by_later_runs() -> None:
    first = plan_links(STATE, (), salt="b", is_replacing=False)
    again = plan_links(STATE, first.changes, salt=None, is_replacing=False)
    assert first.links[0].here.network != NETWORK
    assert again == first
