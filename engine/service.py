"""The engine service: one model's life from loading to the end, with its worker, admission and prompts.

Everything here runs on the event loop; `LoopListener` passes the worker's reports on to it. Knows nothing of HTTP.
"""

import asyncio
import dataclasses
import gc
import logging
import random
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from engine import errors
from engine.admission import Admission, AdmittedJob, ByteBudget, ClaimedBytes, Ticket
from engine.cache.interface import BLOCK_TOKENS
from engine.cache.miss_explanation import PromptLineages, read_parts
from engine.errors import GroupError, RefusedError
from engine.gauges import Gauges
from engine.input_workers.fork_server import WorkerModel
from engine.input_workers.pool import InputWorkers
from engine.input_workers.wire import WorkerLimits
from engine.jobs import EmbedJob, Job, JobFailure, PcmFile, SamplingParams, SpeechJob, WorkerEvent
from engine.lifecycle import EngineEvent, EngineState, initial_state, next_state
from engine.memory import budget
from engine.metrics import EngineMetrics, MetricSources, Throughput
from engine.openai import embeddings, output_format
from engine.openai.embeddings import EmbeddingRequest
from engine.openai.input_processor import GenerationChoice, InputProcessor
from engine.openai.pinned_prefix import encode_prefix
from engine.openai.request_body import Conversation, GenerationRequest
from engine.ports import ServedModel, ServedSpeech
from engine.ranks.peer_monitor import PeerMonitor
from engine.recent_prompts import PromptHistory
from engine.request_log import RequestLog, SpanRecorder
from engine.speech.decoder import AudioDecoder
from engine.worker import LoopListener, Worker
from machinery.clock import Clock
from models import fingerprint, footprint
from models.model_files import ModelUnusableError
from schemas.wire.audio_limits import SpeechTask
from schemas.wire.body_limits import image_bytes
from schemas.wire.engine_config import EngineConfig, PrefixFile
from schemas.wire.exit_codes import ExitCode

# A thread that takes longer is stuck in the driver and will not end by itself.
_UNLOAD_TIMEOUT_S = 120
# The largest bodies that are in memory at once.
_BODIES = 4

_CODES = {ModelUnusableError: ExitCode.UNUSABLE, GroupError: ExitCode.GROUP_LOST}
_MESSAGES = {
    EngineState.JOINING: "waiting for the other ranks",
    EngineState.LOADING: "loading the model",
    EngineState.READY: "serving",
    EngineState.DRAINING: "finishing running requests; refusing new ones",
}

T = TypeVar("T")

log = logging.getLogger(__name__)


