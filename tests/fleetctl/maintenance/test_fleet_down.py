"""The plan of `fleetctl down --fleet`. The command itself: tests/fleet/test_down_fleet.py."""

from collections.abc import Mapping

import pytest

from fleetctl.maintenance import fleet_down
from fleetctl.maintenance.fleet_down import Step, plan_lines, plan_steps
from fleetctl.maintenance.mac_release import MacState, RunningPart
from fleetctl.remote.errors import RemoteError


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
def test_steps(states: Mapping[str, MacState], expected: list[tuple[str, tuple[str, ...]]]) -> None:
    assert [(step.part, step.nodes) for step in plan_steps(states)] == expected


def test_lines_say_what_has_ended_and_what_goes_on() -> None:
    steps = (Step(part="nodeagent", nodes=("a", "b"), stopped=("b",)),)
    assert plan_lines(steps, grace_s=30) == [
        "  1. nodeagent of a, b (then its engines, whose requests get 30 s)",
        "     stopped already: b",
        "  etcd is no service of these Macs, and goes on",
    ]


async def test_all_macs_are_tried_and_each_failure_is_named() -> None:
    tried: list[str] = []

    async def work(name: str) -> None:
        tried.append(name)
        if name != "b":
            raise RemoteError(f"{name}.local: no route")

    failures = await fleet_down.for_each(("a", "b", "c"), work)
    assert sorted(tried) == ["a", "b", "c"]
    assert failures == ["  node/a: a.local: no route", "  node/c: c.local: no route"]
    assert "leave them out with --except NODE" in fleet_down.refusal(failures)
