"""Admission of requests: slots, a bounded queue, and refusals. Event loop only, so it needs no lock.

Slots are counted here and not in the batch. So a waiting request uses no GPU memory, can be refused at once when the
engine drains, and can leave without any message to the worker.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from engine import errors
from engine.errors import Refusal, RefusedError
from engine.jobs import (
    AudioOutput,
    CancelJob,
    EmbeddingOutput,
    EmbedJob,
    Job,
    JobFailure,
    JobOutput,
    SpeechJob,
    TokenOutput,
    WorkerEvent,
)
from engine.metrics import CompletionRate
from engine.wakeup import Wakeup
from machinery.clock import Clock
from machinery.prometheus import HistogramValue
from schemas.wire.body_limits import MOST_LIMIT

AdmittedJob: TypeAlias = Job | EmbedJob | SpeechJob

# As many connections as an engine takes may each have this much.
_FREE_BODY_BYTES = 64 << 10
# Of all tokens that wait for clients that do not read; as much as bodies take in an engine without images.
_UNSENT_BYTES = 4 * MOST_LIMIT


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One request's place, with a slot for each of its jobs, and the stream of its outputs.

    It also records times, in seconds of `Clock.monotonic`, and counts of tokens.
    """

    jobs: tuple[AdmittedJob, ...]
    entered_s: float
    started_s: float | None = None
    """The time at which it got its slots."""
    first_s: float | None = None
    last_s: float = 0.0
    """The time of its latest token."""
    is_cut: bool = False
    """True if a sequence ended because it was as long as it may be."""
    completion_tokens: int = 0
    """Tokens received so far, of all jobs."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    refusal: Refusal | None = None
    """The reason why it did not finish."""
    unsent_bytes: int = 0
    """About the memory of outputs that wait until the client reads."""
    _last_tokens: dict[int, float] = field(default_factory=dict)
    """The time of the latest token, by job."""
    _events: deque[JobOutput | RefusedError] = field(default_factory=deque)
    _arrival: Wakeup = field(default_factory=Wakeup)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; a prompt that several jobs continue counts once."""
        prompts: list[tuple[int, ...]] = []
        for job in self.jobs:
            if isinstance(job, EmbedJob):
                prompts += job.prompts
            elif isinstance(job, Job):
                prompts.append(job.prompt)
        return sum(len(prompt) for prompt in dict.fromkeys(prompts))

    def per_token_s(self) -> float | None:
        """Return the mean time between two tokens of a job; None if no job has two."""
        if self.first_s is None or self.completion_tokens <= len(self.jobs):
            return None
        return (
            (self.last_s - self.first_s)
            * len(self.jobs)
            / (self.completion_tokens - len(self.jobs))
        )

    async def next(self, timeout_s: float | None = None) -> JobOutput | None:
        """Wait for the next event of any of its jobs; return None if there is none in time.

        Raises:
            RefusedError: there will be no further event.

        """
        while not self._events:
            if not await self._arrival.wait(timeout_s):
                return None
        event = self._events.popleft()
        if isinstance(event, RefusedError):
            raise event
        self.unsent_bytes -= _memory_bytes(event)
        return event

    @property
    def waiting(self) -> int:
        """The number of events that have arrived."""
        return len(self._events)

    def ready(self, most: int) -> list[JobOutput]:
        """Return at most so many of the events that have arrived, without waiting; a refusal stays for `next`."""
        arrived: list[JobOutput] = []
        while len(arrived) < most and self._events:
            event = self._events[0]
            if isinstance(event, RefusedError):
                break
            arrived.append(event)
            self._events.popleft()
            self.unsent_bytes -= _memory_bytes(event)
        return arrived

    def put(self, event: JobOutput | RefusedError) -> None:
        """Add an event for `next`."""
        if isinstance(event, RefusedError):
            self.refusal = event.refusal
        else:
            self.unsent_bytes += _memory_bytes(event)
        self._events.append(event)
        self._arrival.notify()

    def give_up(self, error: RefusedError) -> None:
        """Drop the events that wait; only the error follows."""
        self._events.clear()
        self.unsent_bytes = 0
        self.put(error)

    def close(self) -> None:
        """End its timer: nothing waits for it any more."""
        self._arrival.close()

    def take(self, event: JobOutput, now_s: float, gaps: HistogramValue | None = None) -> None:
        """Add an output, and record its time. `gaps` counts the times between tokens of one job."""
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        if isinstance(event, TokenOutput):
            self.completion_tokens += 1
            self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
            self.is_cut = self.is_cut or event.finish == "length"
            before_s = self._last_tokens.get(event.job_id, now_s)
            self._last_tokens[event.job_id] = now_s
            # A step with guessed tokens makes several at one time.
            if gaps is not None and now_s > before_s:
                gaps.observe(now_s - before_s)
        self.put(event)


