"""The input workers, as the serving process uses them: lanes with limits of time and memory, and what replaces the lost.

Everything here runs on the event loop.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import random
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final, cast

from typing_extensions import override

from engine import errors
from engine.errors import Refusal, RefusedError
from engine.input_workers import fork_server, wire
from engine.input_workers.fork_server import WorkerModel
from engine.input_workers.wire import WorkerLimits
from engine.openai.input_tasks import LANES, InputTask, Lane, PreparedPrompt
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.environment import child_environment
from machinery.footprint import footprint_bytes

# A worker may wait for the CPU as long again, and again: on the clock it gets three times its CPU time.
_WALL_FACTOR: Final = 3.0
# Tokenizing 1 MiB takes half a second on a slow core.
_S_PER_MIB: Final = 2.0
# A client that leaves has often got its tokens in this time, and a new worker knows no grammar.
_LEAVE_S: Final = 0.25
# A request waits this long for a fork server that starts.
_START_S: Final = 30.0
_COMMAND_S: Final = 15.0
# A worker that ends so soon after a request has been lost before it.
_FRESH_S: Final = 0.02
_WATCH_S: Final = 0.1
_RESPAWN: Final = Backoff(first_s=0.2, limit_s=30.0)
_FORK: Final = Backoff(first_s=0.05, limit_s=2.0)
# Lost processes, without an answer between them, after which the engine counts as stuck.
_MAX_FAILURES: Final = 5
_TOO_MUCH_TIME: Final = "more than {:.3g} s"
_MEMORY_SIGNALS: Final = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
# Threads do not survive a fork, and transformers says that it has no PyTorch. macOS ends a forked process in which a
# framework is used for the first time; none is used here, so this is for libraries that we do not know.
_VARIABLES: Final = {
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
_PID: Final = struct.Struct("<q")

log = logging.getLogger(__name__)


class _LostError(Exception):
    """A worker or the fork server has ended."""


class _LostBeforeError(RefusedError):
    """A worker had ended before it could have begun the request, which another one may do."""


class _Connection(asyncio.Protocol):
    """The connection to one worker, which answers one request at a time."""

    def __init__(self) -> None:
        self.is_lost = False
        self.is_idle = asyncio.Event()
        """Set while it has no request."""
        self.is_idle.set()
        self.asked = 0
        """Number of requests so far."""
        self._answer: asyncio.Future[bytearray] | None = None
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            size = wire.answer_size(self._received)
        except ValueError:
            self.close()
            return
        if size is None or len(self._received) < size:
            return
        received, self._received = self._received, bytearray()
        self.is_idle.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(received)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.is_idle.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_LostError())

    @property
    def is_left(self) -> bool:
        """True if it still works on a request whose client has left."""
        return not self.is_idle.is_set() and self._answer is not None and self._answer.done()

    async def ask(self, request: bytes) -> bytearray:
        """Send a request; return its answer.

        Raises:
            _LostError: the worker has ended.

        """
        if self.is_lost or self._transport is None:
            raise _LostError
        self.asked += 1
        self.is_idle.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Close the connection; an idle worker ends."""
        if self._transport is not None:
            self._transport.abort()


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    """One worker process."""

    pid: int
    connection: _Connection
    first_bytes: int
    """Its memory at the start."""
    reason: str = ""
    """The limit for which this process has ended it; empty if it has not."""
    exit_code: "asyncio.Future[int]"
    """Its exit code, or the number of a signal, negative."""

    def kill(self) -> None:
        """End it, whatever it does. The fork server has not reaped it, so the pid is its own."""
        if not self.exit_code.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.connection.close()
        self.connection.is_lost = True


