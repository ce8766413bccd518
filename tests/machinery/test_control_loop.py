"""The work queue holds a key once, and the control loop alone decides about retries."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery.backoff import Backoff
from machinery.control_loop import AuthorityLostError, Requeue, TerminalError, WorkQueue, run_loop
from tests.support.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(clock: FakeClock) -> WorkQueue[str]:
    return WorkQueue(clock)


async def test_changes_go_before_the_backlog_but_do_not_stop_it(queue: WorkQueue[str]) -> None:
    for number in range(4):
        queue.add_to_backlog(f"old-{number}")
    queue.add("old-2")  # it changed
    for number in range(8):
        queue.add(f"new-{number}")
    taken = [await queue.get() for _ in range(len(queue))]
    assert taken[:5] == ["old-2", "new-0", "new-1", "new-2", "old-0"]
    assert [key for key in taken if key.startswith("new")] == [f"new-{n}" for n in range(8)]
    assert taken[5:] == ["new-3", "new-4", "new-5", "new-6", "old-1", "new-7", "old-3"]


async def next_key(queue: WorkQueue[str], clock: FakeClock, within_s: float) -> str | None:
    """Return the key that comes within this time; a wait that is cancelled loses none."""
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(queue.get())
        await clock.advance(within_s)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
    return None


async def test_a_cleared_queue_has_nothing_to_do(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add("ready")
    queue.add_to_backlog("old")
    queue.add_after("later", 5)
    queue.add("held")
    assert await queue.get() == "ready"
    queue.clear()
    assert len(queue) == 0
    assert await next_key(queue, clock, 60) is None
    queue.done("ready")
    queue.add("ready")
    assert await queue.get() == "ready"


async def test_a_delayed_key_comes_when_its_time_has_come(
    queue: WorkQueue[str], clock: FakeClock
) -> None:
    queue.add_after("a", 30)
    assert await next_key(queue, clock, 29.9) is None
    assert await next_key(queue, clock, 0.2) == "a"


@pytest.mark.parametrize(("first_s", "second_s"), [(10, 30), (30, 10)], ids=["later", "sooner"])
async def test_the_sooner_of_two_delays_counts(
    queue: WorkQueue[str], clock: FakeClock, first_s: float, second_s: float
) -> None:
    queue.add_after("a", first_s)
    await clock.advance(1)
    queue.add_after("a", second_s - 1)
    assert await next_key(queue, clock, 9.5) == "a"
    assert await next_key(queue, clock, 3600) is None


async def test_a_look_now_replaces_a_look_later(queue: WorkQueue[str], clock: FakeClock) -> None:
    queue.add_after("a", 30)
    queue.add("a")
    queue.add_after("a", 10)  # it is in line already
    queue.done(await queue.get())
    assert await next_key(queue, clock, 3600) is None


async def test_retries_come_ever_later_until_the_key_is_forgotten(clock: FakeClock) -> None:
    queue = WorkQueue[str](clock, Backoff(first_s=1, limit_s=8))
    assert [queue.retry("a", jitter=1) for _ in range(5)] == [1, 2, 4, 8, 8]
    assert queue.retry("b", jitter=0) == 0.5
    queue.forget("a")
    queue.forget("never seen")
    assert queue.retry("a", jitter=1) == 1


class Workers:
    """Workers that check what must always hold."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.queue = WorkQueue[int](clock)
        self.held: set[int] = set()
        self.asked_at: dict[int, int] = {}
        self.looked_at: dict[int, int] = {}
        self.moment = 0

    def ask(self, key: int) -> None:
        self.moment += 1
        self.asked_at[key] = self.moment

    async def work(self, work_s: float) -> None:
        while True:
            key = await self.queue.get()
            assert key not in self.held, "two workers hold one key"
            self.held.add(key)
            self.moment += 1
            self.looked_at[key] = self.moment
            await self.clock.sleep(work_s)
            self.held.discard(key)
            self.queue.done(key)

    async def play(self, steps: list[tuple[str, int, float]]) -> None:
        for verb, key, seconds in steps:
            if verb == "wait":
                await self.clock.advance(seconds)
                continue
            self.ask(key)
            if verb == "add":
                self.queue.add(key)
            elif verb == "backlog":
                self.queue.add_to_backlog(key)
            elif verb == "after":
                self.queue.add_after(key, seconds)
            else:
                self.queue.retry(key, jitter=seconds / 10)
        await self.clock.advance(1000)


def to_end(main: Coroutine[None, None, None]) -> None:
    """Run to the end in a loop of its own: hypothesis calls plain functions."""
    with asyncio.Runner() as runner:
        runner.run(main)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "backlog", "after", "retry", "wait"]),
            st.integers(0, 3),
            st.floats(0, 10),
        ),
        max_size=25,
    ),
    work_s=st.lists(st.floats(0, 5), min_size=1, max_size=3),
)
def test_no_two_workers_hold_one_key_and_no_key_is_lost(
    steps: list[tuple[str, int, float]], work_s: list[float]
) -> None:
    async def main() -> None:
        workers = Workers(FakeClock())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(workers.work(seconds)) for seconds in work_s]
            await workers.play(steps)
            for task in tasks:
                task.cancel()
        for key, asked_at in workers.asked_at.items():
            assert workers.looked_at.get(key, 0) > asked_at, "nobody looked after it was asked"
        assert len(workers.queue) == 0

    to_end(main())


