"""Commands that problems show: each runs in the state in which it is shown.

They are taken from the reasons' tables, so that a new reason, or a new command of one, is run, too.
"""

import re
import shlex
from collections.abc import Iterator, Sequence

import pytest

from insight.actions import Action, Verb, prepare
from insight.fleet_caches import make_fleet_caches
from insight.root_cause import Problem, find_problems
from machinery.clock import SystemClock
from reconciler.deployments.rollout.revisions import template_hash
from schemas.deployment import CanaryStatus, ModelDeploymentStatus, NodeRefusal
from schemas.gitsource import GitSource, GitSourceSpec
from schemas.meta import ApiObject, ObjectMeta, Status
from schemas.node import Node, Taint
from schemas.pools import NodePool, NodePoolSpec
from schemas.reasons import (
    PLACEMENT,
    deployments,
    groups,
    model_fetches,
    nodes,
    placement,
    replicas,
    sources,
)
from schemas.reasons.reason import Reason, ReasonSection
from schemas.rollout import Canary, CanaryStep, Rollout
from schemas.route import Backend, ModelRoute, ModelRouteSpec
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys, objects
from store.errors import EditRefusedError
from store.port import Put
from tests.support import world
from tests.support.broken_objects import LEADER, condition, put_deployment, put_replica
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.gateway_world import deployment
from tests.support.macs import mac

pytestmark = pytest.mark.ci

_TABLES: dict[str, Sequence[ReasonSection]] = {
    PLACEMENT: (placement.SECTION,),
    "ModelDeployment": (deployments.SECTION, model_fetches.SECTION),
    "Replica": (replicas.SECTION,),
    "Node": (nodes.SECTION,),
    "ShardGroup": (deployments.OTHER_KINDS, groups.SECTION, groups.CABLES),
    "GitSource": (sources.SECTION,),
    "NodePool": (deployments.OTHER_KINDS,),
    "ModelRoute": (deployments.OTHER_KINDS,),
}
REASONS = [
    (table, reason)
    for table, sections in _TABLES.items()
    for section in sections
    for reason in section.reasons
    if reason.cure and reason.title
]
# Commands that end at a machine, which these objects have not: the message shows that the object was found.
_AT_A_MACHINE = {
    "logs": "its agent serves no HTTP API",
    "node": "where to log in is unknown",
    "fabric": "shardgroup/pair: ",
    "doctor": "FAIL",
}
# Commands for another machine, without a fleet.
_ELSEWHERE = ("bundle", "join", "secure")
_BLANK = re.compile(r"\b[A-Z]{3,}\b")


def put_object(obj: ApiObject, reason: str) -> list[Put]:
    """Return the writes of an object whose condition Ready has the reason."""
    status = Status(conditions=(condition("Ready", reason, "what happened"),))
    key = keys.status_key(obj.kind, obj.name)
    return [codec.put_spec(obj), Put(key=key, value=codec.encode(status))]


def broken(table: str, reason: Reason) -> Iterator[list[Put]]:
    """Yield the writes of a fleet in which the reason is shown."""
    name, because = ObjectMeta(name="x", uid="x"), condition("Ready", reason.name, "what happened")
    yield [LEADER]
    members = (GroupMember(node="mac-1"), GroupMember(node="mac-2"))
    group = ShardGroup(
        metadata=ObjectMeta(name="pair", uid="p"), spec=ShardGroupSpec(members=members)
    )
    yield put_object(group, reason.name if table == "ShardGroup" else "MembersReady")
    node = Node(metadata=ObjectMeta(name="mac-1", uid="mac-1", generation=1))
    yield [codec.put_spec(node), *mac("mac-1", *([because] if table == "Node" else []))]
    match table:
        case "Placement":
            refusal = NodeRefusal(node="mac-1", reason=reason.name, message="what happened")
            yield put_deployment("x", condition("Placed", "Unschedulable"), refusals=[refusal])
        case "ModelDeployment":
            yield put_deployment("x", because)
            paused = Rollout(paused=reason.name == "Paused")
            declared = deployment("x")
            fields = {"spec": declared.spec.model_copy(update={"rollout": paused})}
            yield [codec.put_spec(declared.model_copy(update=fields))]
            yield put_replica("x", 0, "mac-1", condition("Ready", "Serving"))
        case "Replica":
            yield put_deployment("x", condition("Available", "ReplicaNotReady"))
            yield put_replica("x", 0, "mac-1", because, group="pair")
        case "GitSource":
            spec = GitSourceSpec(repository="https://git.example.com/f.git", suspend=True)
            yield put_object(GitSource(metadata=name, spec=spec), reason.name)
        case "NodePool":
            yield put_object(NodePool(metadata=name, spec=NodePoolSpec()), reason.name)
        case "ModelRoute":
            route = ModelRouteSpec(model="m", backends=(Backend(deployment="gone"),))
            yield put_object(ModelRoute(metadata=name, spec=route), reason.name)
        case _:
            pass


