"""Common parts of the readers of host facts: the scope of a collection, commands and threads with time limits."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import psutil

from nodeagent.doctor.host_facts import ServiceFacts
from nodeagent.hardware import system_text
from nodeagent.hardware.metal import MetalVerdict
from store.errors import StoreError

T = TypeVar("T")

log = logging.getLogger(__name__)

CommandRunner: TypeAlias = Callable[[Sequence[str]], Awaitable[str | None]]
"""Runs a command within a time limit, and returns its output; None if it cannot be run, or is late."""
READER_LIMIT_S: Final = 8.0
"""The time that one reader may take; they run at the same time."""
# sntp and `log show` are the slow ones.
_COMMAND_LIMIT_S: Final = 6.0
_FAILURES: Final = (OSError, ValueError, LookupError, TypeError, psutil.Error, StoreError)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKnowledge:
    """Facts that only the node's agent knows."""

    engine_pids: Callable[[], Iterable[int]]
    """Processes of the engines that it tracks now."""
    in_flight: Callable[[], Awaitable[Mapping[str, int | None]]]
    """Sequences that each replica's engine generates."""
    neighbours: Callable[[], Awaitable[Sequence[tuple[str, int]]]]
    """Addresses and ports of other agents."""
    slept_s: Callable[[], float | None] = lambda: None
    """Seconds for which the machine slept since the agent started: a clock that sleeps with it fell behind another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionScope:
    """The parts of the machine that belong to the fleet."""

    models_dir: Path
    engine_folders: Sequence[Path] = ()
    """Agents' folders of engines."""
    engine_ports: range = field(default_factory=lambda: range(0))
    """Empty if engines listen on sockets."""
    api_port: int | None = None
    metal: Callable[[], Awaitable[MetalVerdict | None]] | None = None
    """The verdict on the GPU; None where there is none."""
    agent: AgentKnowledge | None = None
    """None without an agent: `fleetctl doctor --local`."""
    plain_services: Callable[[], Awaitable[Sequence[ServiceFacts]]] | None = None
    """Services without a service manager."""
    root: Path = Path("/")
    home: Path = field(default_factory=Path.home)

    @property
    def ports(self) -> set[int]:
        """Return the ports that the fleet needs on this machine."""
        return {*self.engine_ports, *(() if self.api_port is None else (self.api_port,))}


async def run_command(argv: Sequence[str]) -> str | None:
    """Run a command of the system within a time limit, and return the beginning of its output."""
    return await system_text.command_output(
        argv, timeout_s=_COMMAND_LIMIT_S, log_level=logging.DEBUG
    )


async def read_bounded(
    name: str, read: Callable[[], Awaitable[T]], *, limit_s: float = READER_LIMIT_S
) -> T | None:
    """Return what a reader returns; None if it fails or is late."""
    try:
        async with asyncio.timeout(limit_s):
            return await read()
    except _FAILURES as error:  # TimeoutError is an OSError
        why = str(error) or type(error).__name__
        log.debug("a fact of the machine cannot be read", extra={"fact": name, "why": why})
        return None


async def in_thread(query: Callable[[], T]) -> T:
    """Run a blocking query in a thread that may be left behind: a lost network disk blocks it for minutes."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]  # there is a value without an error

    def work() -> None:
        value: T | None = None
        # A mistake of ours ends the thread with its traceback; the fact is unknown then, too.
        failure: Exception | None = OSError("the reader failed")
        try:
            value, failure = query(), None
        except _FAILURES as error:
            failure = error
        finally:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return await answer
