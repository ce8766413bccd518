"""Events about deployments: when replicas become ready and stop being so, and when a deployment is gone."""

from reconciler.deployments.actions import RemoveDeployment
from reconciler.deployments.events import DeploymentEvents
from reconciler.deployments.observe import ReplicaView
from reconciler.listers.caches import make_caches
from reconciler.listers.lister import Lister
from schemas.event import Event
from schemas.replica import FetchStatus, ReplicaStatus
from store import objects
from store.events import EventRecorder
from store.memory import MemoryTransport
from tests.support.clock import FakeClock
from tests.support.reconciler_world import replica_events
from tests.support.world import condition, deployment, observed, replica

SERVING = ReplicaStatus(conditions=(condition("Ready", "Serving"),))
LOADING = ReplicaStatus(conditions=(condition("Ready", "Loading", "it loads", holds=False),))


async def recorded(
    *statuses: ReplicaStatus, view: ReplicaView | None = None
) -> list[tuple[str, str, str]]:
    """Return type, reason and message of the events of a replica with these statuses in turn."""
    return [(e.type, e.reason, e.message) for e in await replica_events(statuses, view)]


async def test_a_replica_that_becomes_ready_is_an_event_once() -> None:
    found = await recorded(LOADING, LOADING, SERVING, SERVING)
    assert found == [("Normal", "ReplicaReady", "qwen-0 on a serves")]


def fetching(reason: str, message: str = "", *, present_bytes: int = 0) -> ReplicaStatus:
    running = FetchStatus(
        node="a",
        phase="Downloading",
        present_bytes=present_bytes,
        total_bytes=4 << 30,
        source="hub.example",
    )
    present = condition("ModelPresent", reason, message, holds=reason == "Present")
    is_running = reason in ("Downloading", "Verifying")
    return ReplicaStatus(conditions=(present,), fetches=(running,) if is_running else ())


async def test_a_fetch_that_begins_and_ends_is_an_event_and_its_steps_are_none() -> None:
    took = "4.0 GiB in 3m, 4.0 GiB of it from hub.example"
    events = await recorded(
        fetching("Downloading"),
        fetching("Downloading", present_bytes=1 << 30),
        fetching("Verifying"),
        fetching("Present", took),
    )
    assert sorted(events) == [
        ("Normal", "Downloading", "qwen-0: a fetches 4.0 GiB from hub.example"),
        ("Normal", "ModelFetched", f"a has the model of qwen-0: {took}"),
    ]


async def test_a_replica_that_stops_serving_is_a_warning() -> None:
    found = await recorded(SERVING, LOADING)
    assert ("Warning", "ReplicaNotReady", "qwen-0 on a: Loading: it loads") in found


async def test_a_replica_that_ends_on_purpose_is_none() -> None:
    assert await recorded(LOADING, LOADING, view=replica(0, is_deleting=True)) == []


async def test_a_deleted_deployment_is_an_event() -> None:
    clock = FakeClock()
    transport = MemoryTransport(clock)
    events = DeploymentEvents(
        Lister(make_caches(transport, clock)),
        EventRecorder(transport, clock, source="reconciler"),
    )
    view = observed(deployment(is_deleting=True))
    await events.record_action(RemoveDeployment(name="qwen", version=1), view)
    (event,) = await objects.list_all(transport, Event)
    assert (event.spec.reason, event.spec.about.name) == ("Deleted", "qwen")
