"""rollout status, history, undo, pause, resume, restart, promote and abort."""

import io
from datetime import timedelta

import pytest

from fleetctl.simulate.fleet_file import model_geometry, nearest_shape
from fleetctl.simulate.simulated_fleet import run_fleet
from insight import actions
from insight.actions import Action
from insight.simulated_macs import FleetNode, node_status
from machinery import virtual_time
from machinery.clock import SystemClock
from manifests.load import load_objects
from reconciler.deployments.rollout.revisions import content_of, revision_name, template_hash
from schemas.deployment import (
    CanaryStatus,
    ModelDeployment,
    ModelDeploymentStatus,
    Revision,
    RevisionSpec,
)
from schemas.meta import RESTARTED_AT, Condition, ConditionStatus, ObjectMeta, OwnerReference
from schemas.replica import Replica
from schemas.rollout import CanaryDecision
from store import codec, keys, objects
from store.port import Put, Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_manifests import DEPLOYMENT
from tests.support.fleetctl_runner import CommandFleet, MemoryFleet
from tests.support.fleetctl_stream import streaming

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


async def applied(
    shared_fleet: CommandFleet, name: str, *, change: tuple[str, str] = ("", "")
) -> None:
    await shared_fleet.applied(DEPLOYMENT.replace("NAME", name).replace(*change))


async def read(shared_transport: Transport, name: str) -> ModelDeployment:
    obj = await objects.get(shared_transport, ModelDeployment, name)
    assert obj is not None
    return obj


async def keep(shared_transport: Transport, name: str, number: int, cause: str = "") -> None:
    """Record the current revision of the deployment, as the reconciler does."""
    owner = await read(shared_transport, name)
    hash_ = template_hash(owner)
    await shared_transport.commit(
        [],
        [
            codec.put_spec(
                Revision(
                    metadata=ObjectMeta(
                        name=revision_name(name, hash_),
                        creation_timestamp=SystemClock().now() - timedelta(hours=5, minutes=1),
                        owner_references=(
                            OwnerReference(
                                kind="ModelDeployment", name=name, uid=owner.metadata.uid
                            ),
                        ),
                    ),
                    spec=RevisionSpec(
                        deployment=name,
                        template=hash_,
                        revision=number,
                        content=content_of(owner),
                        change_cause=cause,
                    ),
                )
            )
        ],
    )


async def say(
    shared_transport: Transport, name: str, truth: ConditionStatus, reason: str, message: str = ""
) -> None:
    """Write the condition Progressing, as the reconciler does."""
    generation = (await read(shared_transport, name)).metadata.generation
    condition = Condition(
        type="Progressing",
        status=truth,
        reason=reason,
        message=message,
        observed_generation=generation,
    )
    status = ModelDeploymentStatus(observed_generation=generation, conditions=(condition,))
    key = keys.status_key("ModelDeployment", name)
    await shared_transport.commit([], [Put(key=key, value=codec.encode(status))])


async def test_status_waits_and_prints_progress(shared: Fleet, transport: Transport) -> None:
    await applied(shared, "waits")
    unseen = await shared.ctl("rollout", "status", "md/waits", "--timeout", "300ms")
    assert unseen.code == 1
    assert unseen.out == (
        "Waiting for the reconciler to look at the deployment; no reconciler is running: start fleet-reconciler...\n"
    )
    assert unseen.err == (
        "error: timed out after 0.3 s waiting for the rollout of modeldeployment/waits. "
        "`fleetctl describe md/waits` shows details\n"
    )
    await say(transport, "waits", ConditionStatus.TRUE, "RollingOut", "1 of 2 replicas updated")
    head = 'Waiting for modeldeployment "waits" rollout to finish: '
    async with streaming(shared, "rollout", "status", "waits") as running:
        assert await running.line() == f"{head}1 of 2 replicas updated...\n"
        await say(transport, "waits", ConditionStatus.UNKNOWN, "Paused", "1 of 2")
        paused = "it is paused (1 of 2); `fleetctl rollout resume waits` resumes it...\n"
        assert await running.line() == head + paused
        await say(transport, "waits", ConditionStatus.TRUE, "RolloutComplete")
        assert await running.line() == 'modeldeployment "waits" successfully rolled out\n'
        assert await running.ended() == 0
    # A status of an older generation does not count.
    await applied(shared, "waits", change=("small", "large"))
    now = await shared.ctl("rollout", "status", "md", "waits", "--no-watch")
    assert (now.code, now.out.startswith("Waiting for the reconciler")) == (0, True)


