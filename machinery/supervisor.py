"""Supervision of programs, as launchd does it: adopt, restart with backoff, stop."""

import asyncio
import logging
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from machinery import log_rotation, processes
from machinery.backoff import Backoff
from machinery.clock import Clock

log = logging.getLogger(__name__)

# A program that ran this long is not in a crash loop.
_STABLE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One long-running program."""

    name: str
    command: tuple[str, ...]
    log: Path
    record: Path
    cwd: Path | None = None
    grace_s: float = 10.0
    before_start: Callable[[], None] | None = None
    """Called before each start, to clean up after a killed predecessor."""


class Supervisor:
    """Keeps one program running while `run()` runs; `stop()` ends it for good."""

    def __init__(self, program: Program, clock: Clock) -> None:
        self.program = program
        self._clock = clock
        self._child: processes.ChildProcess | None = None
        self._wanted = True
        self.restarts = 0

    def wanted(self) -> bool:
        """Return whether the program should run; false after `stop()`."""
        return self._wanted

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running()

    @property
    def pid(self) -> int | None:
        return self._child.record.pid if self._child is not None else None

    async def start(self) -> None:
        """Adopt the program that an earlier supervisor left running with the same command, or start it.

        Raises:
            OSError: the program cannot be started.

        """
        child = processes.adopt(self.program.record)
        if child is not None and child.record.command != self.program.command:
            log.info(
                "stopping a program that runs with other flags",
                extra={"program": self.program.name},
            )
            await processes.end(child, self._clock, grace_s=self.program.grace_s)
            child = None
        self._child = child or self._spawn()

    def _spawn(self) -> processes.ChildProcess:
        if self.program.before_start is not None:
            self.program.before_start()
        child = processes.spawn(self.program.command, log=self.program.log, cwd=self.program.cwd)
        self._child = child
        try:
            child.record.save(self.program.record)
        except OSError:
            # Without a record no later supervisor could find it.
            child.send(signal.SIGKILL)
            raise
        return child

    async def run(self) -> None:
        """Restart the program whenever it ends, until `stop()`, and keep its log bounded."""
        async with asyncio.TaskGroup() as group:
            rotating = group.create_task(log_rotation.keep_bounded(self._rotate_log, self._clock))
            await self._keep_running()
            rotating.cancel()

    def _rotate_log(self) -> None:
        log_rotation.rotate(self.program.log)

    async def _keep_running(self) -> None:
        failures = 0
        backoff = Backoff(first_s=0.1, limit_s=10.0)
        while self.wanted():
            started_at = self._clock.monotonic()
            while self.running:
                await self._clock.sleep(0.1)
            if not self.wanted():
                return
            lifetime_s = self._clock.monotonic() - started_at
            failures = 1 if lifetime_s > _STABLE_S else failures + 1
            self.restarts += 1
            log.warning(
                "a program ended; restarting it",
                extra={
                    "program": self.program.name,
                    "exit_code": self._child.exit_code() if self._child else None,
                    "lifetime_s": round(lifetime_s, 1),
                    "last_words": processes.last_lines(self.program.log),
                },
            )
            await self._clock.sleep(backoff.delay_s(failures, jitter=random.random()))
            if self.wanted():
                try:
                    self._child = self._spawn()
                except OSError as error:
                    log.warning(
                        "cannot start a program; trying again",
                        extra={"program": self.program.name, "why": str(error)},
                    )

    async def end(self) -> None:
        """End the program; `run()` starts it again."""
        if self._child is not None:
            await processes.end(self._child, self._clock, grace_s=self.program.grace_s)

    async def stop(self) -> None:
        """End the program, and do not start it again."""
        self._wanted = False
        await self.end()
        try:
            self.program.record.unlink(missing_ok=True)
        except OSError as error:
            # A disk that became read-only must not keep the other programs running.
            log.warning(
                "cannot remove the record of a program that ended",
                extra={"path": str(self.program.record), "why": str(error)},
            )
