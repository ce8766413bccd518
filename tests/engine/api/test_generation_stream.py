"""Generation streams: tokens of several choices stream by stream and in bursts, within a deadline."""

import asyncio
import random
from array import array
from dataclasses import replace

import pytest

from engine.api.generation_stream import Deadline, GenerationStream
from engine.jobs import Job, SamplingParams, TokenLogprobs, TokenOutput
from engine.openai.input_processor import GenerationChoice
from engine.service import Service
from engine.text.output_parser import OutputParser
from engine.text.spans import StopMatcher
from machinery.clock import SystemClock
from schemas.wire.errors import RefusedError
from tests.support.byte_detokenizer import ByteDetokenizer
from tests.support.engine_batches import CONFIG


def service() -> Service:
    """Return a service that is not started: it has a clock and an admission."""
    return Service(CONFIG, clock=SystemClock(), entropy=random.Random(0))


def new_stream(*stops: str, deadline: Deadline | None = None) -> GenerationStream:
    """Return the stream of a request with two prompts, the second with two choices."""
    idle = service()
    jobs = [
        Job(id=at, prompt=(1,) * length, max_tokens=9, sampling=SamplingParams(temperature=0))
        for at, length in ((7, 3), (8, 5), (9, 5))
    ]
    choices = [
        GenerationChoice(
            job=job,
            prompt=at,
            parser=OutputParser(detokenizer=ByteDetokenizer(), stops=StopMatcher(stops)),
        )
        for job, at in zip(jobs, (0, 1, 1), strict=True)
    ]
    return GenerationStream(idle, tuple(choices), idle.admission.enter(jobs), deadline)


def output(job_id: int, text: str, cached: int = 0) -> TokenOutput:
    return TokenOutput(
        job_id=job_id,
        token=ord(text),
        cached_tokens=cached,
        logprobs=TokenLogprobs(logprob=-1.0, top_tokens=array("i"), top_logprobs=array("f")),
    )


async def test_ready_tokens_are_joined_and_none_is_lost() -> None:
    stream = new_stream()
    for job_id, text in ((7, "a"), (8, "x"), (7, "b"), (9, "p"), (7, "c"), (8, "y")):
        stream.ticket.take(output(job_id, text, cached=2), 1.0)
    burst = await stream.burst()
    assert [(delta.index, delta.delta.content) for delta in burst] == [
        (0, "abc"),
        (1, "xy"),
        (2, "p"),
    ]
    assert [len(delta.delta.scored) for delta in burst] == [3, 2, 1]
    stream.ticket.take(output(8, "z"), 2.0)
    assert [delta.delta.content for delta in await stream.burst()] == ["z"]
    usage = stream.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (8, 7, 4)


async def test_streams_that_are_behind_take_turns() -> None:
    """Hundreds of clients may read again at once, and what else the engine does must not wait for all their tokens."""
    first = new_stream()
    streams = [first]
    for job_id in range(20, 40):
        job = replace(first.choices[0].job, id=job_id)
        parser = OutputParser(detokenizer=ByteDetokenizer(), stops=StopMatcher(()))
        choice = GenerationChoice(job=job, prompt=0, parser=parser)
        ticket = first.service.admission.enter([job])
        streams.append(GenerationStream(first.service, (choice,), ticket))
        for _ in range(100):
            ticket.take(output(job_id, "a"), 1.0)
    behind, most = streams[1:], 0

    def waiting() -> int:
        return sum(stream.ticket.waiting for stream in behind)

    async def read(stream: GenerationStream) -> None:
        while stream.ticket.waiting:
            await stream.burst()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for stream in behind:
            group.create_task(read(stream))
        while before := waiting():
            await asyncio.sleep(0)
            most = max(most, before - waiting())
    assert 0 < most <= 3 * 8, "the last tokens of a stream need no turn"
    assert [stream.usage.completion_tokens for stream in behind] == [100] * 20


async def test_a_complete_choice_frees_its_slot_and_drops_later_tokens() -> None:
    stream = new_stream("bc")
    assert stream.service.admission.in_flight == 3
    for text in "abcd":
        stream.ticket.take(output(7, text), 1.0)
    stream.ticket.take(output(8, "x"), 1.0)
    burst = await stream.burst()
    assert [delta.delta.content for delta in burst] == ["a", "x"]
    assert stream.choices[0].parser.finish == "stop"
    assert stream.service.admission.in_flight == 2
    assert stream.usage.completion_tokens == 4
    assert not stream.is_over


async def test_a_deadline_also_ends_ready_tokens() -> None:
    stream = new_stream(deadline=Deadline(at_s=0.0, timeout_s=2.5))
    stream.ticket.take(output(7, "a"), 1.0)
    with pytest.raises(RefusedError, match=r"within the 2\.5 seconds") as caught:
        await stream.burst()
    assert caught.value.refusal.status == 504
    assert stream.ticket.refusal == caught.value.refusal


async def test_a_deadline_ends_a_wait() -> None:
    now_s = SystemClock().monotonic()
    stream = new_stream(deadline=Deadline(at_s=now_s + 0.01, timeout_s=0.01))
    with pytest.raises(RefusedError, match="x-request-timeout"):
        await stream.burst()


async def test_a_pause_ends_a_wait_before_the_deadline() -> None:
    later_s = SystemClock().monotonic() + 600
    for deadline in (None, Deadline(at_s=later_s, timeout_s=600)):
        stream = new_stream(deadline=deadline)
        assert await stream.burst(0.01) == []
        stream.ticket.take(output(7, "a"), 1.0)
        assert [delta.delta.content for delta in await stream.burst(0.01)] == ["a"]
