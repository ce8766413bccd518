"""A fleet in one process: the real Controller, agents without engines, and a script of mishaps.

The store keeps every revision; invariants are checked over all of them, not only at the end.
Time runs ten times as fast as on the wall: a lease of 4 s is over in 0.4 s.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from typing_extensions import override

from reconciler.controller import Controller
from schemas.deployment import ModelDeployment
from schemas.meta import is_true
from schemas.replica import Endpoint, Replica
from store import codec, keys, objects
from store.errors import ConflictError, UnavailableError
from store.memory import MemoryTransport
from store.port import Guard, KeyValue, Listing, Operation, ServerStatus, WatchBatch
from tests.reconciler.agents import FakeAgent
from tests.support.fleets import GIB, deployment
from tests.support.waiting import until_async

_SPEED = 10
_GRACE_S = 1.0
NODES = {"a": 7.0, "b": 9.0, "c": 12.0, "d": 3.0}
NAMES = ("qwen", "llama", "qwen-1")
PRIORITIES = {"qwen": 0, "llama": 5, "qwen-1": -5}


class FastClock:
    """The wall's time, ten times as fast."""

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() * _SPEED

    def elapsed(self) -> float:
        return self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / _SPEED)


class Recording(MemoryTransport):
    """A store that remembers what it held at every revision."""

    def __init__(self, clock: FastClock) -> None:
        super().__init__(clock)
        self.revisions: list[dict[str, KeyValue]] = []

    @override
    def _apply(self, operations: Sequence[Operation]) -> None:
        super()._apply(operations)
        self.revisions.append(dict(self._keys))


class Line:
    """One process's line to the store; once cut, nothing comes through: that is how kill -9 looks.

    Now and then an answer is lost though the write was done.
    """

    def __init__(self, store: MemoryTransport, dice: random.Random) -> None:
        self._store = store
        self._dice = dice
        self.is_cut = False

    def _check(self) -> None:
        if self.is_cut:
            raise UnavailableError("the line is cut")

    async def get(self, key: str) -> KeyValue | None:
        self._check()
        return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        self._check()
        return await self._store.list(prefix)

    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        self._check()
        async for page in self._store.pages(prefix):
            yield page
            self._check()

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        self._check()
        revision = await self._store.commit(guards, operations)
        if self._dice.random() < 0.1:
            raise UnavailableError("the answer was lost", ambiguous=True)
        return revision

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        self._check()
        async for batch in self._store.watch(prefix, after_revision=after_revision):
            self._check()
            yield batch
            if self._dice.random() < 0.01:
                raise UnavailableError("the stream broke")

    async def grant(self, ttl_s: int) -> int:
        self._check()
        return await self._store.grant(ttl_s)

    async def keep_alive(self, lease: int) -> int:
        self._check()
        return await self._store.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        self._check()
        await self._store.revoke(lease)

    async def status(self) -> ServerStatus:
        self._check()
        return await self._store.status()

    async def close(self) -> None:
        return


