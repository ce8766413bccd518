"""Prompts as tokens: a text's, or those of a conversation as the model's chat template writes it. Runs in threads.

Answers that another process began and lost: what is checked, and how they are read again. Pure.

From a checked request to jobs: tokens, and the limits that depend on them.

Tokenizing runs in threads: 8 MiB of text take ten seconds, which must cost the event loop nothing
and short prompts nothing either.
"""

import asyncio
import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import assert_never

from engine import errors
from engine.errors import PromptRefusedError, Refusal, RefusedError
from engine.jobs import FinishReason, Job, TokenOutput
from engine.openai import limits, messages, output_format
from engine.openai.output_format import OutputFormat
from engine.openai.request_body import Conversation, GenerationRequest, ResumePoint, TextPrompts
from engine.ports import Codec, Message, ServedModel
from engine.text.output_parser import OutputParser


def encode_prompts(request: GenerationRequest, codec: Codec) -> list[list[int]]:
    """Return the tokens of each of a request's prompts.

    Raises:
        RefusedError: the model has no chat template, or the template refuses the messages.

    """
    match request.prompt:
        case TextPrompts(contents=contents):
            return [
                codec.encode_text(content) if isinstance(content, str) else list(content)
                for content in contents
            ]
        case Conversation(messages=turns):
            return [_encode_chat(turns, output_format.ChatEncoder(request, codec))]
        case _:
            assert_never(request.prompt)


def _encode_chat(turns: Sequence[Message], codec: output_format.ChatEncoder) -> list[int]:
    if not codec.has_chat_template:
        raise errors.invalid(
            "This model has no chat template; use /v1/completions.", param="messages"
        )
    try:
        tokens = codec.encode_chat(turns)
        for index, turn in enumerate(turns):
            # Once a role is enough: a template that names one user names all.
            is_first = turn["role"] not in (
                other["role"] for other in turns[:index] if "name" in other
            )
            if turn["role"] != "tool" and "name" in turn and is_first:
                _check_name(turns, index, tokens, codec)
    except PromptRefusedError as error:
        message = f"The model's chat template refuses these messages: {error}"
        raise errors.invalid(message, param="messages") from error
    return tokens


def _check_name(
    turns: Sequence[Message], index: int, tokens: list[int], codec: output_format.ChatEncoder
) -> None:
    """Refuse a name of which the model would never hear."""
    without = {key: value for key, value in turns[index].items() if key != "name"}
    if codec.encode_chat([*turns[:index], without, *turns[index + 1 :]]) == tokens:
        raise errors.invalid(
            "This model's chat template has no place for names; say in the content who speaks.",
            param=f"messages[{index}].name",
        )


def decode_tokens(prompt: Iterable[int], codec: Codec) -> str:
    """Return the text of tokens."""
    detokenizer = codec.detokenizer()
    for token in prompt:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.last_segment


def prompt_digest(tokens: Sequence[int]) -> str:
    """Return a short name of a prompt's tokens, the same on every machine."""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8).hexdigest()


def resume_job(job: Job, resumed: ResumePoint, mark: str, *, vocab_size: int) -> Job:
    """Return a job that goes on where another process was lost.

    Raises:
        RefusedError: what that process told does not belong to this prompt or this model.

    """
    if resumed.prompt != mark:
        message = (
            f"The prompt has the digest {mark} here and had {resumed.prompt[:40]!r} where the answer began: "
            "the tokenizer or the chat template differs. Repeat the request without 'fleet'."
        )
        refusal = Refusal(status=409, message=message, param="fleet.prompt", code="prompt_differs")
        raise RefusedError(refusal)
    if len(resumed.tokens) > job.max_tokens:
        message = f"'fleet.tokens' has {len(resumed.tokens)} tokens, more than the {job.max_tokens} allowed."
        raise errors.invalid(message, param="fleet.tokens")
    limits.check_vocabulary(resumed.tokens, vocab_size, "fleet.tokens")
    sampling = dataclasses.replace(job.sampling, seed=resumed.seed)
    return dataclasses.replace(job, sampling=sampling, emitted=resumed.tokens)


