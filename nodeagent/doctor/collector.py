"""Collects the facts of this machine: all readers at once, each with a time limit. One that fails leaves its fact unknown."""

import asyncio
import ctypes
import errno
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from machinery.clock import Clock
from nodeagent.doctor import macos_facts, process_facts
from nodeagent.doctor.host_facts import (
    ClockFacts,
    EngineFacts,
    HostFacts,
    Reach,
    ServiceFacts,
)
from nodeagent.doctor.readers import (
    CollectionScope,
    CommandRunner,
    in_thread,
    read_bounded,
    run_command,
)
from nodeagent.hardware import probe

# sys/timex.h of Linux: the state of adjtimex(2), and a size that is certainly enough for its struct.
_TIME_ERROR: Final = 5
_TIMEX_BYTES: Final = 512


async def collect_facts(
    scope: CollectionScope,
    clock: Clock,
    *,
    run: CommandRunner = run_command,
    platform: str = sys.platform,
) -> HostFacts:
    """Return the facts of this machine; `run` and `platform` are others in tests only."""
    is_mac, now, agent = platform == "darwin", clock.now(), scope.agent
    folders = scope.engine_folders

    async def read_services() -> tuple[ServiceFacts, ...]:
        read = process_facts.read_jobs if is_mac else process_facts.read_units
        return await read(run, scope.root, scope.home, now)

    async def read_engines() -> Sequence[EngineFacts]:
        expected = None if agent is None else agent.engine_pids
        engines = await in_thread(lambda: process_facts.read_engines(folders, expected, now))
        if agent is None or not is_mac:
            return engines
        in_flight = await agent.in_flight()
        return [
            engine
            if engine.pid is None
            else replace(engine, in_flight=in_flight.get(engine.replica))
            for engine in engines
        ]

    # By the field of HostFacts that each fills.
    readers: dict[str, Callable[[], Awaitable[Any]]] = {
        "models": lambda: in_thread(lambda: process_facts.read_models_folder(scope.models_dir)),
        "disk": lambda: in_thread(
            lambda: min(
                probe.read_disks((scope.models_dir, *folders)), key=lambda disk: disk.free_bytes
            )
        ),
        "engines": read_engines,
        "services": read_services,
    }
    if is_mac:
        readers |= macos_facts.readers(scope, run, now)
    else:
        readers["clock"] = lambda: in_thread(read_linux_clock)
        readers["listeners"] = lambda: in_thread(
            lambda: process_facts.name_listeners(process_facts.read_sockets(), scope.ports)
        )
    values = await asyncio.gather(*(read_bounded(name, read) for name, read in readers.items()))
    facts: dict[str, Any] = dict(zip(readers, values, strict=True))
    translated = facts.pop("is_translated", None)
    neighbours = facts.get("neighbours") or ()
    if any(neighbour.own is not Reach.REACHED for neighbour in neighbours):
        pids = [service.pid for service in facts.get("services") or ()]
        facts["origin"] = await read_bounded("origin", lambda: macos_facts.read_origin(pids))
    if any(neighbour.is_denied for neighbour in neighbours):
        # The system's log takes seconds to search.
        facts["denials"] = await read_bounded("denials", lambda: macos_facts.count_denials(run))
    return HostFacts(
        system="macOS" if is_mac else "Linux",
        is_agent=agent is not None,
        slept_s=None if agent is None else agent.slept_s(),
        python=process_facts.read_python(is_translated=translated),
        open_files=process_facts.read_open_files(),
        engine_ports=scope.engine_ports,
        api_port=scope.api_port,
        **facts,
    )


def read_linux_clock() -> ClockFacts:
    """Return whether the kernel says that a time server sets the clock (adjtimex(2), which anyone may read).

    Raises:
        OSError: the kernel does not say.

    """
    libc = ctypes.CDLL(None, use_errno=True)
    # All zeros: nothing is set.
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state < 0:
        raise OSError(ctypes.get_errno() or errno.ENOSYS, "adjtimex failed")
    return ClockFacts(is_synchronized=state != _TIME_ERROR)
