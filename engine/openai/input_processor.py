"""Input processor: turns a checked request into jobs for the worker.

Applies the limits that depend on the tokens of a prompt, and restores answers that another engine began. Prompts are
tokenized, and grammars tried, in other processes (input_workers/).
"""

import asyncio
import dataclasses
import hashlib
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import assert_never

from engine.cache.interface import ADAPTER_SALT
from engine.errors import GrammarError
from engine.grammar.interface import CompiledGrammar, GrammarCompiler
from engine.jobs import FinishReason, Job, TokenOutput
from engine.openai import limits, messages, output_format
from engine.openai.input_tasks import (
    GrammarTask,
    InputRunner,
    Lane,
    PreparedPrompt,
    PromptsTask,
)
from engine.openai.output_format import OutputFormat
from engine.openai.request_body import (
    Conversation,
    ConversationEnd,
    GenerationRequest,
    TextPrompts,
)
from engine.openai.resume_point import ResumePoint
from engine.ports import ServedModel
from engine.text.codec import TextCodec
from engine.text.output_parser import Delta, OutputParser
from engine.vision import media_reader
from schemas.wire import errors
from schemas.wire.errors import Refusal, RefusedError

# Most characters of a lane's texts. A chat in the first one must not wait for a text of some pages: a slow tokenizer
# takes 30 ms for 8,000 characters on a busy machine.
_MAX_CHARACTERS = {Lane.SHORT: 1_000, Lane.MEDIUM: 10_000, Lane.LONG: 100_000}
# Grammars that are known to compile: those of an application's few forms.
_KNOWN_GRAMMARS, _KNOWN_CHARACTERS = 256, 16 << 20