class AwayError(Exception):
    """Expected, and over soon."""


class Reconciler:
    """Does what its script says, call by call, then nothing."""

    def __init__(self, *script: Exception | Requeue | None) -> None:
        self.script = list(script)
        self.calls = 0

    async def __call__(self, key: str) -> Requeue | None:
        self.calls += 1
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        return step


@pytest.fixture
def loop_queue(clock: FakeClock) -> WorkQueue[str]:
    return WorkQueue(clock, Backoff(first_s=1, limit_s=8))


@asynccontextmanager
async def looping(
    queue: WorkQueue[str], reconcile: Reconciler
) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_loop(queue, reconcile, transient=(AwayError,)))
        yield task
        task.cancel()


async def test_requeue_is_obeyed(loop_queue: WorkQueue[str], clock: FakeClock) -> None:
    reconcile = Reconciler(Requeue(after_s=30), None)
    loop_queue.add("a")
    async with looping(loop_queue, reconcile):
        await clock.advance(29)
        assert reconcile.calls == 1
        await clock.advance(2)
        assert reconcile.calls == 2
        await clock.advance(3600)
        assert reconcile.calls == 2


@pytest.mark.parametrize(("error", "level", "message"), [
    pytest.param(AwayError("away"), logging.INFO, "reconcile will be retried", id="away"),
    pytest.param(KeyError("bug"), logging.ERROR, "reconcile failed", id="defect"),
])  # fmt: skip
async def test_failures_are_retried_ever_later(
    loop_queue: WorkQueue[str],
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    level: int,
    message: str,
) -> None:
    reconcile = Reconciler(*[error] * 4)
    loop_queue.add("a")
    with caplog.at_level(logging.INFO):
        async with looping(loop_queue, reconcile):
            await clock.advance(0.4)
            assert reconcile.calls == 1
            await clock.advance(20)
            assert reconcile.calls == 5
            await clock.advance(3600)
            assert reconcile.calls == 5
    records = [r for r in caplog.records if r.getMessage() == message]
    assert [(r.levelno, bool(r.exc_info)) for r in records] == [(level, level == logging.ERROR)] * 4


async def test_success_mends_the_backoff(loop_queue: WorkQueue[str], clock: FakeClock) -> None:
    reconcile = Reconciler(AwayError(), AwayError(), AwayError(), None, AwayError())
    loop_queue.add("a")
    async with looping(loop_queue, reconcile):
        await clock.advance(60)
        assert reconcile.calls == 4
        loop_queue.add("a")
        await clock.advance(1.1)  # the first wait again, not the fourth
        assert reconcile.calls == 6


async def test_giving_up_waits_for_a_change(
    loop_queue: WorkQueue[str], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    reconcile = Reconciler(TerminalError("impossible"), None)
    loop_queue.add("a")
    async with looping(loop_queue, reconcile):
        await clock.advance(3600)
        assert reconcile.calls == 1
        assert "gave up until the object changes" in caplog.text
        loop_queue.add("a")
        await clock.advance(0)
        assert reconcile.calls == 2


async def test_one_bad_key_does_not_hold_up_the_others(
    loop_queue: WorkQueue[str], clock: FakeClock
) -> None:
    reconcile = Reconciler(KeyError("bug"), None)
    loop_queue.add("bad")
    loop_queue.add("good")
    async with looping(loop_queue, reconcile):
        await clock.advance(0.1)
        assert reconcile.calls == 2


@pytest.mark.parametrize("make", [AuthorityLostError, asyncio.CancelledError])
async def test_the_key_is_given_back_when_the_loop_ends(
    loop_queue: WorkQueue[str], make: Callable[[], BaseException]
) -> None:
    async def ends(_: str) -> Requeue | None:
        raise make()

    loop_queue.add("a")
    with pytest.raises(type(make())):
        await run_loop(loop_queue, ends)
    loop_queue.add("a")
    async with asyncio.timeout(30):
        assert await loop_queue.get() == "a"


async def test_others_run_though_there_is_always_something_to_look_at(
    loop_queue: WorkQueue[str],
) -> None:
    """Looks that wait for nothing, one after the other: a lease must be renewed all the same."""
    renewed = asyncio.Event()

    async def look(key: str) -> None:
        if not renewed.is_set():
            loop_queue.add(key)

    async with asyncio.TaskGroup() as group:
        loop_queue.add("a")
        task = group.create_task(run_loop(loop_queue, look))
        group.create_task(_set(renewed))
        await renewed.wait()
        task.cancel()


async def _set(event: asyncio.Event) -> None:
    event.set()
