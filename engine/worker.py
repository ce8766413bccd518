"""The worker thread: the only one that uses MLX. It imports, loads, generates and frees.

There is one thread because on Metal streams belong to a thread. It takes orders from a queue, reports to a listener and
knows nothing of HTTP. Importing this module must not import mlx: that takes seconds, and the port must answer first.
"""

import asyncio
import importlib.util
import logging
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import assert_never

from engine.errors import GroupError, StoppedError
from engine.gauges import Gauges
from engine.jobs import (
    CancelJob,
    EmbedJob,
    Job,
    SpeakJob,
    SpeechJob,
    StopWorker,
    TranscribeJob,
    WorkerEvent,
    WorkerOrder,
)
from engine.linux import blas
from engine.model import import_cache
from engine.ports import JobRunner, ServedModel, ServedSpeech, WorkerListener
from engine.ranks.rendezvous import WaitContext
from machinery.clock import Clock
from models import model_files, partial_model
from models.model_files import ModelFacts, ModelUnusableError
from schemas.wire.engine_config import EngineConfig

# The time that an idle worker waits for requests whose prompts are being tokenized: 1,000 words take 2 ms.
_STRAGGLERS_S = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopListener:
    """Implements `WorkerListener`: passes each report from the worker thread on to the event loop."""

    loop: asyncio.AbstractEventLoop
    listener: WorkerListener

    def on_met(self, lifelines: Mapping[int, socket.socket]) -> None:
        """Pass the lifelines on."""
        self.loop.call_soon_threadsafe(self.listener.on_met, lifelines)

    def on_loading(self) -> None:
        """Pass on that the ranks are connected."""
        self.loop.call_soon_threadsafe(self.listener.on_loading)

    def on_ready(self, model: ServedModel | ServedSpeech) -> None:
        """Pass on that jobs may be sent."""
        self.loop.call_soon_threadsafe(self.listener.on_ready, model)

    def on_events(self, events: list[WorkerEvent]) -> None:
        """Pass on the events of a step."""
        self.loop.call_soon_threadsafe(self.listener.on_events, events)

    def on_end(self, error: Exception | None) -> None:
        """Pass on that the thread has ended."""
        self.loop.call_soon_threadsafe(self.listener.on_end, error)


