"""What was made for one request, as its client is told it: token by token, or in bursts. Sends nothing."""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.admission import Ticket
from engine.errors import Refusal, RefusedError
from engine.jobs import EmbeddingOutput, TokenOutput
from engine.openai.input_processor import GenerationChoice
from engine.openai.response_body import Usage
from engine.service import Service
from engine.text.output_parser import Delta


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a client stops waiting, on the service's monotonic clock."""

    at_s: float
    timeout_s: float

    def passed(self) -> RefusedError:
        """Return what the client is told."""
        message = (
            f"The answer was not complete within the {self.timeout_s:g} seconds of 'x-request-timeout', "
            "which include the time in the queue."
        )
        return RefusedError(
            Refusal(status=504, message=message, type="server_error", code="request_timeout")
        )


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What some tokens added to one choice."""

    index: int
    delta: Delta


@dataclass(slots=True)
class GenerationStream:
    """Reads a request's tokens as they come, and ends a job whose text is over before its tokens are."""

    service: Service
    choices: tuple[GenerationChoice, ...]
    ticket: Ticket
    deadline: Deadline | None = None
    cached: dict[int, int] = field(init=False)
    """How many tokens of each prompt were in the prefix cache, where its answer began."""
    _indexes: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Find choices by their jobs."""
        self.cached = {c.prompt: c.cached for c in self.choices if c.cached is not None}
        self._indexes = {choice.job.id: index for index, choice in enumerate(self.choices)}

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.reading.is_over for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """What was read and made so far; a prompt counts once, however many choices it has."""
        prompts = {choice.prompt: len(choice.job.prompt) for choice in self.choices}
        return Usage(
            prompt_tokens=sum(prompts.values()),
            completion_tokens=sum(len(choice.reading.tokens) for choice in self.choices),
            cached_tokens=sum(self.cached.values()),
            reasoning_tokens=sum(choice.reading.reasoning_tokens for choice in self.choices),
        )

    async def next(self) -> ChoiceDelta:
        """Wait for the next token of a choice that has not ended.

        Raises:
            RefusedError: there will be none.

        """
        while True:
            told = self._take(await self._event())
            if told is not None:
                return told

    async def burst(self) -> list[ChoiceDelta]:
        """Wait for the next token, and take with it what came besides: at most one entry a choice.

        A client that reads slowly so gets larger pieces instead of a longer queue of small ones.

        Raises:
            RefusedError: there will be no token.

        """
        told = [await self.next(), *self._takes(self.ticket.ready())]
        if len(told) == 1:
            return told
        indexes = dict.fromkeys(one.index for one in told)
        return [
            ChoiceDelta(index, Delta.joined(one.delta for one in told if one.index == index))
            for index in indexes
        ]

    async def _event(self) -> TokenOutput | EmbeddingOutput:
        if self.deadline is None:
            return await self.ticket.next()
        left_s = self.deadline.at_s - self.service.clock.monotonic()
        # What came already would be returned without a wait, so that no timeout would ever end it.
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    return await self.ticket.next()
        late = self.deadline.passed()
        self.ticket.refusal = late.refusal
        raise late

    def _takes(self, events: Iterable[TokenOutput | EmbeddingOutput]) -> Iterable[ChoiceDelta]:
        for event in events:
            told = self._take(event)
            if told is not None:
                yield told

    def _take(self, made: TokenOutput | EmbeddingOutput) -> ChoiceDelta | None:
        assert isinstance(made, TokenOutput)
        index = self._indexes[made.job_id]
        choice = self.choices[index]
        if choice.reading.is_over:
            return None  # made while its end was on the way to the worker
        if choice.cached is None:
            self.cached[choice.prompt] = max(self.cached.get(choice.prompt, 0), made.cached)
        delta = choice.reading.take(made)
        if choice.reading.finish is not None and made.finish is None:
            self.service.admission.end(made.job_id)
        return ChoiceDelta(index, delta)