class KnownGrammars:
    """Grammars of forms that compiled within the limits of a worker, least recently used first."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, str | None] = OrderedDict()
        self._characters = 0

    def get(self, key: bytes) -> tuple[str | None] | None:
        """Return the grammar of a form, in a tuple; None if it is not known."""
        if key not in self._grammars:
            return None
        self._grammars.move_to_end(key)
        return (self._grammars[key],)

    def add(self, key: bytes, grammar: str | None) -> None:
        """Add the grammar of a form."""
        if key in self._grammars:
            return
        self._grammars[key] = grammar
        self._characters += len(grammar or "")
        while len(self._grammars) > _KNOWN_GRAMMARS or self._characters > _KNOWN_CHARACTERS:
            _, old = self._grammars.popitem(last=False)
            self._characters -= len(old or "")


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
    replayed: tuple[Delta, ...] = ()
    """The deltas of the job's `emitted` tokens, which the client has."""
    compiled: CompiledGrammar | None = None
    """The compiled grammar of the job, which lives as long as the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProcessor:
    """Turns requests into jobs for one loaded model."""

    ready: ServedModel
    context_length: int
    concurrency: int
    inputs: InputRunner
    fingerprint: str
    """The value of `system_fingerprint`."""
    _known: KnownGrammars = field(default_factory=KnownGrammars)
    _compiling: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
    )

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
                "This is an embedding model; it generates no text. Use /v1/embeddings."
                if self.ready.pooling is None or self.ready.pooling.score is None
                else "This is a cross-encoder; it generates no text. Use /v1/rerank or /v1/score.",
                param="model",
                code="not_a_text_model",
            )
        limits.check_infill(request, self.ready.codec.traits)
        if request.size > self.concurrency:
            raise limits.too_many_choices(request, self.concurrency)
        limits.check_bias(request, self.ready.vocab_size)
        first_seed = fresh_seed if request.seed is None else request.seed
        choices: list[GenerationChoice] = []
        for at, prepared in enumerate(await self._prompts(request, self.context_length)):
            prompt = prepared.tokens
            limits.check_tokens(prompt, self.ready.vocab_size)
            limits.check_prompt_logprobs(request, len(prompt))
            max_tokens = self._max_tokens(request, len(prompt))
            answer_format = await self._format(request, prompt)
            first_job = Job(
                id=first_id,
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=answer_format.with_bias(request.sampling),
                min_tokens=request.min_tokens,
                top_logprobs=request.top_logprobs,
                has_prompt_logprobs=request.has_prompt_logprobs,
                grammar=answer_format.grammar,
                grammar_param=answer_format.grammar_param,
                cache_salt=self._cache_salt(request),
                images=prepared.images,
                cache_prompt=self._cache_prompt(prepared),
                system_tokens=prepared.system_tokens,
                adapter=self.ready.adapters.get(request.model, ""),
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

    async def tokens(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a request with one prompt.

        Raises:
            RefusedError: the model does not support the prompt.

        """
        (prompt,) = await self._prompts(request, None)
        limits.check_vocabulary(prompt.tokens, self.ready.vocab_size, "prompt")
        return list(prompt.tokens)

    async def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens.

        Raises:
            RefusedError: a token is not in the vocabulary.

        """
        limits.check_vocabulary(tokens, self.ready.vocab_size, "tokens")
        return await asyncio.to_thread(decode_tokens, tokens, self.ready.codec)

    def close(self) -> None:
        """Drop grammars that wait to be compiled."""
        self._compiling.shutdown(wait=False, cancel_futures=True)

    async def _prompts(
        self, request: GenerationRequest, context_length: int | None
    ) -> tuple[PreparedPrompt, ...]:
        """Return the tokens of each prompt, and its images."""
        if isinstance(request.prompt, TextPrompts):
            tokens = tuple(one for one in request.prompt.contents if not isinstance(one, str))
            if len(tokens) == len(request.prompt.contents):
                return tuple(
                    PreparedPrompt(tokens=token) for token in tokens
                )  # there is nothing to do
        length = work_length(request)
        has_images = self.ready.image_rules is not None and _has_images(request)
        budget = self.ready.budget
        return await self.inputs.prepare(
            Lane.HUGE if has_images else lane_of(length),
            PromptsTask(
                request=request,
                context_length=context_length,
                image_rules=self.ready.image_rules,
                counts_system=budget is not None and budget.footprint.checkpoint_tokens > 0,
            ),
            size=length,
        )

    async def _format(self, request: GenerationRequest, prompt: tuple[int, ...]) -> OutputFormat:
        """Return the output format of the answers to a prompt, with its grammar compiled."""
        codec, grammars = self.ready.codec, self.ready.grammars
        if not output_format.has_grammar(request, codec.traits):
            return output_format.build(request, prompt, codec, None, None)
        grammar = await self._grammar(request, output_format.prompt_tail(prompt))
        if grammar is None or grammars is None:
            return output_format.build(request, prompt, codec, None, None)
        compiled = grammars.find(grammar)
        if compiled is None:
            compiled = await self._compile(grammars, grammar)
        return output_format.build(request, prompt, codec, grammar, compiled)

    async def _compile(self, grammars: GrammarCompiler, grammar: str) -> CompiledGrammar:
        """Compile a grammar that has compiled in a worker: here it takes as long, and as much memory."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._compiling, grammars.check, grammar)
        except GrammarError as error:
            raise errors.invalid(f"Invalid schema: {error}") from error

    async def _grammar(self, request: GenerationRequest, tail: tuple[int, ...]) -> str | None:
        """Return a grammar that compiled in a worker within its limits."""
        form = pickle.dumps((request.format, request.toolbox, request.is_chat))
        state = output_format.thinking_state(request, tail, self.ready.codec)
        key = hashlib.blake2b(form + state.name.encode(), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None:
            return known[0]
        bare = _without_earlier_text(request.prompt)
        task = GrammarTask(request=dataclasses.replace(request, prompt=bare), tail=tail)
        (prompt,) = await self.inputs.prepare(Lane.GRAMMAR, task, size=0)
        self._known.add(key, prompt.grammar)
        return prompt.grammar

    def _cache_salt(self, request: GenerationRequest) -> str:
        """Return the salt of the request's prompts: keys and values differ between adapters."""
        content = self.ready.adapters.get(request.model)
        if content is not None:
            return f"{ADAPTER_SALT}{content}:{request.cache_salt}"
        # A client must not write the model's own keys and values where an adapter's are looked up.
        is_taken = request.cache_salt.startswith(ADAPTER_SALT)
        return f":{request.cache_salt}" if is_taken else request.cache_salt

    def _cache_prompt(self, prepared: PreparedPrompt) -> tuple[int, ...]:
        """Return the prompt as the prefix cache finds it; () if it has no images."""
        rules = self.ready.image_rules
        if rules is None or not prepared.images:
            return ()
        return media_reader.name_media(prepared.tokens, prepared.images, rules)

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
        job = resume_job(job, request.resumed, index, digest, vocab_size=self.ready.vocab_size)
        return GenerationChoice(
            job=job,
            parser=parser,
            digest=digest,
            cached=request.resumed.cached_tokens,
            replayed=replay_tokens(parser, job, end_tokens=self.ready.codec.eos_ids),
        )


def _without_earlier_text(prompt: Conversation | TextPrompts) -> Conversation | TextPrompts:
    """Return what a grammar depends on: the last message, if the answer continues it."""
    if isinstance(prompt, TextPrompts):
        return TextPrompts(contents=())
    is_open = prompt.end is ConversationEnd.MESSAGE_OPEN
    return Conversation(messages=prompt.messages[-1:] if is_open else (), end=prompt.end)


def _has_images(request: GenerationRequest) -> bool:
    prompt = request.prompt
    return isinstance(prompt, Conversation) and bool(media_reader.media_parts(prompt.messages))


def lane_of(length: int) -> Lane:
    """Return the lane of a text of so many characters."""
    return next((lane for lane, most in _MAX_CHARACTERS.items() if length <= most), Lane.HUGE)


def work_length(request: GenerationRequest) -> int:
    """Return the approximate work of tokenizing a request, in characters of text."""
    match request.prompt:
        case Conversation(messages=turns):
            return messages.text_length(turns) + output_format.schema_length(request)
        case TextPrompts(contents=contents, infill=infill):
            around = 0
            if infill is not None:
                around = len(infill.suffix) + sum(len(file.text) for file in infill.files)
            return sum(len(content) + around for content in contents)
        case _:
            assert_never(request.prompt)


def decode_tokens(tokens: Iterable[int], codec: TextCodec) -> str:
    """Return the text of tokens."""
    detokenizer = codec.detokenizer()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.last_segment


def prompt_digest(tokens: Sequence[int]) -> str:
    """Return 16 hexadecimal digits that identify a prompt on every machine."""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8).hexdigest()


