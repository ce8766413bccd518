"""When only a restart helps: an engine that does not die, a port that stays down."""

import pytest

from nodeagent import conditions
from nodeagent.breakage import Breakages, Broken
from nodeagent.conditions import Past
from schemas.fabric import NodeFabric, RdmaDevice, ThunderboltPort
from schemas.meta import find_condition
from tests.nodeagent.grouping import NOW
from tests.nodeagent.readings import WELL


def cables(state: str, *, peer: str = "other") -> NodeFabric:
    return NodeFabric(
        ports=(ThunderboltPort(receptacle="1", interface="en5", peer=peer),),
        rdma=(RdmaDevice(name="rdma_en5", interface="en5").model_copy(update={"state": state}),),
    )


@pytest.mark.parametrize(
    ("fabric", "used", "at_s", "reason"),
    [
        (cables("Down"), "rdma_en5", 61, "RdmaDown"),
        (cables("Down"), "rdma_en5", 59, ""),
        (cables("Down"), "rdma_en6", 61, ""),
        (cables("Down", peer=""), "rdma_en5", 61, ""),
        (cables("Active"), "rdma_en5", 61, ""),
        (cables("Unknown"), "rdma_en5", 61, ""),
        (None, "rdma_en5", 61, ""),
    ],
)
def test_a_port_that_stays_down_though_its_cable_is_in(
    fabric: NodeFabric | None, used: str, at_s: float, reason: str
) -> None:
    seen = Breakages()
    seen.ended_badly([used], 0)
    found = seen.look(fabric, [], at_s)
    assert (found.reason if found is not None else "") == reason


def test_a_port_that_came_back_is_forgiven() -> None:
    seen = Breakages()
    seen.ended_badly(["rdma_en5"], 0)
    assert seen.look(cables("Active"), [], 10) is None
    assert seen.look(cables("Down"), [], 100) is None


def test_an_engine_that_does_not_die() -> None:
    found = Breakages().look(None, ["qwen-0"], 0)
    assert found is not None
    assert found.reason == "ProcessUndying"
    assert "qwen-0" in found.message


def test_what_is_broken_is_the_nodes_condition_until_it_is_mended() -> None:
    broken = Broken(reason="ProcessUndying", message="restart this machine")
    past = conditions.judge(WELL, Past(), NOW, has_engines=True, broken=broken)
    said = find_condition(past.conditions, "NeedsReboot")
    assert said is not None
    assert (said.status.value, said.reason, said.message) == (
        "True",
        "ProcessUndying",
        "restart this machine",
    )
    past = conditions.judge(WELL, past, NOW, has_engines=True)
    said = find_condition(past.conditions, "NeedsReboot")
    assert said is not None
    assert said.status.value == "False"
