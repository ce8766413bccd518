"""Input processor: turns a checked request into jobs for the worker.

Tokenizes prompts, applies the limits that depend on their tokens, and restores answers that another engine began.
Tokenizing runs in threads: 8 MiB of text take ten seconds, which must not delay the event loop or short prompts.
"""

import asyncio
import dataclasses
import hashlib
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, assert_never

from engine.errors import PromptRefusedError, TextTooLongError
from engine.grammar.interface import CompiledGrammar
from engine.jobs import FinishReason, Job, TokenOutput
from engine.openai import limits, messages, output_format, prompts
from engine.openai.output_format import ChatEncoder, OutputFormat
from engine.openai.request_body import Conversation, GenerationRequest, ResumePoint, TextPrompts
from engine.ports import ServedModel
from engine.text.interface import Codec, Message
from engine.text.output_parser import OutputParser
from schemas.wire import errors
from schemas.wire.errors import Refusal, RefusedError

T = TypeVar("T")

# The tokenizer takes some 50 ms for these; longer texts go to the other thread.
_MAX_SHORT_CHARACTERS = 50_000


class StopSignal:
    """Tells a tokenizer thread that the client has left; the thread looks between two pieces of its work."""

    def __init__(self) -> None:
        self._is_set = threading.Event()

    def set(self) -> None:
        """Stop the work before its next piece."""
        self._is_set.set()

    def check(self) -> None:
        """Raise CancelledError if the client has left."""
        if self._is_set.is_set():
            raise CancelledError


