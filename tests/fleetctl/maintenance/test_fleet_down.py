"""The plan of `fleetctl down --fleet`. The command itself: tests/fleet/test_down_fleet.py."""

from collections.abc import Mapping

import pytest

from fleetctl.maintenance.fleet_down import plan_lines, plan_stages
from fleetctl.maintenance.mac_release import MacState, RunningPart


def mac(**parts: int | None) -> MacState:
    return MacState(
        prefix="/opt/mlx-fleet",
        current="0.1.0",
        installed=("0.1.0",),
        needs_root=True,
        parts={name: RunningPart(pid=pid) for name, pid in parts.items()},
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param(
            {"b": mac(nodeagent=4), "a": mac(etcd=1, nodeagent=2, gateway=3, reconciler=5)},
            [
                ("gateway", ("a",)),
                ("reconciler", ("a",)),
                ("nodeagent", ("a", "b")),
                ("etcd", ("a",)),
            ],
            id="gateways-first-etcd-last",
        ),
        pytest.param(
            {"a": mac(nodeagent=None)}, [("nodeagent", ("a",))], id="ended-agents-may-leave-engines"
        ),
        pytest.param({"a": mac()}, [], id="no-services"),
    ],
)
def test_stages(
    states: Mapping[str, MacState], expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert [(stage.part, stage.nodes) for stage in plan_stages(states)] == expected


def test_lines_say_what_has_ended_and_what_goes_on() -> None:
    states = {"a": mac(nodeagent=1), "b": mac(nodeagent=None)}
    assert plan_lines(plan_stages(states), states, grace_s=30) == [
        "  1. nodeagent of a, b (then its engines, whose requests get 30 s)",
        "     stopped already: b",
        "  etcd is no service of these Macs, and goes on",
    ]