def commands_of(problem: Problem) -> list[str]:
    """Return the whole commands that a problem shows."""
    shown = re.findall(r"`(fleetctl [^`]+)`", problem.remedy)
    whole = (one for one in (problem.command, *shown) if not _BLANK.search(one))
    return list(dict.fromkeys(one for one in whole if one.split()[1] not in _ELSEWHERE))


@pytest.mark.parametrize(
    ("table", "reason"), REASONS, ids=[f"{table}-{reason.name}" for table, reason in REASONS]
)
async def test_a_command_runs_where_it_is_shown(table: str, reason: Reason) -> None:
    fleet = MemoryFleet()
    for puts in broken(table, reason):
        await fleet.store.commit([], puts)
    caches = make_fleet_caches(fleet.store, SystemClock())
    await caches.list_once()
    problems = [one for one in find_problems(caches) if one.reason == reason.name]
    assert problems, [one.title for one in find_problems(caches)]
    for command in commands_of(problems[0]):
        _, verb, *rest = shlex.split(command)
        done = await fleet.ctl(verb, *rest)
        assert "Usage:" not in done.err, (command, done.err)
        if done.code != 0:
            assert verb in _AT_A_MACHINE, (command, done.err)
            assert _AT_A_MACHINE[verb] in done.out + done.err, (command, done.err)


TAINT = Taint(key="owner", value="anna", effect="NoSchedule")


async def is_done(fleet: MemoryFleet, action: Action) -> bool:
    """Return whether an action would change nothing."""
    try:
        return (await prepare(fleet.store, SystemClock(), action)).after is None
    except EditRefusedError:  # a taint that is not there, a deployment that is not paused
        return True


async def test_the_command_of_an_action_does_the_same() -> None:
    """After the command, the action has nothing left to do."""
    fleet = MemoryFleet()
    for puts in broken("GitSource", Reason(name="Refused", title="", meaning="", cure="")):
        await fleet.store.commit([], puts)
    await fleet.store.commit([], put_deployment("qwen"))
    for action in (
        *(Action(verb=verb, name="mac-1") for verb in ("cordon", "uncordon")),
        *(Action(verb=verb, name="mac-1", taint=TAINT) for verb in ("taint", "untaint")),
        Action(verb="scale", name="qwen", replicas=3),
        *(Action(verb=verb, name="qwen") for verb in ("pause", "resume")),
        *(Action(verb=verb, name="x") for verb in ("unsuspend", "suspend")),
    ):
        assert not await is_done(fleet, action), action
        done = await fleet.ctl(*shlex.split(action.command)[1:])
        assert done.code == 0, (action.command, done.err)
        assert await is_done(fleet, action), action


async def put_trial(fleet: MemoryFleet) -> None:
    """Write `qwen` in its second revision, which a canary tries."""
    trial = Rollout(canary=Canary(steps=(CanaryStep(weight=50),)))
    old, new = (world.deployment(rollout=trial, context_length=1024 * one) for one in (1, 2))
    old_hash, new_hash = template_hash(old), template_hash(new)
    status = ModelDeploymentStatus(
        observed_generation=new.metadata.generation,
        template=new_hash,
        stable_template=old_hash,
        canary=CanaryStatus(template=new_hash, since=SystemClock().now()),
    )
    key = keys.status_key("ModelDeployment", "qwen")
    revisions = [codec.put_spec(world.revision(one, at)) for at, one in enumerate((old, new), 1)]
    puts = [codec.put_spec(new), *revisions, Put(key=key, value=codec.encode(status))]
    await fleet.store.commit([], puts)


# What others complete after the write is not waited for.
_NOT_WAITED = ("drain", "sync", "delete")


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("drain", "mac-1"),
        ("sync", "x"),
        *((verb, "qwen") for verb in ("restart", "promote", "abort", "undo", "delete")),
    ],
)
async def test_the_command_of_a_lasting_action_writes_the_same(verb: Verb, name: str) -> None:
    action = Action(verb=verb, name=name)
    fleet = MemoryFleet()
    for puts in broken("GitSource", Reason(name="Refused", title="", meaning="", cure="")):
        await fleet.store.commit([], puts)
    await put_trial(fleet)
    assert (await fleet.ctl("resume", "gs/x")).code == 0
    after = (await prepare(fleet.store, SystemClock(), action)).after
    assert after is not None
    more = ["--no-wait"] if verb in _NOT_WAITED else []
    done = await fleet.ctl(*shlex.split(action.command)[1:], *more)
    assert done.code == 0, (action.command, done.err)
    obj = await objects.get(fleet.store, action.kind, action.name)
    if verb == "delete":
        assert obj is None or obj.metadata.deletion_timestamp is not None
        return
    assert obj is not None
    assert obj.model_dump()["spec"] == after.model_dump()["spec"]
    assert set(obj.metadata.annotations) == set(after.metadata.annotations)
