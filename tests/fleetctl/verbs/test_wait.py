"""`fleetctl wait`: goals, and several objects at once."""

import asyncio
from typing import Any

import pytest

from fleetctl.cli.arguments import parse_timeout
from fleetctl.objects import wait_conditions
from fleetctl.objects.kind_args import kind_of
from fleetctl.verbs.wait import AwaitedObject, ObjectWaiter
from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.terminal import terminal

MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {{name: {name}, labels: {{set: {set}}}}}
spec: {{model: {{path: none}}}}
"""


def tree(status: dict[str, Any], generation: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": "x", "generation": generation}, "status": status}


def condition(truth: str, generation: int = 1) -> dict[str, Any]:
    one = {"type": "Available", "status": truth, "reason": "Because", "message": "so it is"}
    return {"conditions": [{**one, "observedGeneration": generation}]}


@pytest.mark.parametrize(
    ("goal", "seen", "holds", "now"),
    [
        ("condition=Available", tree(condition("True")), True, None),
        ("condition=Available=false", tree(condition("False")), True, None),
        (
            "condition=Available",
            tree(condition("False")),
            False,
            "; it is False (Because: so it is)",
        ),
        (
            *("condition=Available", tree(condition("True"), 2), False),
            "; it is True (Because: so it is, of an older generation)",
        ),
        (
            "condition=Redy",
            tree(condition("True")),
            False,
            "; it has no such condition, only Available",
        ),
        ("condition=available", tree(condition("True")), True, None),
        ("condition=AVAILABLE=false", tree(condition("False")), True, None),
        ("condition=Available", None, False, "; it does not exist"),
        ("jsonpath={.status.n}=2", tree({"n": 2}), True, None),
        ("jsonpath={.status.n}='2'", tree({"n": 2}), True, None),
        ("jsonpath={.status.n}=2", tree({"n": 3}), False, "; it is '3'"),
        ("jsonpath={.status.n}", tree({"n": 0}), True, None),
        ("jsonpath={.status.n}", tree({}), False, "; the field does not exist"),
        ("jsonpath=.status.n=2", tree({"n": 2}), True, None),
        ("jsonpath=status.n=3", tree({"n": 2}), False, "; it is '2'"),
        ("jsonpath=.status.n", tree({"n": 2}), True, None),
        ("jsonpath=.status.a[?(@.b=='c=d')].n=1", tree({"a": [{"b": "c=d", "n": 1}]}), True, None),
        ("jsonpath={.status.ok}=true", tree({"ok": True}), True, None),
        (
            "jsonpath={.status.a[?(@.b=='c=d')].n}=1",
            tree({"a": [{"b": "c=d", "n": 1}]}),
            True,
            None,
        ),
        ("create", tree({}), True, None),
        ("create", None, False, "; it does not exist"),
        ("delete", None, True, None),
        ("delete", tree({}), False, ""),
    ],
)
def test_goals(goal: str, seen: Any, holds: bool, now: str | None) -> None:
    wanted = wait_conditions.parse(goal)
    assert wait_conditions.is_met(wanted, seen) is holds
    if now is not None:
        assert wait_conditions.state_text(wanted, seen) == now


@pytest.mark.parametrize(
    ("text", "limit_s"), [("90s", 90), ("0", 0), ("-1s", 604_800), ("-1", 604_800), ("-0s", 0)]
)
def test_timeouts(text: str, limit_s: float) -> None:
    assert parse_timeout(text) == limit_s


async def say(shared_transport: Transport, name: str, *, ready: int) -> None:
    truth = ConditionStatus.TRUE if ready else ConditionStatus.FALSE
    known = Condition(type="Available", status=truth, reason="Counted", observed_generation=1)
    status = ModelDeploymentStatus(observed_generation=1, conditions=(known,), ready_replicas=ready)
    key = keys.status_key("ModelDeployment", name)
    await shared_transport.commit([], [Put(key=key, value=codec.encode(status))])


def test_a_wait_in_a_pipe_says_after_three_seconds_what_it_waits_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run in virtual time: the reason changes after 2, 10, 20 and 30 s; twice to a known one."""
    said: list[tuple[int, str]] = []

    async def main() -> None:
        clock = VirtualClock()
        store = MemoryTransport(clock, expires_by_itself=False)
        leader = Put(key=keys.ELECTION_RECONCILER, value=b"{}")
        declared = codec.put_spec(ModelDeployment.model_validate_json(DECLARED))
        await store.commit([], [leader, declared])
        goal = wait_conditions.parse("condition=Available")
        waiter = ObjectWaiter(store, clock, goal, 60.0)

        async def reconciler() -> None:
            for until_s, reason in ((2, ""), (10, "Loading"), (20, "NoRoom"), (30, "Loading")):
                if reason:
                    await write_condition(store, ConditionStatus.FALSE, reason)
                await clock.sleep(until_s - clock.monotonic())
                said.append((round(clock.monotonic()), capsys.readouterr().err))
            await write_condition(store, ConditionStatus.TRUE, "AllReady")

        async with asyncio.TaskGroup() as group:
            group.create_task(reconciler())
            awaited = [AwaitedObject("ModelDeployment", "x")]
            await waiter.until(awaited, {"ModelDeployment": kind_of("md")})

    virtual_time.run(main())
    head = "modeldeployment/x: waiting for condition Available=True"
    assert said == [
        (2, ""),
        (10, f"{head}; it is False (Loading: 1 of 2)\n"),
        (20, f"{head}; it is False (NoRoom: 1 of 2)\n"),
        (30, ""),
    ]
    assert capsys.readouterr().out == "modeldeployment/x condition met\n"


DECLARED = '{"apiVersion":"fleet/v1alpha1","kind":"ModelDeployment","metadata":{"name":"x"},"spec":{"model":{"path":"m"}}}'


async def write_condition(store: Transport, truth: ConditionStatus, reason: str) -> None:
    found = Condition(type="Available", status=truth, reason=reason, message="1 of 2")
    status = ModelDeploymentStatus(conditions=(found,))
    key = keys.status_key("ModelDeployment", "x")
    await store.commit([], [Put(key=key, value=codec.encode(status))])


@pytest.mark.ci
@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_a_terminal_shows_the_progress(shared: Fleet, transport: Transport) -> None:
    await shared.applied(MANIFEST.format(name="wait-seen", set="seen"))
    await say(transport, "wait-seen", ready=0)
    words = ("wait", "md/wait-seen", "--for=condition=available")
    async with terminal(*words, "--etcd", str(shared.etcd.address)) as shown:
        await shown.until(
            "modeldeployment/wait-seen: waiting for condition available=True; it is False (Counted)"
        )
        await say(transport, "wait-seen", ready=1)
        met = await shown.until("modeldeployment/wait-seen condition met\r\n")
        assert met.endswith("\r\x1b[Kmodeldeployment/wait-seen condition met\r\n")
        assert await shown.ended() == 0


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_create_and_delete(shared_fleet: MemoryFleet) -> None:
    async with asyncio.TaskGroup() as group:
        named = group.create_task(shared_fleet.ctl("wait", "md/wait-new", "--for=create"))
        labelled = group.create_task(
            shared_fleet.ctl("wait", "md", "-l", "set=new", "--for=create")
        )
        await shared_fleet.applied(MANIFEST.format(name="wait-new", set="new"))
    for done in (named.result(), labelled.result()):
        assert (done.code, done.out) == (0, "modeldeployment/wait-new created\n")
