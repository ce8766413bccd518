"""The engine's life: loading, ready, draining, over. Joins the worker, admission and the prompts.

Everything here runs on the event loop; the worker's words come over by `reports.py`. Knows nothing of HTTP.
"""

import asyncio
import gc
import logging
import random
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from engine import errors
from engine.admission import Admission, AdmittedJob, Ticket
from engine.config import EngineConfig
from engine.errors import GroupError, RefusedError
from engine.gauges import EngineState, Gauges
from engine.jobs import EmbedJob, WorkerEvent
from engine.metrics import EngineMetrics, MetricSources, Throughput
from engine.openai import embeddings
from engine.openai.embeddings import EmbeddingRequest
from engine.openai.input_processor import GenerationChoice, InputProcessor, TokenizerPool
from engine.openai.request_body import GenerationRequest
from engine.ports import ServedModel
from engine.ranks.peer_monitor import PeerMonitor
from engine.reports import LoopListener
from engine.request_log import RequestLog
from engine.worker import Worker
from machinery.clock import Clock
from models import fingerprint
from models.model_files import ModelUnusableError

EXIT_OK, EXIT_CRASH, EXIT_MODEL, EXIT_GROUP = 0, 1, 2, 4
# After this long the thread is stuck in the driver and will not end by itself.
_UNLOAD_TIMEOUT_S = 120

_CODES = {ModelUnusableError: EXIT_MODEL, GroupError: EXIT_GROUP}
_MESSAGES = {
    EngineState.JOINING: "waiting for the other ranks",
    EngineState.LOADING: "loading the model",
}

T = TypeVar("T")

log = logging.getLogger(__name__)