@dataclass(slots=True, kw_only=True)
class Worker:
    """Owns the thread. Admission bounds the inbox: one job a slot, and its cancellation."""

    config: EngineConfig
    gauges: Gauges
    clock: Clock
    _announced: int = 0
    _inbox: queue.SimpleQueue[WorkerOrder] = field(default_factory=queue.SimpleQueue)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self, listener: WorkerListener) -> None:
        """Start to load. The thread is a daemon: if it hangs in the driver, the process can still end."""
        threading.Thread(target=self._run, args=(listener,), name="mlx", daemon=True).start()

    def send(self, order: Job | EmbedJob | SpeechJob | CancelJob) -> None:
        """Send an order; never waits."""
        self._inbox.put(order)

    @property
    def is_behind(self) -> bool:
        """True if orders wait: an idle worker takes them at once, and a busy one before its next step."""
        return not self._inbox.empty()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Announce an order in preparation, so that an idle worker waits a moment for it. Event loop only."""
        self._announced += 1
        try:
            yield
        finally:
            self._announced -= 1

    def stop(self) -> None:
        """Ask the thread to drop all jobs, free the model and end."""
        self._stopping.set()
        self._inbox.put(StopWorker())

    def _run(self, listener: WorkerListener) -> None:
        try:
            self._work(listener)
        except StoppedError:
            listener.on_end(None)
        except ModelUnusableError as error:
            listener.on_end(error)
        except GroupError as error:
            log.warning("the group has ended", extra={"why": str(error)})
            listener.on_end(error)
        except Exception as error:
            # The edge of the thread: without this, the process would answer health checks and serve no requests.
            log.exception("the worker thread failed")
            listener.on_end(error)
        else:
            listener.on_end(None)

    def _inspect(self) -> ModelFacts:
        group = self.config.group
        if group is None or group.parallelism != "Pipeline":
            return model_files.inspect_model(self.config.model_dir)
        return partial_model.inspect_rank_model(self.config.model_dir, group.layers, group.rank)

    def _work(self, listener: WorkerListener) -> None:
        facts = self._inspect()
        model_files.check_context(facts, self.config.context_length)
        self.gauges.total_bytes = facts.weight_bytes
        blas.install(self.config.blas_cache)
        import_cache.install(self.config.blas_cache)
        # Not at the top: the imports take seconds, while the port answers, and need the BLAS in place.
        from engine import model_rank  # noqa: PLC0415 - see above

        if facts.speech is not None or facts.encoder is not None:
            load = self._load_encoder if facts.speech is None else self._load_speech
            runner, served = load(facts)
            listener.on_ready(served)
            self._serve(runner, listener)
            runner.close()
            del runner
            model_rank.free(self.config.wired)
            return

        wait = WaitContext(
            clock=self.clock, pause=self._stopping.wait, is_stopping=self._stopping.is_set
        )
        peers = model_rank.connect_group(self.config, self.gauges, wait, listener)
        rank = model_rank.load(self.config, facts, self.gauges, wait, peers)
        if self.config.group is not None and self.config.group.rank > 0:
            rank.follow(listener)
        else:
            runner = rank.lead()
            listener.on_ready(rank.served_model)
            self._serve(runner, listener)
            runner.close()
            del runner
        del rank
        model_rank.free(self.config.wired)

    def _load_speech(self, facts: ModelFacts) -> tuple[JobRunner, ServedSpeech]:
        if importlib.util.find_spec("mlx_audio") is None:
            raise ModelUnusableError(
                f"{self.config.model_dir}: speech needs mlx-audio: pip install 'mlx-fleet[audio]'"
            )
        from engine.speech import loader  # noqa: PLC0415 - as above

        return loader.load(self.config, facts, self.gauges)

    def _load_encoder(self, facts: ModelFacts) -> tuple[JobRunner, ServedModel]:
        from engine.encoder import loader  # noqa: PLC0415 - as above

        return loader.load(
            self.config,
            facts,
            self.gauges,
            clock=self.clock,
            is_stopping=self._stopping.is_set,
        )

    def _serve(self, runner: JobRunner, listener: WorkerListener) -> None:
        while not self._stopping.is_set():
            for order in self._next_orders(can_wait=runner.is_idle):
                match order:
                    case Job() | EmbedJob() | TranscribeJob() | SpeakJob():
                        runner.add(order)
                    case CancelJob(job_id=job_id):
                        runner.remove(job_id)
                    case StopWorker():
                        return
                    case _:
                        assert_never(order)
            if not runner.is_idle:
                self._step(runner, listener)

    def _step(self, runner: JobRunner, listener: WorkerListener) -> None:
        start_s = self.clock.monotonic()
        for events in runner.step():
            if events:
                listener.on_events(events)
        self.gauges.slowest_s = max(self.gauges.slowest_s, self.clock.monotonic() - start_s)

    def _next_orders(self, *, can_wait: bool) -> Iterator[WorkerOrder]:
        """Yield the orders that have arrived; if `can_wait`, wait for the first one."""
        if can_wait:
            yield self._inbox.get()
            yield from self._stragglers()
        while True:
            try:
                yield self._inbox.get_nowait()
            except queue.Empty:
                return

    def _stragglers(self) -> Iterator[WorkerOrder]:
        """Yield announced orders that arrive in the next moment: prompts that are read together cost less."""
        deadline = self.clock.monotonic() + _STRAGGLERS_S
        while self._announced and (left_s := deadline - self.clock.monotonic()) > 0:
            try:
                yield self._inbox.get(timeout=left_s)
            except queue.Empty:
                return