def resume_job(job: Job, resumed: ResumePoint, index: int, digest: str, *, vocab_size: int) -> Job:
    """Return a job that continues a choice where another engine was lost; `digest` is of the job's prompt.

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
    tokens = tuple(resumed.emitted[index])
    param = "fleet.tokens" if resumed.choices is None else f"fleet.choices[{index}]"
    if len(tokens) > job.max_tokens:
        message = f"'{param}' has {len(tokens)} tokens, more than the {job.max_tokens} allowed."
        raise errors.invalid(message, param=param)
    limits.check_vocabulary(tokens, vocab_size, param)
    sampling = dataclasses.replace(job.sampling, seed=resumed.seed + index)
    return dataclasses.replace(job, sampling=sampling, emitted=tokens)


def replay_tokens(
    parser: OutputParser, job: Job, *, end_tokens: Sequence[int]
) -> tuple[Delta, ...]:
    """Feed the emitted tokens of a job to its parser; return the deltas.

    Afterwards the parser is in the state of the lost one; it is over if these tokens ended the answer.
    """
    deltas: list[Delta] = []
    for count, token in enumerate(job.emitted, start=1):
        finish: FinishReason | None = "length" if count == job.max_tokens else None
        if token in end_tokens:
            finish = "stop"
        delta = parser.take(TokenOutput(job_id=job.id, token=token, finish=finish))
        if not delta.is_empty:
            deltas.append(delta)
        if parser.is_over:
            break
    return tuple(deltas)