def replay_tokens(reading: OutputParser, job: Job, *, ends: Sequence[int]) -> None:
    """Read what was emitted before, as it was read then, and show nothing of it.

    Afterwards the reading is where the lost one was: over, if these tokens had ended the answer.
    """
    for count, token in enumerate(job.emitted, start=1):
        over: FinishReason | None = "length" if count == job.max_tokens else None
        if token in ends:
            over = "stop"
        reading.take(TokenOutput(job_id=job.id, token=token, finish=over))
        if reading.is_over:
            return


# Tokenized in some 50 ms; what is longer goes into the slow lane.
_MAX_SHORT_CHARACTERS = 50_000


class TokenizerPool:
    """Two tokenizer threads, so that a huge prompt delays only other huge ones."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-short")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-long")

    def of(self, request: GenerationRequest) -> ThreadPoolExecutor:
        """Return the thread for a request."""
        match request.prompt:
            case Conversation(messages=turns):
                length = messages.text_length(turns) + output_format.schema_length(request)
            case TextPrompts(contents=contents):
                length = sum(len(content) for content in contents)
            case _:
                assert_never(request.prompt)
        return self.for_length(length)

    def for_length(self, characters: int) -> ThreadPoolExecutor:
        """Return the thread for a text, or for tokens."""
        return self._short if characters <= _MAX_SHORT_CHARACTERS else self._long

    def close(self) -> None:
        """Drop what waits; what is being tokenized ends by itself."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChoice:
    """One of the answers a request asks for: what the worker does, and how its tokens are read."""

    job: Job
    reading: OutputParser
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
class InputProcessor:
    """Makes jobs for one loaded model."""

    ready: ServedModel
    context_length: int
    concurrency: int
    lanes: TokenizerPool
    fingerprint: str
    """What `system_fingerprint` says."""

    async def choices(
        self, request: GenerationRequest, *, first_id: int, fresh_seed: int
    ) -> tuple[GenerationChoice, ...]:
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
            raise limits.too_many_choices(request, self.concurrency)
        loop = asyncio.get_running_loop()
        lane = self.lanes.of(request)
        return await loop.run_in_executor(lane, self._made, request, first_id, fresh_seed)

    async def tokens(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a request's one prompt.

        Raises:
            RefusedError: it is not for this model.

        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.lanes.of(request), self._read, request)

    def _read(self, request: GenerationRequest) -> list[int]:
        (prompt,) = encode_prompts(request, self.ready.codec)
        limits.check_vocabulary(prompt, self.ready.vocab_size, "prompt")
        return prompt

    def _made(
        self, request: GenerationRequest, first_id: int, fresh_seed: int
    ) -> tuple[GenerationChoice, ...]:
        limits.check_bias(request, self.ready.vocab_size)
        seed = fresh_seed if request.seed is None else request.seed
        made: list[GenerationChoice] = []
        for at, prompt in enumerate(encode_prompts(request, self.ready.codec)):
            limits.check_tokens(prompt, self.ready.vocab_size)
            manner = output_format.build(request, prompt, self.ready.codec, self.ready.grammars)
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

    def _max_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        wanted = limits.resolve_max_tokens(request, prompt_tokens, self.context_length)
        return limits.fit_to_memory(self.ready.budget, request, prompt_tokens, wanted)

    def _echo(self, request: GenerationRequest, at: int) -> str:
        if not request.is_echoed or isinstance(request.prompt, Conversation):
            return ""
        content = request.prompt.contents[at]
        return content if isinstance(content, str) else decode_tokens(content, self.ready.codec)

    def _choice(
        self, request: GenerationRequest, job: Job, manner: OutputFormat, index: int
    ) -> GenerationChoice:
        codec = self.ready.codec
        reading = manner.reading(f"{prompt_digest(job.prompt)}/{index}")
        if not request.is_chat:
            reading.prime(job.prompt[-1:])
        mark = prompt_digest(job.prompt) if request.is_resumable else ""
        if request.resumed is None:
            return GenerationChoice(job=job, reading=reading, digest=mark)
        job = resume_job(job, request.resumed, mark, vocab_size=self.ready.vocab_size)
        replay_tokens(reading, job, ends=codec.eos_ids)
        cached = request.resumed.cached_tokens
        return GenerationChoice(job=job, reading=reading, digest=mark, cached=cached)
