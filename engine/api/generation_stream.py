"""Stream of one request's generated tokens, as deltas of its choices: one by one or in bursts. Sends nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from engine.admission import Ticket
from engine.jobs import JobOutput, TokenOutput
from engine.openai.input_processor import GenerationChoice
from engine.openai.response_body import Usage
from engine.service import Service
from engine.text.output_parser import Delta
from schemas.wire import headers
from schemas.wire.errors import Refusal, RefusedError

# Outputs of one burst. A stream for which more wait takes turns with others: to encode a token with its alternatives takes
# 0.1 ms, and hundreds of clients may read again at once.
_MOST_OUTPUTS = 8


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time at which a client stops waiting, on the service's monotonic clock."""

    at_s: float
    timeout_s: float

    def exceeded(self) -> RefusedError:
        """Return the refusal of a request whose deadline passed."""
        message = (
            f"The answer was not complete within the {self.timeout_s:g} seconds of '{headers.REQUEST_TIMEOUT}', "
            "which include the time in the queue."
        )
        return RefusedError(Refusal(status=504, message=message, code="request_timeout"))

    @classmethod
    def of(cls, arrived_s: float, timeout_s: float | None) -> "Deadline | None":
        """Return the deadline of a request; None if its client waits without a limit."""
        return None if timeout_s is None else cls(arrived_s + timeout_s, timeout_s)


@contextlib.asynccontextmanager
async def within(service: Service, deadline: Deadline | None) -> AsyncIterator[None]:
    """Refuse what is not done when the deadline passes."""
    left_s = None if deadline is None else deadline.at_s - service.clock.monotonic()
    try:
        async with asyncio.timeout(left_s):
            yield
    except TimeoutError:
        assert deadline is not None
        raise deadline.exceeded() from None


class ChoiceDelta(msgspec.Struct, frozen=True):
    """The addition of some tokens to one choice."""

    index: int
    delta: Delta


@dataclass(slots=True)
class GenerationStream:
    """Parses a request's tokens as they come, and ends a job whose text is complete before its tokens are."""

    service: Service
    choices: tuple[GenerationChoice, ...]
    ticket: Ticket
    deadline: Deadline | None = None
    cached: dict[int, int] = field(init=False)
    """Cached tokens of each prompt, where its answer began."""
    _indexes: dict[int, int] = field(init=False)
    """Indexes of choices by the ids of their jobs."""
    _incomplete: int = field(init=False)
    """The number of choices that are not complete."""

    def __post_init__(self) -> None:
        """Index the choices by their jobs."""
        self._incomplete = sum(not choice.parser.is_over for choice in self.choices)
        self.cached = {c.prompt: c.cached for c in self.choices if c.cached is not None}
        self._indexes = {choice.job.id: index for index, choice in enumerate(self.choices)}

    @property
    def is_over(self) -> bool:
        """Return whether every choice is complete."""
        return self._incomplete == 0

    @property
    def usage(self) -> Usage:
        """The token counts so far. A prompt counts once, however many choices it has."""
        prompts = {choice.prompt: len(choice.job.prompt) for choice in self.choices}
        return Usage(
            prompt_tokens=sum(prompts.values()),
            completion_tokens=sum(len(choice.parser.tokens) for choice in self.choices),
            cached_tokens=sum(self.cached.values()),
            reasoning_tokens=sum(choice.parser.reasoning_tokens for choice in self.choices),
        )

    async def burst(self, quiet_s: float | None = None) -> list[ChoiceDelta]:
        """Wait for the next token, and join some that are ready; return none if there is no token for `quiet_s`.

        A slow client thus gets larger pieces instead of a longer queue of small ones. There is one delta for each
        choice, or more where one would lose the order of its text and calls.

        Raises:
            RefusedError: no token will follow.

        """
        deltas: list[ChoiceDelta] = []
        while not deltas:
            if self.ticket.waiting > _MOST_OUTPUTS:
                async with self.service.catching_up:
                    await asyncio.sleep(0)
            output = await self._next_output(quiet_s)
            if output is None:
                return []
            deltas = [
                delta
                for each in (output, *self.ticket.ready(_MOST_OUTPUTS - 1))
                if (delta := self._parse(each)) is not None
            ]
        if len(deltas) == 1:
            return deltas
        indexes = dict.fromkeys(delta.index for delta in deltas)
        return [
            ChoiceDelta(index, joined)
            for index in indexes
            for joined in Delta.joined_in_order(
                delta.delta for delta in deltas if delta.index == index
            )
        ]

    async def _next_output(self, quiet_s: float | None) -> JobOutput | None:
        if self.deadline is None:
            return await self.ticket.next(quiet_s)
        left_s = self.deadline.at_s - self.service.clock.monotonic()
        # `ticket.next` returns a ready token without a wait, so a timeout alone would never end a fast stream.
        if left_s > 0:
            output = await self.ticket.next(left_s if quiet_s is None else min(left_s, quiet_s))
            if output is not None or (quiet_s is not None and quiet_s < left_s):
                return output
        error = self.deadline.exceeded()
        self.ticket.refusal = error.refusal
        raise error

    def _parse(self, output: JobOutput) -> ChoiceDelta | None:
        assert isinstance(output, TokenOutput)
        index = self._indexes[output.job_id]
        choice = self.choices[index]
        if choice.parser.is_over:
            return None  # generated while the cancellation was on its way to the worker
        if choice.cached is None:
            self.cached[choice.prompt] = max(
                self.cached.get(choice.prompt, 0), output.cached_tokens
            )
        delta = choice.parser.take(output)
        if choice.parser.finish is not None:
            self._incomplete -= 1
            if output.finish is None:
                self.service.admission.end(output.job_id)
        return ChoiceDelta(index, delta)
