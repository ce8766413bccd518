"""Keys that a change queues: of the objects that it concerns, before those that a new leader looks at anyway."""

import asyncio

import pytest

from machinery.control_loop import WorkQueue
from reconciler.event_handlers import EventHandlers
from reconciler.listers.caches import Caches, make_caches
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from schemas.meta import ObjectKey
from store import codec
from store.memory import MemoryTransport
from store.port import KeyValue, Operation, Put
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import put_lease, put_node
from tests.support.world import deployment, replica


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(clock: FakeClock) -> WorkQueue[ObjectKey]:
    return WorkQueue(clock)


async def _caches(clock: FakeClock, there: list[Operation]) -> Caches:
    """Return caches that have read these objects and are not watching."""
    transport = MemoryTransport(clock)
    await transport.commit([], there)
    caches = make_caches(transport, clock)
    for informer in caches.all():
        await informer.list_once()
    return caches


def _item(put: Put) -> KeyValue:
    return KeyValue(key=put.key, value=put.value, create_revision=9, mod_revision=9)


async def _taken(queue: WorkQueue[ObjectKey]) -> list[str]:
    return [str(await queue.get()) for _ in range(len(queue))]


async def test_a_new_leader_acts_on_a_change_before_it_looks_at_its_fleet(
    queue: WorkQueue[ObjectKey], clock: FakeClock
) -> None:
    made = [deployment(name=f"d{number}") for number in range(3)]
    caches = await _caches(clock, [codec.put_spec(model_deployment) for model_deployment in made])
    handlers = EventHandlers(Lister(caches), NodeLiveness(0), queue, clock)
    handlers.connect()
    caches.specs.suppose(_item(codec.put_spec(made[0])))  # a change before it led
    handlers.queue_everything()
    caches.specs.suppose(_item(codec.put_spec(deployment(name="after"))))
    assert (await _taken(queue))[0] == "ModelDeployment/after"


async def test_a_lease_queues_what_it_concerns_and_not_the_fleet(
    queue: WorkQueue[ObjectKey], clock: FakeClock
) -> None:
    own, other, waiting = (deployment(name=name) for name in ("own", "other", "waiting"))
    caches = await _caches(
        clock,
        [
            *(put_node(name) for name in ("here", "there")),
            *(codec.put_spec(model_deployment) for model_deployment in (own, other, waiting)),
            codec.put_spec(replica(0, on="here", of=own).replica),
            codec.put_spec(replica(0, on="there", of=other).replica),
        ],
    )
    handlers = EventHandlers(Lister(caches), NodeLiveness(0), queue, clock)
    handlers.connect()
    handlers.waiting_for_room.add("waiting")
    caches.leases.suppose(_item(put_lease("here")))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(handlers.run())
        await clock.advance(1)
        running.cancel()
    found = await _taken(queue)
    assert {"Node/here", "ModelDeployment/own", "ModelDeployment/waiting"} <= set(found)
    assert "ModelDeployment/other" not in found