class Service:
    """One model behind one queue. `run` is its life; `request_stop` ends it."""

    def __init__(self, config: EngineConfig, *, clock: Clock, entropy: random.Random) -> None:
        self.config = config
        self.clock = clock
        self.started = clock.now()
        self.state = EngineState.LOADING if config.group is None else EngineState.JOINING
        self.message = _MESSAGES[self.state]
        self.lifelines = None if config.group is None else PeerMonitor(config.group.rank)
        self.gauges = Gauges()
        self.speed = Throughput(self.gauges)
        self._entropy = entropy
        self._worker = Worker(config=config, gauges=self.gauges, clock=clock)
        self.admission = Admission(
            concurrency=config.concurrency,
            queue_limit=config.queue_limit,
            send=self._worker.send,
            clock=clock,
        )
        self.metrics = EngineMetrics(
            MetricSources(
                gauges=self.gauges,
                speed=self.speed,
                state=lambda: self.state,
                in_flight=lambda: self.admission.in_flight,
                queued=lambda: self.admission.queued,
            )
        )
        self.request_log = RequestLog(metrics=self.metrics, clock=clock, entropy=entropy)
        self._prefix = f"{entropy.getrandbits(64):016x}"
        self._count = 0
        self._processor: InputProcessor | None = None
        self._lanes = TokenizerPool()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ended = asyncio.Event()
        self._exit_code = EXIT_OK
        self._failure: tuple[int, str] | None = None

    async def run(self) -> int:
        """Load, serve until asked to stop, drain, unload; return the process's exit code."""
        self._worker.start(LoopListener(asyncio.get_running_loop(), self))
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            await self._stop.wait()
            if self.state is not EngineState.FAILED:
                await self._drain()
            watching.cancel()
        self._lanes.close()
        if self.lifelines is not None:
            await self.lifelines.close(self.message if self._exit_code != EXIT_OK else None)
        return self._exit_code

    def request_stop(self) -> None:
        """Drain and end; asked again, end without waiting for the requests that run."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def loads(self) -> None:
        """Learn that the ranks of the group are connected."""
        if self.state is EngineState.JOINING:
            self.state, self.message = EngineState.LOADING, _MESSAGES[EngineState.LOADING]

    def became_ready(self, ready: ServedModel) -> None:
        """Take requests from now on."""
        if self.state is not EngineState.LOADING:
            return
        config = self.config
        shaping = (config.kv_bits, config.kv_window, config.adapter and config.adapter.name)
        self._processor = InputProcessor(
            ready=ready,
            context_length=config.context_length,
            concurrency=config.concurrency,
            lanes=self._lanes,
            fingerprint=fingerprint.compute(config.model_dir, shaping),
        )
        # What was imported and loaded stays for ever: looking through it again and again costs pauses of 50 ms.
        gc.freeze()
        gc.enable()
        self.state, self.message = EngineState.READY, "serving"
        log.info("engine ready", extra={"replica": self.config.replica})

    def worker_ended(self, error: Exception | None) -> None:
        """Learn that the worker is gone: on purpose, or as the end of this process."""
        self._ended.set()
        if error is None:
            self._stop.set()  # rank 0 let this one go; else it is set already
            return
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), EXIT_CRASH)
        message = errors.summarize(error) if code == EXIT_CRASH else str(error)
        if self.lifelines is None or code == EXIT_MODEL:
            self._fail(code, message)
            return
        # MLX says that somebody is lost; who, the lifelines say a moment later.
        self._failure = (code, message)
        self.lifelines.failed()

    async def _watch(self) -> None:
        """End as soon as another rank has ended: MLX would wait for it for ever, and stopping the wait is beyond us."""
        if self.lifelines is None:
            return
        loss = await self.lifelines.watch()
        if loss is not None:
            self._fail(EXIT_GROUP, loss)
        elif self._failure is not None:
            self._fail(*self._failure)

    def _fail(self, code: int, message: str) -> None:
        self._exit_code, self.message, self.state = code, message, EngineState.FAILED
        self.admission.refuse_all(errors.internal(f"The engine failed: {message}"))
        for event in (self._ended, self._hurry, self._stop):
            event.set()

    @property
    def is_busy(self) -> bool:
        """Whether `Gauges.progress` has to grow; if it does not for long, the worker is stuck."""
        if self.gauges.is_waiting or self.state is EngineState.JOINING:
            return False  # as long as the slowest rank takes
        is_follower = self.config.group is not None and self.config.group.rank > 0
        return self.state is EngineState.LOADING or self.admission.in_flight > 0 or is_follower

    def deliver(self, events: list[WorkerEvent]) -> None:
        """Hand out what a step made."""
        self.speed.look(self.clock.monotonic())
        self.admission.deliver(events)

    async def enter(
        self, request: GenerationRequest
    ) -> tuple[tuple[GenerationChoice, ...], Ticket]:
        """Turn a request into jobs that run or wait.

        Raises:
            RefusedError: not now, or never.

        """
        processor = self.admit()
        first = self._count + 1
        self._count += request.size
        making = processor.choices(
            request, first_id=first, fresh_seed=self._entropy.getrandbits(62)
        )
        with self._worker.expecting():
            made = await self._unless_stopped(making)
            self.admit()  # a drain may have begun while the prompt was being read
            if isinstance(made, RefusedError):
                raise made
            if all(choice.reading.is_over for choice in made):
                # What was emitted before had ended the answer already.
                ticket = Ticket(jobs=(), entered_s=self.clock.monotonic())
                self.request_log.entered(ticket, model=request.model)
                return made, ticket
            return made, self.place([choice.job for choice in made], model=request.model)

    async def enter_embedding(self, request: EmbeddingRequest) -> tuple[EmbedJob, Ticket]:
        """Turn a request for embeddings into a job that runs or waits.

        Raises:
            RefusedError: not now, or never.

        """
        processor = self.admit()
        self._count += 1
        made = await self._unless_stopped(
            embeddings.build_job(request, processor, job_id=self._count)
        )
        self.admit()
        if isinstance(made, RefusedError):
            raise made
        return made, self.place([made], model=request.model)

    async def tokens(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a request's one prompt, for which it needs no slot.

        Raises:
            RefusedError: not now, or never.

        """
        made = await self._unless_stopped(self.admit().tokens(request))
        if isinstance(made, RefusedError):
            raise made
        return made

    def place(self, jobs: Sequence[AdmittedJob], *, model: str) -> Ticket:
        """Give jobs slots or a place in the queue, on account of the HTTP request that is being answered.

        Raises:
            RefusedError: there is neither.

        """
        ticket = self.admission.enter(jobs)
        self.request_log.entered(ticket, model=model)
        return ticket

    def response_id(self, ticket: Ticket, *, kind: str) -> str:
        """Return an id that no other process and no other request has."""
        return f"{kind}-{self._prefix}{ticket.jobs[0].id:08x}"

    def admit(self) -> InputProcessor:
        """Return what makes jobs.

        Raises:
            RefusedError: the engine takes no requests, for now or for ever.

        """
        group = self.config.group
        if group is not None and group.rank > 0:
            message = (
                f"This is rank {group.rank} of {group.world_size}; only rank 0 takes requests."
            )
            raise errors.unavailable(message, "not_rank_0", retry_after_s=5)
        if self.state is EngineState.READY and self._processor is not None:
            return self._processor
        if self.state is EngineState.DRAINING:
            raise errors.draining()
        # Loading takes seconds to minutes; a gateway has other replicas in the meantime.
        code = "failed" if self.state is EngineState.FAILED else "loading"
        message = f"This replica is not ready: {self.message}."
        raise errors.unavailable(message, code, retry_after_s=5)

    async def _unless_stopped(self, making: Coroutine[Any, Any, T]) -> T | RefusedError:
        """Wait for a job, but not beyond the stop: a huge prompt takes seconds to read."""
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_as_value(making))
            waits: list[asyncio.Task[Any]] = [working, group.create_task(self._stop.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        return errors.draining() if working.cancelled() else working.result()

    async def _drain(self) -> None:
        self.state = EngineState.DRAINING
        self.message = "finishing what runs; taking nothing new"
        log.info("draining", extra={"in_flight": self.admission.in_flight})
        # They have not been told anything yet, so another replica can serve them from the start.
        self.admission.refuse_queued(errors.draining())
        await self._until_idle_or_hurried()
        self.admission.refuse_all(errors.draining())
        if self.lifelines is not None:
            self.lifelines.is_parting = True
        self._worker.stop()
        try:
            async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            log.exception("the worker thread does not end; leaving without it")
            self._exit_code = EXIT_CRASH

    async def _until_idle_or_hurried(self) -> None:
        async with asyncio.TaskGroup() as group:
            is_follower = self.config.group is not None and self.config.group.rank > 0
            waits: list[asyncio.Task[Any]] = [
                # Rank 0 knows what still runs, and ends us when nothing does.
                group.create_task(
                    self._ended.wait() if is_follower else self.admission.until_idle()
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
                "not waiting any longer; breaking off what runs",
                extra={"in_flight": self.admission.in_flight},
            )


async def _as_value(making: Coroutine[Any, Any, T]) -> T | RefusedError:
    # A refusal raised in a task group would arrive as a group of one.
    try:
        return await making
    except RefusedError as error:
        return error
