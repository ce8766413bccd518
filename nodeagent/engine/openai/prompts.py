"""From a checked request to jobs: tokens, and the limits that depend on them.

Tokenizing runs in threads: 8 MiB of text take ten seconds, which must cost the event loop nothing
and short prompts nothing either.
"""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import assert_never

from nodeagent.engine import errors
from nodeagent.engine.jobs import Job
from nodeagent.engine.openai import answering, encoding, limits, messages, resuming
from nodeagent.engine.openai.answering import Manner
from nodeagent.engine.openai.bodies import Conversation, Request, Texts
from nodeagent.engine.ports import Ready
from nodeagent.engine.text.reading import Reading

# Tokenized in some 50 ms; what is longer goes into the slow lane.
_SHORT_CHARACTERS = 50_000


class Lanes:
    """Two tokenizer threads, so that a huge prompt delays only other huge ones."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-short")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-long")

    def of(self, request: Request) -> ThreadPoolExecutor:
        """Return the thread for a request."""
        match request.prompt:
            case Conversation(messages=turns):
                length = messages.length(turns) + answering.length(request)
            case Texts(contents=contents):
                length = sum(len(content) for content in contents)
            case _:
                assert_never(request.prompt)
        return self.for_length(length)

    def for_length(self, characters: int) -> ThreadPoolExecutor:
        """Return the thread for a text, or for tokens."""
        return self._short if characters <= _SHORT_CHARACTERS else self._long

    def close(self) -> None:
        """Drop what waits; what is being tokenized ends by itself."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers a request asks for: what the worker does, and how its tokens are read."""

    job: Job
    reading: Reading
    """Has read the job's `emitted` already; may even be over."""
    prompt: int = 0
    """Which of the request's prompts it continues."""
    echo: str = ""
    """The prompt's text, if it is to be shown first."""
    digest: str = ""
    """Of the prompt's tokens, if the answer is resumable."""
    cached: int | None = None
    """How many of the prompt's tokens were cached where the answer began, if that was elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompter:
    """Makes jobs for one loaded model."""

    ready: Ready
    context_length: int
    concurrency: int
    lanes: Lanes
    fingerprint: str
    """What `system_fingerprint` says."""

    async def choices(
        self, request: Request, *, first_id: int, fresh_seed: int
    ) -> tuple[Choice, ...]:
        """Return the jobs a request asks for, `request.size` of them: all of the first prompt, then of the next.

        The choices of a prompt have the seeds `seed`, `seed + 1`, ...; `fresh_seed` serves a request that
        names none.

        Raises:
            RefusedError: a prompt is empty, too long, or not for this model.

        """
        if not self.ready.has_head:
            raise errors.invalid(
                "This is an embedding model; it generates no text. Use /v1/embeddings.",
                param="model",
                code="not_a_text_model",
            )
        if request.size > self.concurrency:
            raise limits.too_many(request, self.concurrency)
        loop = asyncio.get_running_loop()
        lane = self.lanes.of(request)
        return await loop.run_in_executor(lane, self._made, request, first_id, fresh_seed)

    async def tokens(self, request: Request) -> list[int]:
        """Return the tokens of a request's one prompt.

        Raises:
            RefusedError: it is not for this model.

        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.lanes.of(request), self._read, request)

    def _read(self, request: Request) -> list[int]:
        (prompt,) = encoding.encode(request, self.ready.codec)
        limits.check_known(prompt, self.ready.vocab_size, "prompt")
        return prompt

    def _made(self, request: Request, first_id: int, fresh_seed: int) -> tuple[Choice, ...]:
        limits.check_bias(request, self.ready.vocab_size)
        seed = fresh_seed if request.seed is None else request.seed
        made: list[Choice] = []
        for at, prompt in enumerate(encoding.encode(request, self.ready.codec)):
            limits.check_tokens(prompt, self.ready.vocab_size)
            manner = answering.manner(request, prompt, self.ready.codec, self.ready.grammars)
            job = Job(
                id=first_id,
                prompt=tuple(prompt),
                max_tokens=self._max_tokens(request, len(prompt)),
                sampling=manner.biased(request.sampling),
                top_logprobs=request.top_logprobs,
                grammar=manner.grammar,
            )
            for index in range(request.n):
                sampling = dataclasses.replace(job.sampling, seed=seed + index)
                number = first_id + len(made)
                choice = self._choice(
                    request, dataclasses.replace(job, id=number, sampling=sampling), manner, index
                )
                made.append(dataclasses.replace(choice, prompt=at, echo=self._echo(request, at)))
        return tuple(made)

    def _max_tokens(self, request: Request, prompt_tokens: int) -> int:
        wanted = limits.budget(request, prompt_tokens, self.context_length)
        return limits.within(self.ready.budget, request, prompt_tokens, wanted)

    def _echo(self, request: Request, at: int) -> str:
        if not request.is_echoed or isinstance(request.prompt, Conversation):
            return ""
        content = request.prompt.contents[at]
        return content if isinstance(content, str) else encoding.spelled(content, self.ready.codec)

    def _choice(self, request: Request, job: Job, manner: Manner, index: int) -> Choice:
        codec = self.ready.codec
        reading = manner.reading(f"{resuming.digest(job.prompt)}/{index}")
        if not request.is_chat:
            reading.prime(job.prompt[-1:])
        mark = resuming.digest(job.prompt) if request.is_resumable else ""
        if request.resumed is None:
            return Choice(job=job, reading=reading, digest=mark)
        job = resuming.resume(job, request.resumed, mark, vocab_size=self.ready.vocab_size)
        resuming.replay(reading, job, ends=codec.eos_ids)
        cached = request.resumed.cached_tokens
        return Choice(job=job, reading=reading, digest=mark, cached=cached)
