"""Tokens of several choices, as they come and in bursts, within a deadline."""

import random

import pytest

from engine.api.generation_stream import Deadline, GenerationStream
from engine.errors import RefusedError
from engine.jobs import Job, SamplingParams, TokenLogprobs, TokenOutput
from engine.openai.input_processor import GenerationChoice
from engine.service import Service
from engine.text.output_parser import OutputParser
from engine.text.spans import StopMatcher
from machinery.clock import SystemClock
from tests.engine.batch.batches import CONFIG
from tests.engine.test_resuming import Bytes


def service() -> Service:
    """Return one that was never begun: it has a clock and an admission."""
    return Service(CONFIG, clock=SystemClock(), entropy=random.Random(0))


def telling(*stops: str, deadline: Deadline | None = None) -> GenerationStream:
    """Return that of a request with two prompts, the second with two choices."""
    one = service()
    jobs = [
        Job(id=at, prompt=(1,) * length, max_tokens=9, sampling=SamplingParams(temperature=0))
        for at, length in ((7, 3), (8, 5), (9, 5))
    ]
    choices = [
        GenerationChoice(
            job=job, prompt=at, reading=OutputParser(detokenizer=Bytes(), stops=StopMatcher(stops))
        )
        for job, at in zip(jobs, (0, 1, 1), strict=True)
    ]
    return GenerationStream(one, tuple(choices), one.admission.enter(jobs), deadline)


def made(job_id: int, text: str, cached: int = 0) -> TokenOutput:
    return TokenOutput(
        job_id=job_id,
        token=ord(text),
        cached=cached,
        likelihood=TokenLogprobs(logprob=-1.0, top=()),
    )


async def test_what_came_meanwhile_is_told_at_once_and_nothing_is_lost() -> None:
    one = telling()
    for job_id, text in ((7, "a"), (8, "x"), (7, "b"), (9, "p"), (7, "c"), (8, "y")):
        one.ticket.take(made(job_id, text, cached=2), 1.0)
    burst = await one.burst()
    assert [(told.index, told.delta.content) for told in burst] == [(0, "abc"), (1, "xy"), (2, "p")]
    assert [len(told.delta.scored) for told in burst] == [3, 2, 1]
    one.ticket.take(made(8, "z"), 2.0)
    assert [told.delta.content for told in await one.burst()] == ["z"]
    usage = one.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (8, 7, 4)


async def test_a_choice_that_is_over_frees_its_slot_and_is_told_no_more_of() -> None:
    one = telling("bc")
    assert one.service.admission.in_flight == 3
    for text in "abcd":
        one.ticket.take(made(7, text), 1.0)
    one.ticket.take(made(8, "x"), 1.0)
    burst = await one.burst()
    assert [told.delta.content for told in burst] == ["a", "x"]
    assert one.choices[0].reading.finish == "stop"
    assert one.service.admission.in_flight == 2
    assert one.usage.completion_tokens == 4
    assert not one.is_over


async def test_a_deadline_counts_for_what_is_ready_as_well() -> None:
    one = telling(deadline=Deadline(at_s=0.0, timeout_s=2.5))
    one.ticket.take(made(7, "a"), 1.0)
    with pytest.raises(RefusedError, match=r"within the 2\.5 seconds") as caught:
        await one.burst()
    assert caught.value.refusal.status == 504
    assert one.ticket.refusal == caught.value.refusal


async def test_a_deadline_ends_a_wait() -> None:
    now_s = SystemClock().monotonic()
    one = telling(deadline=Deadline(at_s=now_s + 0.01, timeout_s=0.01))
    with pytest.raises(RefusedError, match="x-request-timeout"):
        await one.next()