@dataclass(slots=True, kw_only=True, eq=False)
class Arrival:
    """The place in the queue of a request whose body is being parsed, or whose input is being tokenized."""

    _leave: Callable[["Arrival"], None]

    def leave(self) -> None:
        """Give the place back, if no ticket has taken it over; a second call does nothing."""
        self._leave(self)


def _memory_bytes(output: JobOutput) -> int:
    """Return about how much memory an output takes that a stream may have many of."""
    return output.memory_bytes if isinstance(output, TokenOutput | AudioOutput) else 0


class ByteBudget:
    """The memory of large request bodies: what each has beyond 64 KiB counts, until its request is prepared."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._claimed = 0

    def claim(self, more_bytes: int) -> None:
        """Count more bytes.

        Raises:
            RefusedError: other bodies have taken them.

        """
        if more_bytes and self._claimed + more_bytes > self._limit_bytes:
            raise errors.bodies_full(self._limit_bytes)
        self._claimed += more_bytes

    def give_back(self, claimed_bytes: int) -> None:
        """Count bytes no longer."""
        self._claimed -= claimed_bytes


@dataclass(slots=True, kw_only=True, eq=False)
class ClaimedBytes:
    """The part of a budget that one body takes; it grows while the body arrives."""

    budget: ByteBudget
    _claimed: int = 0

    def grow(self, size: int) -> None:
        """Claim what a body of this size takes.

        Raises:
            RefusedError: other bodies have taken it.

        """
        counted = max(0, size - _FREE_BODY_BYTES)
        self.budget.claim(counted - self._claimed)
        self._claimed = counted

    def release(self) -> None:
        """Give the bytes back; a second call does nothing."""
        self.budget.give_back(self._claimed)
        self._claimed = 0


class Admission:
    """A fixed number of slots and a bounded queue, first come first served."""

    def __init__(
        self,
        *,
        concurrency: int,
        queue_limit: int,
        send: Callable[[AdmittedJob | CancelJob], None],
        clock: Clock,
        gaps: HistogramValue | None = None,
    ) -> None:
        """`gaps` counts the times between tokens of one sequence."""
        self._concurrency = concurrency
        self._queue_limit = queue_limit
        self._send = send
        self._clock = clock
        self._gaps = gaps
        self._ends = CompletionRate()
        self._running: dict[int, Ticket] = {}  # by job
        self._tickets: set[Ticket] = set()
        """All that have entered and not left: tokens also wait when their job has ended."""
        self._queue: deque[Ticket] = deque()
        self._arrivals: set[Arrival] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """The number of sequences that hold a slot."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """The number of requests that wait for a slot, or whose input is being prepared."""
        return len(self._queue) + len(self._arrivals)

    @property
    def is_crowded(self) -> bool:
        """True if a request waits for a slot."""
        return bool(self._queue)

    def arrive(self) -> Arrival:
        """Give a request a place before anything of it is parsed.

        Free slots count as places. `enter` takes the place over; a request that does not get there must leave it.

        Raises:
            RefusedError: all slots and the queue are full.

        """
        self.check_room()
        arrival = Arrival(_leave=self._arrivals.discard)
        self._arrivals.add(arrival)
        return arrival

    def check_room(self) -> None:
        """Refuse a request that would find no place.

        Raises:
            RefusedError: all slots and the queue are full.

        """
        free = max(0, self._concurrency - len(self._running))
        if self.queued >= self._queue_limit + free:
            raise self._full(self._clock.monotonic())

    def _full(self, now_s: float) -> RefusedError:
        wait_s = self._ends.retry_after_s(queued=self.queued + 1, now_s=now_s)
        return errors.queue_full(self._concurrency, self._queue_limit, retry_after_s=wait_s)

    def enter(self, jobs: Sequence[AdmittedJob], arrival: Arrival | None = None) -> Ticket:
        """Give a request slots for all of its jobs, or a place in the queue, instead of that of its arrival.

        Raises:
            RefusedError: all slots and the queue are full.

        """
        if arrival is not None:
            arrival.leave()
        ticket = Ticket(jobs=tuple(jobs), entered_s=self._clock.monotonic())
        if not self._queue and self._has_room(ticket):
            self._run(ticket)
        elif len(self._queue) < self._queue_limit:
            self._queue.append(ticket)
        else:
            raise self._full(ticket.entered_s)
        self._tickets.add(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Remove a request in any state, and cancel its unfinished jobs."""
        ticket.close()
        self._tickets.discard(ticket)
        if ticket in self._queue:
            self._queue.remove(ticket)
        for job in ticket.jobs:
            self.end(job.id)

    def end(self, job_id: int) -> None:
        """Cancel one job, if it still runs; its slot is free at once."""
        if job_id in self._running:
            # Sent before the job that takes the slot: the worker's inbox keeps the order.
            self._send(CancelJob(job_id))
            self._free(job_id, self._clock.monotonic())
        self._fill()

    def deliver(self, events: list[WorkerEvent]) -> None:
        """Deliver the events of a step; drop events of requests that have left."""
        now_s = self._clock.monotonic()
        for event in events:
            ticket = self._running.get(event.job_id)
            if ticket is None:
                continue
            if isinstance(event, JobFailure):
                ticket.put(errors.job_failed(event.reason, event.param))
                self._free(event.job_id, now_s)
                continue
            ticket.take(event, now_s, self._gaps)
            if isinstance(event, EmbeddingOutput) or event.finish is not None:
                self._free(event.job_id, now_s)
        self._give_up_slowest()
        self._fill()

    def _give_up_slowest(self) -> None:
        """End the requests that are the furthest behind, until the tokens that wait have room."""
        while sum(ticket.unsent_bytes for ticket in self._tickets) > _UNSENT_BYTES:
            slowest = max(self._tickets, key=lambda ticket: ticket.unsent_bytes)
            slowest.give_up(errors.read_too_slowly(_UNSENT_BYTES))
            self.leave(slowest)

    def refuse_queued(self, refusal: RefusedError) -> None:
        """Refuse all waiting requests."""
        while self._queue:
            self._queue.popleft().put(refusal)

    def refuse_all(self, refusal: RefusedError) -> None:
        """Refuse all waiting requests and cancel all running ones."""
        self.refuse_queued(refusal)
        for ticket in dict.fromkeys(self._running.values()):
            self.refuse(ticket, refusal)

    def refuse(self, ticket: Ticket, refusal: RefusedError) -> None:
        """End a request in any state with this refusal."""
        ticket.put(refusal)
        self.leave(ticket)

    async def until_idle(self) -> None:
        """Wait until no request holds a slot."""
        await self._idle.wait()

    def _has_room(self, ticket: Ticket) -> bool:
        # A request with more jobs than slots would wait forever, so it runs when no other does.
        return not self._running or len(self._running) + len(ticket.jobs) <= self._concurrency

    def _free(self, job_id: int, now_s: float) -> None:
        del self._running[job_id]
        self._ends.add(now_s)

    def _run(self, ticket: Ticket) -> None:
        ticket.started_s = self._clock.monotonic()
        if self._idle.is_set():
            self._ends.begin(ticket.started_s)
        self._idle.clear()
        for job in ticket.jobs:
            self._running[job.id] = ticket
            self._send(job)

    def _fill(self) -> None:
        while self._queue and self._has_room(self._queue[0]):
            self._run(self._queue.popleft())
        if not self._running:
            self._idle.set()