class TokenizerPool:
    """Two tokenizer threads, so that a huge prompt delays other huge prompts only."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-short")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-long")

    async def run(self, length: int, work: Callable[[StopSignal], T]) -> T:
        """Do `work` in the thread for this many characters or tokens.

        A caller that is cancelled takes work that has not begun out of the queue, and stops other work at its next
        piece.
        """
        stop = StopSignal()
        executor = self._short if length <= _MAX_SHORT_CHARACTERS else self._long
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work, stop)
        except asyncio.CancelledError:
            stop.set()
            raise

    def close(self) -> None:
        """Drop queued work; running work ends by itself."""
        for executor in (self._short, self._long):
            executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChoice:
    """One answer of a request: the job of the worker, and the parser of its tokens."""

    job: Job
    parser: OutputParser
    """Already contains the job's `emitted` tokens, which may have ended the answer."""
    prompt: int = 0
    """Index of the request's prompt."""
    echo: str = ""
    """Text of the prompt, if the answer begins with it."""
    digest: str = ""
    """`prompt_digest` of the prompt, if the answer is resumable."""
    cached: int | None = None
    """Prompt tokens that were cached where the answer began, if that was another engine."""
    compiled: CompiledGrammar | None = None
    """The compiled grammar of the job, which lives as long as the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProcessor:
    """Turns requests into jobs for one loaded model."""

    ready: ServedModel
    context_length: int
    concurrency: int
    tokenizers: TokenizerPool
    fingerprint: str
    """The value of `system_fingerprint`."""

    async def choices(
        self, request: GenerationRequest, *, first_id: int, fresh_seed: int
    ) -> tuple[GenerationChoice, ...]:
        """Return the `request.size` choices of a request: all of the first prompt, then of the next.

        The choices of a prompt have the seeds `seed`, `seed + 1`, ...; `fresh_seed` replaces a missing seed.

        Raises:
            RefusedError: a prompt is empty, too long, or not supported by the model.

        """
        if not self.ready.has_head:
            raise errors.invalid(
                "This is an embedding model; it generates no text. Use /v1/embeddings.",
                param="model",
                code="not_a_text_model",
            )
        if request.size > self.concurrency:
            raise limits.too_many_choices(request, self.concurrency)
        return await self.tokenizers.run(
            work_length(request),
            lambda stop: self._choices(request, first_id, fresh_seed, stop),
        )

    async def tokens(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a request with one prompt.

        Raises:
            RefusedError: the model does not support the prompt.

        """
        return await self.tokenizers.run(
            work_length(request), lambda stop: self._tokens(request, stop)
        )

    async def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens.

        Raises:
            RefusedError: a token is not in the vocabulary.

        """
        limits.check_vocabulary(tokens, self.ready.vocab_size, "tokens")
        return await self.tokenizers.run(
            len(tokens), lambda _: decode_tokens(tokens, self.ready.codec)
        )

    def _tokens(self, request: GenerationRequest, stop: StopSignal) -> list[int]:
        (prompt,) = encode_prompts(request, self.ready.codec, stop)
        limits.check_vocabulary(prompt, self.ready.vocab_size, "prompt")
        return prompt

    def _choices(
        self, request: GenerationRequest, first_id: int, fresh_seed: int, stop: StopSignal
    ) -> tuple[GenerationChoice, ...]:
        limits.check_bias(request, self.ready.vocab_size)
        first_seed = fresh_seed if request.seed is None else request.seed
        choices: list[GenerationChoice] = []
        prompts = encode_prompts(
            request, self.ready.codec, stop, context_length=self.context_length
        )
        for at, prompt in enumerate(prompts):
            stop.check()
            limits.check_tokens(prompt, self.ready.vocab_size)
            limits.check_prompt_logprobs(request, len(prompt))
            answer_format = output_format.build(
                request, prompt, self.ready.codec, self.ready.grammars
            )
            first_job = Job(
                id=first_id,
                prompt=tuple(prompt),
                max_tokens=self._max_tokens(request, len(prompt)),
                sampling=answer_format.with_bias(request.sampling),
                min_tokens=request.min_tokens,
                top_logprobs=request.top_logprobs,
                has_prompt_logprobs=request.has_prompt_logprobs,
                grammar=answer_format.grammar,
                grammar_param=answer_format.grammar_param,
                cache_salt=request.cache_salt,
            )
            for index in range(request.n):
                sampling = dataclasses.replace(first_job.sampling, seed=first_seed + index)
                job = dataclasses.replace(first_job, id=first_id + len(choices), sampling=sampling)
                choice = self._choice(request, job, answer_format, index)
                echo = self._echo(request, at)
                choices.append(
                    dataclasses.replace(
                        choice, prompt=at, echo=echo, compiled=answer_format.compiled
                    )
                )
        return tuple(choices)

    def _max_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        in_context = limits.resolve_max_tokens(request, prompt_tokens, self.context_length)
        return limits.fit_to_memory(self.ready.budget, request, prompt_tokens, in_context)

    def _echo(self, request: GenerationRequest, at: int) -> str:
        if not request.is_echoed or isinstance(request.prompt, Conversation):
            return ""
        content = request.prompt.contents[at]
        return content if isinstance(content, str) else decode_tokens(content, self.ready.codec)

    def _choice(
        self, request: GenerationRequest, job: Job, answer_format: OutputFormat, index: int
    ) -> GenerationChoice:
        digest = prompt_digest(job.prompt)
        parser = answer_format.new_parser(f"{digest}/{index}")
        if request.continues_text:
            parser.prime(job.prompt[-1:])
        if request.resumed is None:
            return GenerationChoice(
                job=job, parser=parser, digest=digest if request.is_resumable else ""
            )
        job = resume_job(job, request.resumed, digest, vocab_size=self.ready.vocab_size)
        replay_tokens(parser, job, end_tokens=self.ready.codec.eos_ids)
        return GenerationChoice(
            job=job, parser=parser, digest=digest, cached=request.resumed.cached_tokens
        )


def work_length(request: GenerationRequest) -> int:
    """Return the approximate work of tokenizing a request, in characters of text."""
    match request.prompt:
        case Conversation(messages=turns):
            return messages.text_length(turns) + output_format.schema_length(request)
        case TextPrompts(contents=contents):
            return sum(len(content) for content in contents)
        case _:
            assert_never(request.prompt)


def encode_prompts(
    request: GenerationRequest,
    codec: Codec,
    stop: StopSignal,
    *,
    context_length: int | None = None,
) -> list[list[int]]:
    """Return the tokens of each prompt of a request.

    A text that is certainly longer than the context is refused before it is tokenized; None accepts any text.

    Raises:
        RefusedError: the model has no chat template, the template refuses the messages, or a text is too long.
        CancelledError: the client has left.

    """
    param = "messages" if request.is_chat else "prompt"
    with refusing_long_texts(param, context_length) as max_tokens:
        match request.prompt:
            case TextPrompts(contents=contents):
                return [_encode_content(content, codec, stop, max_tokens) for content in contents]
            case Conversation(messages=turns):
                encoder = ChatEncoder(request, codec, max_tokens=max_tokens)
                return [_encode_chat(turns, encoder, stop)]
            case _:
                assert_never(request.prompt)


@contextmanager
def refusing_long_texts(param: str, context_length: int | None) -> Iterator[int | None]:
    """Yield the most tokens that a prompt may have; refuse a text that certainly has more.

    Raises:
        RefusedError: the block raised TextTooLongError.

    """
    if context_length is None:
        yield None
        return
    try:
        yield context_length - 1  # an answer has at least one
    except TextTooLongError as error:
        raise prompts.context_exceeded(
            param, context_length, f"at least {error.min_tokens}"
        ) from error


def _encode_content(
    content: str | tuple[int, ...], codec: Codec, stop: StopSignal, max_tokens: int | None
) -> list[int]:
    stop.check()
    if isinstance(content, str):
        return codec.encode_text(content, max_tokens=max_tokens)
    return list(content)


def _encode_chat(turns: Sequence[Message], encoder: ChatEncoder, stop: StopSignal) -> list[int]:
    if not encoder.has_chat_template:
        raise errors.invalid(
            "This model has no chat template; use /v1/completions.", param="messages"
        )
    try:
        tokens = encoder.encode_chat(turns)
        named = {turn["role"]: at for at, turn in enumerate(turns) if "name" in turn}
        named.pop("tool", None)
        # One turn of each role is enough: a template that writes one user's name writes all.
        for role, at in named.items():
            stop.check()
            if not _writes_name(turns, at, tokens, encoder):
                turns = messages.with_spoken_names(turns, role)
                tokens = encoder.encode_chat(turns)
    except PromptRefusedError as error:
        message = f"The model's chat template refuses these messages: {error}"
        raise errors.invalid(message, param="messages") from error
    return tokens


def _writes_name(
    turns: Sequence[Message], index: int, tokens: list[int], encoder: ChatEncoder
) -> bool:
    """Return whether the template writes the name of a turn into the prompt."""
    without = {key: value for key, value in turns[index].items() if key != "name"}
    return encoder.encode_chat([*turns[:index], without, *turns[index + 1 :]]) != tokens


def decode_tokens(tokens: Iterable[int], codec: Codec) -> str:
    """Return the text of tokens."""
    detokenizer = codec.detokenizer()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.last_segment


def prompt_digest(tokens: Sequence[int]) -> str:
    """Return 16 hexadecimal digits that identify a prompt on every machine."""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8).hexdigest()


def resume_job(job: Job, resumed: ResumePoint, digest: str, *, vocab_size: int) -> Job:
    """Return a job that continues where another engine was lost; `digest` is of the job's prompt.

    Raises:
        RefusedError: the resume point belongs to another prompt or another model.

    """
    if resumed.prompt != digest:
        message = (
            f"The prompt has the digest {digest} here and had {resumed.prompt[:40]!r} where the answer began: "
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


def replay_tokens(parser: OutputParser, job: Job, *, end_tokens: Sequence[int]) -> None:
    """Feed the emitted tokens of a job to its parser, and drop the deltas.

    Afterwards the parser is in the state of the lost one; it is over if these tokens ended the answer.
    """
    for count, token in enumerate(job.emitted, start=1):
        finish: FinishReason | None = "length" if count == job.max_tokens else None
        if token in end_tokens:
            finish = "stop"
        parser.take(TokenOutput(job_id=job.id, token=token, finish=finish))
        if parser.is_over:
            return