async def test_history_and_undo(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    await applied(shared_fleet, "back")
    none = await shared_fleet.ctl("rollout", "history", "back")
    assert none.out.splitlines()[1].startswith("no revisions yet")
    nothing = await shared_fleet.ctl("rollout", "undo", "back")
    assert nothing.err == (
        "error: no rollout history found for modeldeployment/back: the reconciler has not recorded a "
        "revision yet\n"
    )
    await keep(shared_transport, "back", 1)
    alone = await shared_fleet.ctl("rollout", "undo", "back")
    assert alone.err == (
        "error: modeldeployment/back has no earlier revision; "
        "`fleetctl rollout history back` shows the recorded ones\n"
    )
    await applied(shared_fleet, "back", change=("small}, servedNames: [fast]", "large}"))
    await keep(shared_transport, "back", 2, "model.path small -> large")
    assert (
        await shared_fleet.ctl("rollout", "restart", "back")
    ).out == "modeldeployment/back restarted\n"
    await keep(shared_transport, "back", 3, "a new etcd")
    first, second, third = [
        one.spec.template
        for one in sorted(
            await objects.list_all(shared_transport, Revision), key=lambda one: one.spec.revision
        )
        if one.spec.deployment == "back"
    ]
    shown = await shared_fleet.ctl("rollout", "history", "back")
    assert shown.out.splitlines() == [
        "modeldeployment/back",
        "CURRENT   REVISION   TEMPLATE       AGE   CHANGE-CAUSE",
        f"          1          {first}   5h    <none>",
        f"          2          {second}   5h    model.path small -> large",
        f"*         3          {third}   5h    a new etcd",
    ]
    await fail(shared_transport, "back", bad=third, good=second)
    failed = await shared_fleet.ctl("rollout", "history", "back")
    assert failed.out.splitlines()[-1] == (
        "revision 3 failed as a canary (3 of 40 requests failed); revision 2 serves. To roll back the spec: "
        "fleetctl rollout undo back --to-revision 2"
    )
    await goes_back(shared_fleet, shared_transport, first)


async def test_undo_after_two_failed_canaries_returns_to_what_serves(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    paths = ("small", "medium", "large")
    for number, path in enumerate(paths, start=1):
        await applied(shared_fleet, "twice", change=("small}, servedNames: [fast]", f"{path}}}"))
        await keep(shared_transport, "twice", number)
    templates = {
        revision.spec.revision: revision.spec.template
        for revision in await objects.list_all(shared_transport, Revision)
        if revision.spec.deployment == "twice"
    }
    await fail(shared_transport, "twice", bad=templates[3], good=templates[1])
    done = await shared_fleet.ctl("rollout", "undo", "twice")
    assert (done.code, done.out) == (0, "modeldeployment/twice rolled back\n"), done.err
    obj = await objects.get(shared_transport, ModelDeployment, "twice")
    assert obj is not None
    assert obj.spec.model.path == "small"


async def test_undo_of_a_running_canary_ends_it(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    for number, path in enumerate(("small", "medium"), start=1):
        await applied(shared_fleet, "tried", change=("small}, servedNames: [fast]", f"{path}}}"))
        await keep(shared_transport, "tried", number)
    trial = CanaryStatus(template="new", since=SystemClock().now(), outcome="Running")
    key = keys.status_key("ModelDeployment", "tried")
    status = codec.encode(ModelDeploymentStatus(canary=trial))
    await shared_transport.commit([], [Put(key=key, value=status)])
    done = await shared_fleet.ctl("rollout", "undo", "tried")
    assert done.out == "modeldeployment/tried rolled back, and its canary ended\n", done.err


async def fail(shared_transport: Transport, name: str, *, bad: str, good: str) -> None:
    """Write that the trial of a version failed, as the reconciler does."""
    trial = CanaryStatus(
        template=bad,
        since=SystemClock().now(),
        outcome="Failed",
        message="3 of 40 requests failed",
    )
    status = ModelDeploymentStatus(template=bad, stable_template=good, canary=trial)
    key = keys.status_key("ModelDeployment", name)
    await shared_transport.commit([], [Put(key=key, value=codec.encode(status))])


async def goes_back(shared_fleet: CommandFleet, shared_transport: Transport, first: str) -> None:
    """From revision 3 (large, restarted) to 2 and 1, and not anywhere else."""
    absent = await shared_fleet.ctl("rollout", "undo", "back", "--to-revision", "7")
    assert absent.err == (
        "error: unable to find revision 7 of modeldeployment/back; available: 1, 2, 3\n"
    )
    same = await shared_fleet.ctl("rollout", "undo", "back", "--to-revision", "3")
    assert (same.code, same.out) == (
        0,
        "modeldeployment/back skipped rollback (current template already matches revision 3)\n",
    )
    before = await read(shared_transport, "back")
    dry = await shared_fleet.ctl("rollout", "undo", "md/back", "--dry-run=client")
    assert dry.out == "modeldeployment/back rolled back (dry run)\n"
    assert await read(shared_transport, "back") == before
    assert (
        await shared_fleet.ctl("rollout", "undo", "md/back")
    ).out == "modeldeployment/back rolled back\n"
    after = await read(shared_transport, "back")
    assert RESTARTED_AT not in after.metadata.annotations
    assert after.spec == before.spec
    assert after.metadata.generation == before.metadata.generation + 1
    assert (await shared_fleet.ctl("rollout", "undo", "back", "--to-revision", "1")).code == 0
    small = await read(shared_transport, "back")
    assert (small.spec.model.path, small.spec.served_names) == ("small", ("fast",))
    full = await shared_fleet.ctl("rollout", "history", "back", "--revision", "1")
    assert full.out == (
        f"modeldeployment/back with revision #1 (template {first})\n"
        "  model:\n    path: small\n    adapters: []\n  servedNames:\n  - fast\n  contextLength: 4096\n  concurrency: Auto\n"
        "  prefixes: []\n  unknownParameters: Warn\n  performance: OnRequest\n"
    )
    printed = await shared_fleet.ctl("rollout", "history", "back", "--revision", "1", "-o", "yaml")
    assert "kind: Revision" in printed.out
    listed = await shared_fleet.ctl("get", "revisions")
    assert f"back-{first}" in listed.out
    no_such = await shared_fleet.ctl("rollout", "history", "back", "--revision", "9")
    assert no_such.err == (
        "error: unable to find revision 9 of modeldeployment/back; available: 1, 2, 3\n"
    )


def with_canary(name: str, model: str = "small") -> str:
    """Return a manifest with a canary."""
    text = DEPLOYMENT.replace("NAME", name).replace("small", model)
    return text.replace("spec: {", "spec: {rollout: {canary: {steps: [{weight: 50}]}}, ")


@pytest.mark.parametrize(("decision", "models"), [("promote", {"large"}), ("abort", {"small"})])
def test_a_decision_ends_a_canary_that_waits_for_requests(
    decision: CanaryDecision, models: set[str]
) -> None:
    """Run the real reconciler and agents in virtual time; no request ever comes."""
    geometry = model_geometry(10**9, 4, nearest_shape(10**9), None)

    async def main() -> None:
        async with run_fleet({"small": geometry, "large": geometry}) as simulated:
            for name in ("mac-1", "mac-2"):
                mac = FleetNode(name=name, chip="Apple M4 Max", memory="64Gi")
                await simulated.join(node_status(mac, name))
            for model in ("small", "large"):
                manifest = io.BytesIO(with_canary("chat", model).encode())
                await simulated.apply(load_objects(["-"], stdin=manifest))
                await simulated.rest()
            trial = await read(simulated.store, "chat")
            assert trial.status is not None
            assert trial.status.canary is not None
            assert trial.status.canary.outcome == "Running"
            action = Action(verb=decision, name="chat")
            prepared = await actions.prepare(simulated.store, simulated.clock, action)
            await actions.carry_out(simulated.store, prepared, version=prepared.version)
            await simulated.rest()
            replicas = await objects.list_all(simulated.store, Replica)
            assert {replica.spec.model.path for replica in replicas} == models

    virtual_time.run(main())