class Service:
    """One model behind one queue. `run` is its whole life, `request_stop` ends it. Implements `WorkerListener`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock,
        entropy: random.Random,
        spans: SpanRecorder | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.started = clock.now()
        self.ready_after_s = 0.0
        """Seconds from the start to the first request that it could take; 0 before."""
        self._began_s = clock.monotonic()
        self.state = initial_state(has_group=config.group is not None)
        self.message = _MESSAGES[self.state]
        self.peers = None if config.group is None else PeerMonitor(config.group.rank)
        self.gauges = Gauges()
        self.speed = Throughput(self.gauges)
        self.prompts = PromptHistory()
        self.lineages = PromptLineages()
        self._entropy = entropy
        self._worker = Worker(config=config, gauges=self.gauges, clock=clock)
        images = 0 if config.vision is None else image_bytes(config.vision)
        self._bodies = ByteBudget(_BODIES * config.max_body_bytes + images)
        self.metrics = EngineMetrics(
            MetricSources(
                gauges=self.gauges,
                speed=self.speed,
                state=lambda: self.state,
                in_flight=lambda: self.admission.in_flight,
                queued=lambda: self.admission.queued,
            )
        )
        self.admission = Admission(
            concurrency=config.concurrency,
            queue_limit=config.queue_limit,
            send=self._worker.send,
            clock=clock,
            gaps=self.metrics.times.between_tokens.child(),
        )
        self.catching_up = asyncio.Lock()
        """Held in turns by streams that are behind."""
        self.request_log = RequestLog(
            metrics=self.metrics, clock=clock, entropy=entropy, spans=spans
        )
        self._prefix = f"{entropy.getrandbits(64):016x}"
        self._count = 0
        self._processor: InputProcessor | None = None
        self._speech: ServedSpeech | None = None
        self._decoder = AudioDecoder()
        self._inputs = InputWorkers(
            limit_s=config.input_limit_s, cache=config.blas_cache, clock=clock
        )
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ended = asyncio.Event()
        self.prefix_errors: dict[str, str] = {}
        """The reason why each prefix is not pinned, by its name; "" for those that are."""
        self._pinning: tuple[int, asyncio.Future[str]] | None = None
        self._exit_code = ExitCode.OK
        self._failure: tuple[ExitCode, str] | None = None

    async def run(self) -> int:
        """Load, serve until asked to stop, drain, unload; return the process's exit code."""
        self._worker.start(LoopListener(asyncio.get_running_loop(), self))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._watch_peers())]
            if not self._is_follower:
                tasks.append(group.create_task(self._inputs.run()))
                tasks.append(group.create_task(self._open()))
            await self._stop.wait()
            if self._apply(EngineEvent.STOP_REQUESTED):
                await self._drain()
            for task in tasks:
                task.cancel()
        if self._processor is not None:
            self._processor.close()
        if self.peers is not None:
            await self.peers.close(self.message if self._exit_code != ExitCode.OK else None)
        return self._exit_code

    def request_stop(self) -> None:
        """Drain and end; a second call ends without waiting for running requests."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def on_met(self, lifelines: Mapping[int, socket.socket]) -> None:
        """Watch the other ranks of the group."""
        if self.peers is not None:
            self.peers.set_lifelines(lifelines)

    def on_loading(self) -> None:
        """Note that the ranks of the group are connected."""
        self._apply(EngineEvent.CONNECTED)

    def on_ready(self, model: ServedModel | ServedSpeech) -> None:
        """Give the model to the input workers; requests are taken when they are ready. Speech needs none."""
        if next_state(self.state, EngineEvent.LOADED) is None:
            return
        if isinstance(model, ServedSpeech):
            self._speech = model
            gc.freeze()
            gc.enable()
            self._apply(EngineEvent.LOADED)
            log.info("engine ready", extra={"replica": self.config.replica, "task": model.task})
            return
        config = self.config
        settings = (
            config.kv_cache.bits,
            config.window_setting,
            config.adapter and config.adapter.name,
        )
        self._processor = InputProcessor(
            ready=model,
            context_length=config.context_length,
            concurrency=config.concurrency,
            inputs=self._inputs,
            fingerprint=fingerprint.compute(config.model_dir, settings),
        )
        memory_bytes = budget.input_bytes(config.context_length)
        if config.vision is not None:
            memory_bytes += footprint.IMAGE_DECODING_BYTES
        self._inputs.load(
            lambda: WorkerModel(
                tokenizer=model.codec.portable(),
                is_constrainable=model.grammars is not None,
                limits=WorkerLimits(memory_bytes=memory_bytes),
            )
        )
        # Imported and loaded objects stay forever: each garbage collection of them would pause for 50 ms.
        gc.freeze()
        gc.enable()
        if self._is_follower:
            self._apply(EngineEvent.LOADED)

    async def _open(self) -> None:
        """Take requests as soon as their input can be prepared, which follows the loading of the model."""
        await self._inputs.until_ready()
        if self._apply(EngineEvent.LOADED):
            log.info("engine ready", extra={"replica": self.config.replica})
            await self._pin_prefixes()

    async def _pin_prefixes(self) -> None:
        """Read the prefixes that are never evicted, beside requests, which share the steps of the batch with them."""
        for prefix in self.config.prefixes:
            try:
                error = await self._pin(prefix)
            except RefusedError as refused:
                error = refused.refusal.message
            self.prefix_errors[prefix.name] = error
            if error:
                log.warning("prefix not pinned", extra={"prefix": prefix.name, "why": error})
        if self.config.prefixes:
            log.info("prefixes pinned", extra={"tokens": self.gauges.prefix_pinned_tokens})

    async def _pin(self, prefix: PrefixFile) -> str:
        """Let the worker read and pin a prefix; return why it did not. Raises RefusedError."""
        processor = self.admit()
        if processor.ready.budget is not None and (shortage := processor.ready.budget.unpinnable):
            return shortage
        tokens = await encode_prefix(prefix, processor)
        # States of recurrent layers are kept at the end of a read only, so it ends where a block does.
        whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        if whole == len(tokens):
            whole -= BLOCK_TOKENS
        if whole <= 0:
            return f"it has {len(tokens)} tokens, and less than {BLOCK_TOKENS + 1} are read faster than they are found"
        self._count += 1
        job = Job(
            id=self._count,
            prompt=tokens[: whole + 1],
            max_tokens=1,
            sampling=SamplingParams(temperature=0),
            is_pinned=True,
        )
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pinning = job.id, result
        self._worker.send(job)
        return await result

    @property
    def pinned_prefixes(self) -> tuple[str, str]:
        """Return reason and message of the condition PrefixesPinned."""
        errors = [f"{name}: {error}" for name, error in self.prefix_errors.items() if error]
        pinned, count = len(self.prefix_errors) - len(errors), len(self.config.prefixes)
        head = f"{pinned} of {count} pinned, {self.gauges.prefix_pinned_tokens} tokens"
        reason = "NotPinned" if errors else "Pinned"
        is_over = len(self.prefix_errors) == count
        return (reason if is_over else "ReadingPrefixes"), "; ".join([head, *errors])

    def on_events(self, events: list[WorkerEvent]) -> None:
        """Deliver the events of a step."""
        self.speed.sample(self.clock.monotonic())
        self.admission.deliver(events)
        if self._pinning is not None:
            job_id, result = self._pinning
            event = next((event for event in events if event.job_id == job_id), None)
            if event is not None and not result.done():
                result.set_result(event.reason if isinstance(event, JobFailure) else "")

    def on_end(self, error: Exception | None) -> None:
        """Stop the process: the worker has ended, because it was asked to or with an error."""
        self._ended.set()
        if error is None:
            self._stop.set()  # rank 0 released this rank; otherwise it is set already
            return
        matching = (code for kind, code in _CODES.items() if isinstance(error, kind))
        code = next(matching, ExitCode.CRASHED)
        message = errors.summarize(error) if code == ExitCode.CRASHED else str(error)
        if self.peers is None or code == ExitCode.UNUSABLE:
            self._fail(code, message)
            return
        # MLX reports that some rank is lost; the lifelines say a moment later which one.
        self._failure = (code, message)
        self.peers.note_failure()

    async def _watch_peers(self) -> None:
        """End as soon as another rank has ended: MLX would wait for it forever, and the wait cannot be stopped."""
        if self.peers is None:
            return
        loss = await self.peers.watch()
        if loss is not None:
            self._fail(ExitCode.GROUP_LOST, loss)
        elif self._failure is not None:
            self._fail(*self._failure)

    def _fail(self, code: ExitCode, message: str) -> None:
        self._apply(EngineEvent.FAILED)
        self._exit_code, self.message = code, message
        self.admission.refuse_all(errors.internal(f"The engine failed: {message}"))
        for event in (self._ended, self._hurry, self._stop):
            event.set()

    def _apply(self, event: EngineEvent) -> bool:
        """Change the state by the table of transitions; return False if the event has no effect in this state."""
        state = next_state(self.state, event)
        if state is None:
            return False
        self.state, self.message = state, _MESSAGES.get(state, self.message)
        if state is EngineState.READY:
            self.ready_after_s = self.clock.monotonic() - self._began_s
        return True

    @property
    def is_busy(self) -> bool:
        """True if `progress` must grow; if it does not for a long time, the worker or a lane of input is stuck."""
        if self.gauges.is_waiting or self.state is EngineState.JOINING:
            return False  # the wait is as long as the slowest rank takes
        # The slot of a client that went away is free at once; only a worker that advances takes note of it.
        has_work = self.admission.in_flight > 0 or self._worker.is_behind or self._inputs.is_busy
        return self.state is EngineState.LOADING or has_work or self._is_follower

    @property
    def progress(self) -> int:
        """A number without a unit that grows with the worker's progress and with each prepared input."""
        return self.gauges.progress + self._inputs.completed

    @property
    def _is_follower(self) -> bool:
        return self.config.group is not None and self.config.group.rank > 0

    async def enter(
        self, request: GenerationRequest
    ) -> tuple[tuple[GenerationChoice, ...], Ticket]:
        """Turn a request into jobs that run or wait.

        Raises:
            RefusedError: the engine cannot take the request now, or never can.

        """
        processor = self.admit()
        first = self._count + 1
        self._count += request.size
        work = processor.choices(request, first_id=first, fresh_seed=self._entropy.getrandbits(62))
        with self._worker.expecting():
            choices = await self._unless_stopped(work)
            self.admit()  # a drain may have begun while the prompt was tokenized
            unenforced = output_format.unenforced_format(request, processor.ready.codec.traits)
            if unenforced is not None:
                self.metrics.unenforced_calls.add(unenforced)
            if all(choice.parser.is_over for choice in choices):
                # The emitted tokens had ended the answer already.
                ticket = Ticket(jobs=(), entered_s=self.clock.monotonic())
                self.request_log.attach_ticket(ticket, model=request.model)
                return choices, ticket
            jobs = [choice.job for choice in choices if not choice.parser.is_over]
            ticket = self.place(jobs, model=request.model)
            self.prompts.add(jobs)
            return choices, ticket

    def explain_miss(self, request: GenerationRequest, job: Job, *, cached_tokens: int) -> str:
        """Return why tokens of a chat's prompt were read again; empty if they were not, or for other prompts."""
        prompt = request.prompt
        if not isinstance(prompt, Conversation) or request.resumed is not None:
            return ""
        variables: dict[str, object] = {
            **request.template_variables,
            "tool_choice": request.toolbox is not None and bool(request.toolbox.callable_tools),
            "response_format": request.format and request.format.instruction,
            "add_generation_prompt": prompt.end.name,
            "reasoning_effort": request.effort,
        }
        parts = read_parts(
            prompt.messages,
            () if request.toolbox is None else request.toolbox.template_tools,
            variables,
            job.cache_prompt or job.prompt,
            adapter=job.adapter,
            salt=job.cache_salt,
        )
        evictions = self.gauges.prefix_evictions
        return self.lineages.explain(parts, cached_tokens=cached_tokens, evictions=evictions)

    async def enter_embedding(self, request: EmbeddingRequest) -> tuple[EmbedJob, Ticket]:
        """Turn a request for embeddings into a job that runs or waits.

        Raises:
            RefusedError: the engine cannot take the request now, or never can.

        """
        processor = self.admit()
        self._count += 1
        job = await self._unless_stopped(
            embeddings.build_job(request, processor, job_id=self._count)
        )
        self.admit()
        return job, self.place([job], model=request.model)

    async def decode_audio(self, upload: memoryview) -> PcmFile:
        """Return the samples of an upload; this needs no slot.

        Raises:
            RefusedError: it is no audio, too long or too costly, or the engine stops.

        """
        return await self._unless_stopped(self._decoder.decode(upload))

    def enter_speech(self, make_job: Callable[[int], SpeechJob], *, model: str) -> Ticket:
        """Give a job of speech, made from its id, a slot or a place in the queue.

        Raises:
            RefusedError: the engine takes no requests, or all places are taken.

        """
        self.check_ready()
        self._count += 1
        return self.place([make_job(self._count)], model=model)

    async def tokens(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a request's single prompt; this needs no slot.

        Raises:
            RefusedError: the engine cannot take the request now, or never can.

        """
        return await self._unless_stopped(self.admit().tokens(request))

    async def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; this needs no slot.

        Raises:
            RefusedError: the engine cannot take the request now, or never can.

        """
        return await self._unless_stopped(self.admit().text(tokens))

    def claim_body(self) -> ClaimedBytes:
        """Return the claim of the current HTTP request on the memory of bodies."""
        claimed = ClaimedBytes(budget=self._bodies)
        self.request_log.attach_body(claimed)
        return claimed

    def arrive(self) -> None:
        """Give the current HTTP request a place in the queue, before its body is parsed.

        Raises:
            RefusedError: the engine takes no requests, or all slots and the queue are full.

        """
        self.check_ready()
        self.request_log.attach_arrival(self.admission.arrive())

    def place(self, jobs: Sequence[AdmittedJob], *, model: str) -> Ticket:
        """Give the jobs of the current HTTP request slots or a place in the queue.

        Raises:
            RefusedError: all slots and the queue are full, or the request was cancelled meanwhile.

        """
        named = [
            dataclasses.replace(job, request_id=self.request_log.current_id)
            if isinstance(job, Job)
            else job
            for job in jobs
        ]
        ticket = self.admission.enter(named, self.request_log.current_arrival())
        cancellation = self.request_log.attach_ticket(ticket, model=model)
        if cancellation is not None:
            self.admission.refuse(ticket, cancellation)
            raise cancellation
        return ticket

    def response_id(self, ticket: Ticket, *, kind: str) -> str:
        """Return an ID that is unique among all processes and requests."""
        return self.job_response_id(ticket.jobs[0], kind=kind)

    def job_response_id(self, job: AdmittedJob, *, kind: str) -> str:
        """Return the same for the first job of a request."""
        return f"{kind}-{self._prefix}{job.id:08x}"

    def admit(self) -> InputProcessor:
        """Return the processor that makes jobs of requests.

        Raises:
            RefusedError: the engine takes no requests, now or ever.

        """
        self.check_ready()
        if self._processor is None:
            assert self._speech is not None
            raise errors.not_a_text_model(self._speech.task)
        return self._processor

    def speech(self, task: SpeechTask) -> ServedSpeech:
        """Return what the engine says and understands.

        Raises:
            RefusedError: the engine takes no requests, now or ever, or has another task.

        """
        self.check_ready()
        if self._speech is None or self._speech.task != task:
            raise errors.not_a_speech_model(
                task, None if self._speech is None else self._speech.task
            )
        return self._speech

    def check_ready(self) -> None:
        """Check that the engine takes requests.

        Raises:
            RefusedError: it takes none, now or ever.

        """
        group = self.config.group
        if group is not None and group.rank > 0:
            message = (
                f"This is rank {group.rank} of {group.world_size}; only rank 0 takes requests."
            )
            raise errors.unavailable(message, "not_rank_0", retry_after_s=5)
        if self.state is EngineState.READY:
            return
        if self.state is EngineState.DRAINING:
            raise errors.draining()
        # Loading takes seconds to minutes; meanwhile a gateway can use other replicas.
        code = "failed" if self.state is EngineState.FAILED else "loading"
        message = f"This replica is not ready: {self.message}."
        raise errors.unavailable(message, code, retry_after_s=5)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a result, but not beyond the stop: a huge prompt takes seconds to tokenize.

        Raises:
            RefusedError: `work` raised it, or the engine stops.

        """
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_as_value(work))
            waits: list[asyncio.Task[Any]] = [working, group.create_task(self._stop.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        result = errors.draining() if working.cancelled() else working.result()
        if isinstance(result, RefusedError):
            raise result
        return result

    async def _drain(self) -> None:
        log.info("draining", extra={"in_flight": self.admission.in_flight})
        # Waiting requests have received nothing yet, so another replica can serve them from the start.
        self.admission.refuse_queued(errors.draining())
        async with asyncio.TaskGroup() as group:
            waits: list[asyncio.Task[Any]] = [
                # Rank 0 knows the running requests, and stops this rank after the last one.
                group.create_task(
                    self._ended.wait() if self._is_follower else self.admission.until_idle()
                ),
                group.create_task(self._hurry.wait()),
            ]
            await asyncio.wait(
                waits,
                timeout=self.config.drain_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for wait in waits:
                wait.cancel()
        if self.admission.in_flight:
            log.warning(
                "drain timeout or second stop; cancelling running requests",
                extra={"in_flight": self.admission.in_flight},
            )
        self.admission.refuse_all(errors.draining())
        if self.peers is not None:
            self.peers.is_parting = True
        self._worker.stop()
        try:
            async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            log.exception("the worker thread does not end; ending the process without it")
            self._exit_code = ExitCode.CRASHED


async def _as_value(work: Coroutine[Any, Any, T]) -> T | RefusedError:
    # A refusal raised in a task group would arrive as an exception group.
    try:
        return await work
    except RefusedError as error:
        return error
