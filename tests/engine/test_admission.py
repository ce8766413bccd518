"""Admission: slots, order of the queue, refusals, and the orders sent to the worker."""

import asyncio
from array import array
from dataclasses import dataclass, field

import pytest

from engine import errors
from engine.admission import Admission, AdmittedJob, Ticket
from engine.errors import RefusedError
from engine.jobs import CancelJob, Job, JobFailure, SamplingParams, TokenLogprobs, TokenOutput
from tests.support.clock import FakeClock


def job(number: int) -> Job:
    sampling = SamplingParams(temperature=0, top_p=1, seed=0)
    return Job(id=number, prompt=(1,), max_tokens=9, sampling=sampling)


@dataclass(slots=True)
class Desk:
    """An admission with two slots and two places, and the orders that it has sent."""

    orders: list[int] = field(default_factory=list)
    clock: FakeClock = field(default_factory=FakeClock)

    def admission(self) -> Admission:
        return Admission(concurrency=2, queue_limit=2, send=self._note, clock=self.clock)

    def _note(self, order: AdmittedJob | CancelJob) -> None:
        self.orders.append(-order.job_id if isinstance(order, CancelJob) else order.id)


def fill() -> tuple[Desk, Admission, list[Ticket]]:
    desk = Desk()
    admission = desk.admission()
    return desk, admission, [admission.enter([job(number)]) for number in (1, 2, 3, 4)]


def last(number: int) -> TokenOutput:
    return TokenOutput(job_id=number, token=5, finish="stop")


async def test_two_run_two_wait_and_the_fifth_is_refused() -> None:
    desk, admission, _ = fill()
    assert (admission.in_flight, admission.queued, desk.orders) == (2, 2, [1, 2])
    with pytest.raises(RefusedError) as caught:
        admission.enter([job(5)])
    assert (caught.value.refusal.status, caught.value.refusal.code) == (429, "queue_full")


async def test_the_longest_waiting_takes_a_freed_slot() -> None:
    desk, admission, tickets = fill()
    admission.deliver([last(2)])
    assert desk.orders == [1, 2, 3]
    assert await tickets[1].next() == last(2)
    admission.leave(tickets[1])  # what is finished is not cancelled
    assert desk.orders == [1, 2, 3]
    admission.leave(tickets[0])
    assert desk.orders == [1, 2, 3, -1, 4]
    admission.leave(tickets[0])
    assert (admission.in_flight, admission.queued) == (2, 0)


async def test_a_waiting_request_leaves_without_an_order() -> None:
    desk, admission, tickets = fill()
    admission.leave(tickets[2])
    admission.deliver([last(1), last(99)])
    assert desk.orders == [1, 2, 4]


async def test_a_failure_frees_the_slot_and_is_reported() -> None:
    desk, admission, tickets = fill()
    admission.deliver([JobFailure(job_id=1, reason="boom")])
    with pytest.raises(RefusedError, match="boom") as caught:
        await tickets[0].next()
    assert caught.value.refusal.status == 500
    assert desk.orders == [1, 2, 3]


async def test_refusing_all_starts_no_queued_request() -> None:
    desk, admission, tickets = fill()
    admission.refuse_all(errors.internal("over"))
    for ticket in tickets:
        with pytest.raises(RefusedError, match="over"):
            await ticket.next()
    assert desk.orders == [1, 2, -1, -2]
    async with asyncio.timeout(1):
        await admission.until_idle()


async def test_a_request_of_several_jobs_enters_completely_and_is_not_overtaken() -> None:
    desk = Desk()
    admission = desk.admission()
    first = admission.enter([job(1)])
    both = admission.enter([job(2), job(3)])
    admission.enter([job(4)])
    assert desk.orders == [1]
    admission.leave(first)
    assert desk.orders == [1, -1, 2, 3]
    admission.end(2)
    assert desk.orders == [1, -1, 2, 3, -2, 4]
    admission.deliver([last(3)])
    assert both.ready(9) == [last(3)]