class _LaneState:
    """The queue of a lane, and its worker."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.lock = asyncio.Lock()
        """Its waiters are the queue, first come first served."""
        self.worker: _Worker | None = None
        self.is_wanted = asyncio.Event()
        """Set when a worker must be started, or the lost one reaped."""
        self.is_up = asyncio.Event()
        self.watch: asyncio.TimerHandle | None = None

    @property
    def is_served(self) -> bool:
        """True if it has a worker."""
        return self.worker is not None and not self.worker.connection.is_lost

    def lose(self) -> None:
        """Ask for another worker, if this one has ended."""
        if not self.is_served:
            self.is_up.clear()
            self.is_wanted.set()


@dataclass(slots=True, kw_only=True)
class _Server:
    """One fork server process."""

    process: asyncio.subprocess.Process
    control: socket.socket
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def command(self, name: bytes, argument: int, fd: int | None = None) -> int:
        """Send a command, wait for the number that it returns."""
        async with self.lock:
            loop = asyncio.get_running_loop()
            raw = wire.encode_command(name, argument)
            try:
                async with asyncio.timeout(_COMMAND_S):
                    socket.send_fds(self.control, [raw], [] if fd is None else [fd])
                    reply = await loop.sock_recv(self.control, wire.REPLY_BYTES)
            except (OSError, TimeoutError) as error:
                self.kill()  # half of a reply may be on its way
                raise _LostError from error
        if len(reply) < wire.REPLY_BYTES:
            raise _LostError
        (number,) = _PID.unpack(reply)
        return int(number)

    def kill(self) -> None:
        """End it and all of its workers, which are in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class InputWorkers:
    """Runs tasks in worker processes, one lane beside the other. `run` is its whole life."""

    def __init__(self, *, limit_s: float, cache: Path, clock: Clock) -> None:
        """Give each task `limit_s` seconds of CPU time, and more to a long text; `cache` holds the import cache."""
        self._limit_s = limit_s
        self._cache = cache
        self._clock = clock
        self._lanes = {lane: _LaneState(lane) for lane in LANES}
        self._lanes[Lane.SHORT].lose()  # the others start with their first task
        self._make_model: Callable[[], WorkerModel] | None = None
        self._is_loaded = asyncio.Event()
        self._limits = WorkerLimits(memory_bytes=0)
        self._starts = Retries(_RESPAWN, clock)
        self._losses = Retries(_FORK, clock)
        self._working = 0
        self.completed = 0
        """Tasks that ended so far, whether with an answer or at their limit."""

    @property
    def is_busy(self) -> bool:
        """True if `completed` must grow; if it does not for a long time, a lane is stuck or cannot be started."""
        failures = max(self._starts.failures, self._losses.failures)
        return self._working > 0 or failures >= _MAX_FAILURES

    def load(self, make_model: Callable[[], WorkerModel]) -> None:
        """Give the workers the tokenizer; `make_model` takes up to a second, and is called in a thread."""
        self._make_model = make_model
        self._is_loaded.set()

    async def until_ready(self) -> None:
        """Wait until the first worker is there."""
        await self._lanes[Lane.SHORT].is_up.wait()

    async def run(self) -> None:
        """Keep a fork server and its workers running until cancelled."""
        while True:
            process, control = await _spawn(self._cache)
            server = _Server(process=process, control=control)
            try:
                await self._serve(server)
            finally:
                server.kill()
                control.close()
                await process.wait()
                for state in self._lanes.values():
                    if state.worker is not None:
                        _lose_code(state.worker)
                        state.worker = None
                        state.lose()
            log.warning(
                "the fork server of the input workers has ended; starting another",
                extra={"failures": self._starts.failures + 1},
            )
            await self._starts.wait()

    async def _serve(self, server: _Server) -> None:
        """Load a fork server, and keep its workers until it ends."""
        await self._is_loaded.wait()
        assert self._make_model is not None
        model = await asyncio.to_thread(self._make_model)
        self._limits = model.limits
        raw = await asyncio.to_thread(fork_server.send_model, model)
        del model
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(server.control, raw)
            greeting = await loop.sock_recv(server.control, len(wire.READY))
        except OSError:
            return  # it has ended
        del raw
        if greeting != wire.READY:
            return
        async with asyncio.TaskGroup() as group:
            keepers = [
                group.create_task(self._keep(server, state)) for state in self._lanes.values()
            ]
            await server.process.wait()
            for keeper in keepers:
                keeper.cancel()

    async def _keep(self, server: _Server, state: _LaneState) -> None:
        """Reap the lost workers of a lane and start new ones, until the fork server ends."""
        while True:
            await state.is_wanted.wait()
            state.is_wanted.clear()
            if state.is_served:
                continue
            try:
                if state.worker is not None:
                    lost, state.worker = state.worker, None
                    lost.exit_code.set_result(await server.command(b"R", lost.pid))
                jitter = random.random()
                await self._clock.sleep(_FORK.delay_s(self._losses.failures, jitter=jitter))
                state.worker = await _fork(server, state.lane)
            except (_LostError, OSError):
                server.kill()
                return
            state.is_up.set()

    async def prepare(
        self, lane: Lane, task: InputTask, *, size: int
    ) -> tuple[PreparedPrompt, ...]:
        """Run a task in the worker of a lane, after those that came before; `size` is that of its texts.

        A caller that is cancelled leaves the lane, and its task is ended if it runs on.

        Raises:
            RefusedError: the model does not support the input, it takes too much time or memory, or the worker is lost.

        """
        state = self._lanes[lane]
        cpu_s = self._limit_s + _S_PER_MIB * size / (1 << 20)
        request = wire.encode_request(cpu_s, pickle.dumps(task))
        self._working += 1
        try:
            async with state.lock:
                answer = await self._ask(state, request, cpu_s)
        finally:
            self._working -= 1
        if isinstance(answer, Refusal):
            raise RefusedError(answer)
        return answer

    async def _ask(
        self, state: _LaneState, request: bytes, cpu_s: float
    ) -> tuple[PreparedPrompt, ...] | Refusal:
        try:
            return await self._ask_worker(state, await self._worker(state), request, cpu_s)
        except _LostBeforeError:
            return await self._ask_worker(state, await self._worker(state), request, cpu_s)

    async def _ask_worker(
        self, state: _LaneState, worker: _Worker, request: bytes, cpu_s: float
    ) -> tuple[PreparedPrompt, ...] | Refusal:
        asked_s = self._clock.monotonic()
        loop = asyncio.get_running_loop()
        end_s = asked_s + cpu_s * _WALL_FACTOR
        state.watch = loop.call_later(_WATCH_S, self._watch, state, worker, end_s)
        try:
            received = await worker.connection.ask(request)
        except _LostError:
            took_s = self._clock.monotonic() - asked_s
            refusal = await self._loss(state, worker, cpu_s)
            if took_s < _FRESH_S and refusal.refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise _LostBeforeError(refusal.refusal) from None
            raise refusal from None
        except asyncio.CancelledError:
            loop.call_later(_LEAVE_S, _kill_left, worker, worker.connection.asked)
            raise
        finally:
            state.watch.cancel()
        self.completed += 1
        self._losses.reset()
        self._starts.reset()
        return wire.decode_answer(received)

    def _watch(self, state: _LaneState, worker: _Worker, end_s: float) -> None:
        """End a worker that takes too much memory, or does not get ahead; called while it works."""
        limit_bytes = self._limits.memory_of(state.lane)
        if (footprint_bytes(worker.pid) or 0) - worker.first_bytes > limit_bytes:
            worker.reason = _too_much_memory(limit_bytes)
        elif self._clock.monotonic() > end_s:
            worker.reason = _TOO_MUCH_TIME.format(self._limit_s)
        if worker.reason:
            worker.kill()
            return
        loop = asyncio.get_running_loop()
        state.watch = loop.call_later(_WATCH_S, self._watch, state, worker, end_s)

    async def _worker(self, state: _LaneState) -> _Worker:
        """Return the idle worker of a lane, a new one if there is none.

        Raises:
            RefusedError: none can be started.

        """
        worker = state.worker
        if worker is not None and worker.connection.is_left:
            # A worker that is ended soon, unless it is idle again before.
            await worker.connection.is_idle.wait()
        try:
            async with asyncio.timeout(_START_S):
                while state.worker is None or state.worker.connection.is_lost:
                    state.lose()
                    await state.is_up.wait()
        except TimeoutError:
            raise errors.input_worker_lost("another one could not be started") from None
        return state.worker

    async def _loss(self, state: _LaneState, worker: _Worker, cpu_s: float) -> RefusedError:
        """Return the refusal of a request whose worker has ended."""
        worker.kill()
        state.lose()
        try:
            async with asyncio.timeout(_COMMAND_S):
                code = await asyncio.shield(worker.exit_code)
        except TimeoutError:
            code = -signal.SIGKILL
        log.warning(
            "an input worker has ended",
            extra={"lane": state.lane, "exit_code": code, "why": worker.reason},
        )
        self.completed += 1
        if worker.reason:
            return errors.input_too_costly(worker.reason)
        if code == -signal.SIGPROF:
            return errors.input_too_costly(_TOO_MUCH_TIME.format(cpu_s))
        if -code in _MEMORY_SIGNALS:
            return errors.input_too_costly(_too_much_memory(self._limits.memory_of(state.lane)))
        self._losses.next_delay_s()
        return errors.input_worker_lost(f"signal {-code}" if code < 0 else f"exit code {code}")


def _too_much_memory(limit_bytes: int) -> str:
    return f"more than {limit_bytes >> 20} MiB of memory"


def _lose_code(worker: _Worker) -> None:
    """Note the end of a worker whose fork server has ended: its code cannot be known, and its pid is not its own."""
    if not worker.exit_code.done():
        worker.exit_code.set_result(-signal.SIGKILL)
    worker.kill()


async def _fork(server: _Server, lane: Lane) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            pid = await server.command(b"F", LANES.index(lane), theirs.fileno())
        except BaseException:
            ours.close()
            raise
    ours.settimeout(0)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(_Connection, sock=ours)
    return _Worker(
        pid=pid,
        connection=connection,
        first_bytes=footprint_bytes(pid) or 0,
        exit_code=loop.create_future(),
    )


def _kill_left(worker: _Worker, asked: int) -> None:
    """End a worker that still works on a task whose client has left."""
    if worker.connection.asked == asked and worker.connection.is_left:
        worker.kill()


async def _spawn(cache: Path) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a fork server; return its process and the connection to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "engine.input_workers", str(cache)),
            stdin=theirs.fileno(),
            env=child_environment(_VARIABLES, without=()),
            start_new_session=True,
        )
    ours.settimeout(0)
    return process, ours
