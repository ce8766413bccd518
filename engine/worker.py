"""The one thread that touches MLX: it imports, loads, generates and frees.

One thread, because on Metal streams belong to a thread. It learns of the world through a queue of
orders and tells it through a listener; it knows nothing of HTTP. Importing this module must not
import mlx: that takes seconds, and the port has to answer first.
"""

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import assert_never

from engine.config import EngineConfig
from engine.errors import GroupError, StoppedError
from engine.gauges import Gauges
from engine.jobs import CancelJob, EmbedJob, Job, StopWorker, WorkerOrder
from engine.linux import blas
from engine.model import import_cache
from engine.ports import JobRunner, WorkerListener
from engine.ranks.rendezvous import WaitContext
from machinery.clock import Clock
from models import model_files
from models.model_files import ModelUnusableError

# How long the first of several requests may wait for those whose prompts are being tokenized: 1,000 words take 2 ms.
_STRAGGLERS_S = 0.02

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Worker:
    """Owns the thread. The inbox is bounded by whoever admits jobs: one job a slot, and its end."""

    config: EngineConfig
    gauges: Gauges
    clock: Clock
    _coming: int = 0
    _inbox: queue.SimpleQueue[WorkerOrder] = field(default_factory=queue.SimpleQueue)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self, listener: WorkerListener) -> None:
        """Begin to load. A daemon: a thread that hangs in the driver must not hold the process."""
        threading.Thread(target=self._run, args=(listener,), name="mlx", daemon=True).start()

    def send(self, order: Job | EmbedJob | CancelJob) -> None:
        """Pass an order on; never waits."""
        self._inbox.put(order)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Announce an order that is being prepared, so that an idle worker waits a moment for it. On the event loop."""
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1

    def stop(self) -> None:
        """Ask the thread to drop everything, free the model and end."""
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
            log.warning("the group is over", extra={"reason": str(error)})
            listener.on_end(error)
        except Exception as error:
            # The edge of the thread: an exception that ended here would leave a process which
            # answers health checks and serves nobody.
            log.exception("the worker thread died")
            listener.on_end(error)
        else:
            listener.on_end(None)

    def _work(self, listener: WorkerListener) -> None:
        facts = model_files.inspect_model(self.config.model_dir)
        model_files.check_context(facts, self.config.context_length)
        self.gauges.total_bytes = facts.weight_bytes
        blas.install(self.config.blas_cache)
        import_cache.install(self.config.blas_cache)
        # Not at the top: it takes seconds, while the port answers, and needs the BLAS in place.
        from engine import model_rank  # noqa: PLC0415 - see above

        patience = WaitContext(
            clock=self.clock, pause=self._stopping.wait, is_stopping=self._stopping.is_set
        )
        fellows = model_rank.connect_group(self.config, self.gauges, patience, listener)
        mine = model_rank.load(self.config, facts, self.gauges, patience, fellows)
        if self.config.group is not None and self.config.group.rank > 0:
            mine.follow(listener)
        else:
            runner = mine.lead()
            listener.on_ready(mine.ready)
            self._serve(runner, listener)
            runner.close()
            del runner
        del mine
        model_rank.free()

    def _serve(self, runner: JobRunner, listener: WorkerListener) -> None:
        while not self._stopping.is_set():
            for order in self._orders(can_wait=runner.is_idle):
                match order:
                    case Job() | EmbedJob():
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
        began = self.clock.monotonic()
        for events in runner.step():
            if events:
                listener.on_events(events)
        self.gauges.slowest_s = max(self.gauges.slowest_s, self.clock.monotonic() - began)

    def _orders(self, *, can_wait: bool) -> Iterator[WorkerOrder]:
        """Yield what has come; with nothing else to do, wait for the first."""
        if can_wait:
            yield self._inbox.get()
            yield from self._stragglers()
        while True:
            try:
                yield self._inbox.get_nowait()
            except queue.Empty:
                return

    def _stragglers(self) -> Iterator[WorkerOrder]:
        """Yield what comes in the next moment, if something does: prompts that are read together cost less."""
        deadline = self.clock.monotonic() + _STRAGGLERS_S
        while self._coming and (left := deadline - self.clock.monotonic()) > 0:
            try:
                yield self._inbox.get(timeout=left)
            except queue.Empty:
                return
