"""Workers: several processes that accept clients' connections on one listening socket, as nginx's workers do.

A gateway is one event loop and uses one core. Each worker is a gateway of its own: it registers itself, grants its
share of the keys' rates, and answers at an address of its own, where the reconciler and Prometheus read its metrics.
The parent serves nothing: it starts the workers, starts one that has died again, and passes signals on.
See docs/adr/0021-gateway-request-path.md.
"""

import asyncio
import contextlib
import logging
import random
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import uvloop

from machinery.backoff import Backoff
from machinery.clock import Clock
from schemas.wire.exit_codes import ExitCode

log = logging.getLogger(__name__)

MOST_WORKERS: Final = 64
_BACKOFF = Backoff(first_s=0.1, limit_s=10.0)
# A worker that ran this long is not in a crash loop.
_STABLE_S = 10.0
# What no further start can mend.
_FINAL_CODES = frozenset({ExitCode.UNUSABLE, ExitCode.ADDRESS_IN_USE})


class WorkerPlace(NamedTuple):
    """The place of a worker among the others, as its parent tells it."""

    number: int
    """Counted from 1. The first does what is done once on a machine, such as announcing the gateway."""
    fd: int
    """The listening socket that all workers share."""

    @property
    def is_first(self) -> bool:
        """True for the first worker."""
        return self.number == 1

    def shared_listener(self) -> socket.socket:
        """Return the socket that all workers share. Raises OSError if it is none."""
        listener = socket.socket(fileno=self.fd)
        listener.set_inheritable(False)
        return listener


def watch_parent(on_end: Callable[[], object]) -> None:
    """Call `on_end` when the parent has ended, however it did. Standard input is a pipe that it holds."""
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        loop.remove_reader(fd)
        log.warning("the parent process has ended; finishing running requests")
        on_end()

    loop.add_reader(fd, read)


class WorkerGroup:
    """The workers of one gateway, as their parent sees them."""

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        clock: Clock,
        *,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """`arguments`, `environment`: those with which the gateway itself was started."""
        self._listener = listener
        self._count = count
        self._clock = clock
        self._arguments = tuple(arguments)
        self._environment = environment
        self._running: dict[int, Process] = {}
        self._stopping = asyncio.Event()
        self.exit_code: int = 0
        """The exit code of a worker that no further start can mend; 0 without one."""

    def stop(self) -> None:
        """End the workers after their running requests; if called again, cut those off."""
        self._stopping.set()
        for process in self._running.values():
            _end(process)

    async def run(self) -> None:
        """Keep the workers running until `stop`, and return when all have ended."""
        loop = asyncio.get_running_loop()
        for signal_ in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_, self.stop)
        async with asyncio.TaskGroup() as group:
            for number in range(1, self._count + 1):
                group.create_task(self._keep(number))

    async def _keep(self, number: int) -> None:
        """Keep one worker running."""
        failures = 0
        while not self._stopping.is_set():
            began_s = self._clock.monotonic()
            code = await self._run_once(number)
            if self._stopping.is_set():
                return
            if code in _FINAL_CODES:
                self.exit_code = code
                self.stop()
                return
            lifetime_s = self._clock.monotonic() - began_s
            failures = 1 if lifetime_s > _STABLE_S else failures + 1
            log.error(
                "a worker ended; starting it again",
                extra={"worker": number, "exit_code": code, "lifetime_s": round(lifetime_s, 1)},
            )
            # Wait, or until `stop`.
            seconds = _BACKOFF.delay_s(failures, jitter=random.random())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()

    async def _run_once(self, number: int) -> int:
        """Start the worker and return its exit code; -1 if it cannot be started."""
        fd = self._listener.fileno()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", *self._arguments),
                *("--worker", str(number), str(fd)),
                stdin=PIPE,
                pass_fds=(fd,),
                env=self._environment,
                # The parent passes signals on; a terminal's would arrive twice and cut requests off.
                start_new_session=True,
            )
        except OSError as error:
            log.warning("cannot start a worker", extra={"worker": number, "why": str(error)})
            return -1
        self._running[number] = process
        if self._stopping.is_set():
            _end(process)
        try:
            return await process.wait()
        finally:
            del self._running[number]


def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and is about to be waited for
        process.send_signal(signal.SIGTERM)


def run_workers(group: WorkerGroup) -> int:
    """Run the workers until a signal ends them; return the exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(group.run())
    return group.exit_code
