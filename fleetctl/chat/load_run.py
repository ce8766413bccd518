"""Load on one model through a gateway: a fixed number of requests, so many at once, and their times."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

import msgspec

from fleetctl.chat.answer_stream import AnswerStream, GatewayAccess
from fleetctl.chat.conversation import ChatAnswer, Json
from fleetctl.chat.gateway_pool import GatewayPool
from fleetctl.cli.errors import FleetctlError
from machinery.clock import Clock

# Short words that tokenizers know: about one token each.
_WORDS: Final = ("time", "year", "people", "way", "day", "thing", "life", "world", "state", "hand")
_PROBES: Final = (20, 200)


class Load(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A combination that is measured."""

    concurrency: int
    """Requests at once."""
    prompt_tokens: int
    """Wanted length of each prompt; prompts differ from their first word on, so that no cache serves them."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The figures of one combination. None: no request told."""

    load: Load
    requests: int
    failed: int
    error: str
    """The first error; empty if none failed."""
    seconds: float
    """From the first request's start to the last one's end."""
    prompt_tokens: float | None
    """Mean of what the engines counted."""
    output_tokens: float | None
    first_token_seconds_p50: float | None
    first_token_seconds_p95: float | None
    stream_tokens_per_second: float | None
    """Median of the speed of one stream after its first token."""
    output_tokens_per_second: float
    """All output tokens by all time: the throughput."""
    requests_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGenerator:
    """Sends load to one model."""

    pool: GatewayPool
    clock: Clock
    model: str
    output_tokens: int
    dice: random.Random
    tokens_per_word: float = 1.0
    template_tokens: float = 0.0
    """Tokens of the chat template around the words."""

    async def calibrated(self) -> "LoadGenerator":
        """Return a generator that knows the model's tokens per word. It sends two requests.

        Raises:
            FleetctlError: the model does not answer.

        """
        short, long = [(await self._ask(words, output_tokens=1)).prompt_tokens for words in _PROBES]
        if not short or not long or long <= short:
            return self
        per_word = (long - short) / (_PROBES[1] - _PROBES[0])
        around = max(0.0, short - per_word * _PROBES[0])
        return replace(self, tokens_per_word=per_word, template_tokens=around)

    async def measure(self, load: Load, requests: int) -> LoadResult:
        """Return the figures of so many requests. A request that fails is counted, and not repeated."""
        answers: list[ChatAnswer] = []
        errors: list[str] = []
        words = max(1, round((load.prompt_tokens - self.template_tokens) / self.tokens_per_word))
        waiting = iter(range(requests))

        async def one_after_another() -> None:
            for _ in waiting:
                try:
                    answers.append(await self._ask(words, self.output_tokens))
                except FleetctlError as error:
                    errors.append(error.format_message())

        began_s = self.clock.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, requests)):
                group.create_task(one_after_another())
        return summarize(load, answers, errors, self.clock.monotonic() - began_s)

    async def _ask(self, words: int, output_tokens: int) -> ChatAnswer:
        stream = AnswerStream(self.clock)
        body: Json = {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(self._words(words))}],
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

        async def read(access: GatewayAccess) -> None:
            await stream.read(access, body, lambda _: None)

        await self.pool.send(read, can_resend=lambda: False)
        return stream.answer

    def _words(self, count: int) -> Iterator[str]:
        yield f"{self.dice.getrandbits(40):x}"
        for _ in range(count - 1):
            yield self.dice.choice(_WORDS)


def summarize(
    load: Load, answers: list[ChatAnswer], errors: list[str], seconds: float
) -> LoadResult:
    """Return the figures of answers that took so many seconds in all. Pure."""
    prompts = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
    outputs = [answer.output_tokens for answer in answers if answer.output_tokens is not None]
    firsts = [answer.first_s for answer in answers if answer.first_s is not None]
    speeds = [speed for answer in answers if (speed := answer.tokens_per_second) is not None]
    return LoadResult(
        load=load,
        requests=len(answers) + len(errors),
        failed=len(errors),
        error=errors[0] if errors else "",
        seconds=seconds,
        prompt_tokens=_mean(prompts),
        output_tokens=_mean(outputs),
        first_token_seconds_p50=quantile(firsts, 0.5),
        first_token_seconds_p95=quantile(firsts, 0.95),
        stream_tokens_per_second=quantile(speeds, 0.5),
        output_tokens_per_second=sum(outputs) / seconds if seconds else 0.0,
        requests_per_second=len(answers) / seconds if seconds else 0.0,
    )


def _mean(values: list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def quantile(values: list[float], share: float) -> float | None:
    """Return the smallest value that `share` of all values do not exceed; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, ceil(len(values) * share) - 1)]