async def test_a_ticket_records_times_and_tokens() -> None:
    desk = Desk()
    admission = desk.admission()
    ahead = admission.enter([job(1)])
    ticket = admission.enter([job(2), job(3)])
    await desk.clock.advance(2)
    admission.leave(ahead)
    assert (ticket.entered_s, ticket.started_s, ticket.prompt_tokens) == (0, 2, 1)
    for second in range(3):
        await desk.clock.advance(1)
        admission.deliver(
            [
                TokenOutput(job_id=number, token=7, cached_tokens=9 * (second == 0))
                for number in (2, 3)
            ]
        )
    assert (ticket.first_s, ticket.last_s, ticket.completion_tokens, ticket.cached_tokens) == (
        3,
        5,
        6,
        9,
    )
    assert ticket.per_token_s() == 1
    admission.refuse_all(errors.draining())
    assert ticket.refusal is not None
    assert ticket.refusal.code == "draining"


async def test_a_full_queue_answers_with_retry_after() -> None:
    desk, admission, _ = fill()
    await desk.clock.advance(10)
    admission.deliver([last(1), last(2)])
    for number in (5, 6):
        admission.enter([job(number)])
    with pytest.raises(RefusedError) as caught:
        admission.enter([job(7)])
    # Two ended within ten seconds, so three need fifteen.
    assert caught.value.refusal.retry_after_s == 15


async def test_requests_are_counted_and_refused_from_their_arrival() -> None:
    admission = Desk().admission()
    arrivals = [admission.arrive() for _ in range(4)]  # two slots and two places
    assert (admission.in_flight, admission.queued, admission.is_crowded) == (0, 4, False)
    with pytest.raises(RefusedError) as caught:
        admission.arrive()
    assert (caught.value.refusal.status, caught.value.refusal.code) == (429, "queue_full")
    tickets = [admission.enter([job(at)], arrival) for at, arrival in enumerate(arrivals)]
    assert (admission.in_flight, admission.queued, len(tickets)) == (2, 2, 4)
    assert admission.is_crowded


async def test_an_arrival_that_leaves_gives_its_place_back_once() -> None:
    admission = Desk().admission()
    first, _ = admission.arrive(), admission.arrive()
    first.leave()
    first.leave()
    assert admission.queued == 1


def scored(number: int) -> TokenOutput:
    tokens, values = array("i", range(20)), array("f", [-1.0] * 20)
    logprobs = TokenLogprobs(logprob=-1.0, top_tokens=tokens, top_logprobs=values)
    return TokenOutput(job_id=number, token=5, logprobs=logprobs)


async def test_the_request_furthest_behind_ends_when_too_many_tokens_wait() -> None:
    desk, admission, (behind, near, *_) = fill()
    for _ in range(1000):
        admission.deliver([scored(1)])
    size = behind.unsent_bytes
    while behind.refusal is None:
        assert behind.unsent_bytes + near.unsent_bytes < 40 << 20
        admission.deliver([scored(1), scored(1), scored(2)])
    assert size == 1000 * scored(1).memory_bytes
    assert (behind.refusal.status, behind.refusal.code) == (408, "read_too_slowly")
    assert (behind.waiting, behind.unsent_bytes, near.refusal) == (1, 0, None)
    assert desk.orders == [1, 2, -1, 3]
    with pytest.raises(RefusedError, match="32 MiB"):
        await behind.next()
    while near.waiting:
        near.ready(100)
    assert near.unsent_bytes == 0


async def test_tokens_of_a_job_that_has_ended_count_until_its_request_leaves() -> None:
    desk = Desk()
    admission = desk.admission()
    tickets: list[Ticket] = []
    for number in range(1, 60):
        tickets.append(admission.enter([job(number)]))
        admission.deliver([*(scored(number) for _ in range(2_500)), last(number)])
    waiting = [ticket for ticket in tickets if ticket.refusal is None]
    assert 15 < len(waiting) < 40
    for ticket in waiting:
        admission.leave(ticket)
    tickets = [admission.enter([job(number)]) for number in (61, 62)]
    admission.deliver([scored(61)] * 2000)
    assert tickets[0].refusal is None