class Simulation:
    """The fleet, and the hand that does harm to it."""

    def __init__(self, group: asyncio.TaskGroup, seed: int) -> None:
        self._group = group
        self.dice = random.Random(seed)
        self.clock = FastClock()
        self.store = Recording(self.clock)
        self.agents: dict[str, tuple[FakeAgent, asyncio.Task[None]]] = {}
        self._controllers: list[tuple[Line, asyncio.Task[None]]] = []
        self._runs = 0

    def start_controller(self) -> None:
        self._runs += 1
        line = Line(self.store, self.dice)
        controller = Controller(line, self.clock, identity=f"c{self._runs}", grace_s=_GRACE_S)
        self._controllers.append((line, self._group.create_task(controller.run())))

    def start_agent(self, name: str) -> None:
        agent = FakeAgent(self.store, self.clock, name, memory_gib=NODES[name])
        self.agents[name] = (agent, self._group.create_task(agent.run()))

    def stop(self) -> None:
        for _, task in (*self.agents.values(), *self._controllers):
            task.cancel()

    async def want(self, name: str, replicas: int, *, is_deleting: bool = False) -> None:
        """Write a deployment as fleetctl does; one that is being deleted is left alone."""
        there = await objects.get(self.store, ModelDeployment, name)
        if there is not None and there.metadata.deletion_timestamp is not None:
            return
        wanted = deployment(
            name=name, replicas=replicas, priority=PRIORITIES[name], is_deleting=is_deleting
        )
        uid = f"uid-{name}-{self.store._revision}" if there is None else there.metadata.uid
        metadata = wanted.metadata.model_copy(update={"uid": uid})
        wanted = wanted.model_copy(update={"metadata": metadata})
        if there is None and is_deleting:
            return
        guards = [codec.unchanged(there)] if there is not None else []
        with suppress(ConflictError):
            await self.store.commit(guards, [codec.put_spec(wanted)])

    async def mishap(self) -> None:
        """Do one thing of the script."""
        name, node = self.dice.choice(NAMES), self.dice.choice(sorted(NODES))
        agent, task = self.agents[node]
        match self.dice.randrange(9):
            case 0 | 1 | 2:
                await self.want(name, self.dice.randrange(5))
            case 3:
                await self.want(name, 0, is_deleting=True)
            case 4:  # the Mac dies: its lease runs out by itself
                task.cancel()
            case 5:  # it comes back, with nothing in memory
                task.cancel()
                self.start_agent(node)
            case 6:
                await self.store.revoke(agent.lease)
            case 7:
                self.store.compact()
            case _:
                self.replace_controller()

    def replace_controller(self) -> None:
        line, task = self._controllers.pop(0)
        line.is_cut = self.dice.random() < 0.7
        task.cancel()
        self.start_controller()

    async def settle(self) -> None:
        """Give every node its agent again, and every deployment a last word."""
        for name, (_, task) in list(self.agents.items()):
            task.cancel()
            self.start_agent(name)
        for name, replicas in zip(NAMES, (2, 1, 0), strict=True):
            await until_async(partial(self._is_free, name), limit_s=20, what=name)
            await self.want(name, replicas)
        await until_async(self.is_settled, limit_s=20, what="the fleet is as it should be")

    async def _is_free(self, name: str) -> bool:
        there = await objects.get(self.store, ModelDeployment, name)
        return there is None or there.metadata.deletion_timestamp is None

    async def is_settled(self) -> bool:
        replicas = await objects.list_all(self.store, Replica)
        endpoints = await objects.list_all(self.store, Endpoint)
        uids = {r.name: r.metadata.uid for r in replicas}
        wanted = ["llama-0", "qwen-0", "qwen-1"]
        return (
            sorted(uids) == wanted
            and {e.name: e.spec.replica_uid for e in endpoints} == uids
            and all(r.status and is_true(r.status.conditions, "Ready") for r in replicas)
            and all(
                found.status and is_true(found.status.conditions, "Available")
                for found in await objects.list_all(self.store, ModelDeployment)
            )
        )

    async def quiet(self) -> int:
        """Return how many revisions were written in a while in which nothing happened."""
        before = self.store._revision
        await self.clock.sleep(10)
        return self.store._revision - before


def replicas_in(state: dict[str, KeyValue]) -> Iterable[Replica]:
    prefix = keys.spec_prefix("Replica")
    return (codec.decode_object(Replica, kv) for key, kv in state.items() if key.startswith(prefix))


def check(revisions: Sequence[dict[str, KeyValue]]) -> None:
    """Check every state that the store was ever in, and every step between two."""
    before: dict[str, KeyValue] = {}
    for state in revisions:
        used: dict[str, int] = {}
        for replica in replicas_in(state):
            for rank in replica.spec.ranks:
                used[rank.node] = used.get(rank.node, 0) + rank.memory.total_bytes
        over = {node: size for node, size in used.items() if size > NODES[node] * GIB}
        assert not over
        check_step(before, state)
        before = state


def check_step(before: dict[str, KeyValue], after: dict[str, KeyValue]) -> None:
    specs = keys.spec_prefix("ModelDeployment")
    for key in before.keys() - after.keys():
        if key.startswith(specs):
            name = key.removeprefix(specs)
            assert not [r.name for r in replicas_in(before) if r.spec.deployment == name]
    for key, kv in after.items():
        then = before.get(key)
        if then is None or then.mod_revision == kv.mod_revision:
            continue
        if key.startswith(keys.spec_prefix("Replica")):
            check_assignment(codec.decode_object(Replica, then), codec.decode_object(Replica, kv))


def check_assignment(old: Replica, new: Replica) -> None:
    """A replica is edited only to mark it deleted, or moved as a whole to another node."""
    if old.metadata.uid == new.metadata.uid:
        assert old.spec == new.spec
        assert new.metadata.deletion_timestamp is not None
        return
    assert old.metadata.deletion_timestamp is None
    assert new.spec.ranks[0].node != old.spec.ranks[0].node


@pytest.mark.timeout(90)
@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_the_fleet_converges(seed: int) -> None:
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        simulation = Simulation(group, seed)
        stack.callback(simulation.stop)
        for name in NODES:
            simulation.start_agent(name)
        for _ in range(2):
            simulation.start_controller()
        for _ in range(50):
            await simulation.mishap()
            await simulation.clock.sleep(simulation.dice.choice([0, 0, 0.2, 1, 3]))
        await simulation.settle()
        # What was on its way when everything was as it should be (an event, say) may still arrive.
        rests = [await simulation.quiet() for _ in range(3)]
        assert rests[-1] == 0, rests
        check(simulation.store.revisions)
