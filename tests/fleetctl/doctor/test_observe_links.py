"""Connections over cables with the source bound: real sockets between addresses of the loopback interface."""

from dataclasses import replace

from fleetctl.doctor.observe_links import links_from, local_addresses, probe_links
from insight.doctor.cable_checks import LinkProbe, check_links
from schemas.meta import ObjectMeta
from schemas.node import Node
from tests.support.ports import free_port
from tests.support.reconciler_fabric import meshed

LINK = LinkProbe(
    node="mac-0", other="mac-1", interface="en2", source="127.0.0.1", target="127.0.0.1", port=1
)


def test_links_are_those_of_this_machine_with_addresses_at_both_ends() -> None:
    nodes = [Node(metadata=ObjectMeta(name=name), status=status) for name, status in meshed(3)]
    here = frozenset({"192.168.1.0", "10.0.1.1"})  # mac-0, whose second cable is not up
    found = [
        (probe.node, probe.other, probe.source, probe.target) for probe in links_from(nodes, here)
    ]
    assert found == [("mac-0", "mac-1", "10.0.1.1", "10.1.1.1")]
    assert list(links_from(nodes, frozenset())) == []


async def test_a_cable_works_if_the_other_end_answers_or_refuses() -> None:
    assert "127.0.0.1" in local_addresses()
    closed = replace(LINK, port=free_port())
    (probe,) = await probe_links([closed])
    assert probe.error == ""
    (finding,) = check_links([probe])
    assert (finding.level, finding.message) == (
        "OK",
        "1 cable of this machine can be connected over",
    )


async def test_a_cable_that_leads_nowhere_is_told_with_its_addresses() -> None:
    # The loopback interface has no route to other networks (192.0.2.0/24 is for documentation).
    (probe,) = await probe_links([replace(LINK, target="192.0.2.7")])
    assert "errno" in probe.error
    (finding,) = check_links([probe])
    assert (finding.level, finding.node) == ("WARN", "mac-0")
    assert "mac-1 is not reached over en2, from 127.0.0.1 to 192.0.2.7: " in finding.message
    assert "ping -c 3 -S 127.0.0.1 192.0.2.7" in finding.advice
