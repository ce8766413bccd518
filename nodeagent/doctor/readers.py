"""Common parts of the readers of host facts: the scope of a collection, commands and threads with time limits."""

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import psutil

from nodeagent.hardware import system_text
from nodeagent.hardware.metal import MetalVerdict
from store.errors import StoreError

T = TypeVar("T")

log = logging.getLogger(__name__)

CommandRunner: TypeAlias = Callable[[Sequence[str]], Awaitable[str | None]]
"""Runs a command within a time limit, and returns its output; None if it cannot be run, or is late."""
CONNECT_S: Final = 2.0
"""The time that a connection may take."""
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
    root: Path = Path("/")
    home: Path = field(default_factory=Path.home)
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)

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
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(query())
        except _FAILURES as error:
            answer.set_exception(error)
        finally:
            if not answer.done():
                # A mistake of ours ends the thread with its traceback; the fact is unknown then, too.
                answer.set_exception(OSError("the reader failed"))

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return await asyncio.wrap_future(answer)


async def try_connect(host: str, port: int, *, source: str = "") -> OSError | None:
    """Connect to a port, from an address of this machine if one is given; return the error, None if there is none."""
    try:
        async with asyncio.timeout(CONNECT_S):
            local = (source, 0) if source else None
            _, writer = await asyncio.open_connection(host, port, local_addr=local)
    except OSError as error:  # TimeoutError is one
        return error
    writer.close()
    return None
