"""Collects the facts of this machine: all readers at once, each with a time limit. One that fails leaves its fact unknown."""

import asyncio
import ctypes
import errno
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from machinery.clock import Clock
from nodeagent.doctor import macos_facts, process_facts, service_facts
from nodeagent.doctor.host_facts import ClockFacts, HostFacts, ServiceFacts
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
    is_mac = platform == "darwin"
    readers = _common_readers(scope, clock, run, is_mac=is_mac)
    readers |= macos_facts.readers(scope, run) if is_mac else _linux_readers(scope)
    values = await asyncio.gather(*(read_bounded(name, read) for name, read in readers.items()))
    found: dict[str, Any] = dict(zip(readers, values, strict=True))
    translated = found.pop("is_translated", None)
    if any(one.is_denied for one in found.get("neighbours") or ()):
        # The system's log takes seconds to search.
        found["denials"] = await read_bounded("denials", lambda: macos_facts.count_denials(run))
    return HostFacts(
        system="macOS" if is_mac else "Linux",
        is_agent=scope.agent is not None,
        slept_s=None if scope.agent is None else scope.agent.slept_s(),
        python=process_facts.read_python(is_translated=translated),
        open_files=process_facts.read_open_files(),
        engine_ports=scope.engine_ports,
        api_port=scope.api_port,
        **found,
    )


def _common_readers(
    scope: CollectionScope, clock: Clock, run: CommandRunner, *, is_mac: bool
) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the readers of every system, by the field of HostFacts that each fills."""
    now, folder = clock.now(), scope.models_dir
    expected = None if scope.agent is None else scope.agent.engine_pids

    async def read_services() -> tuple[ServiceFacts, ...]:
        if is_mac:
            found = await service_facts.read_jobs(run, scope.root, scope.home, now)
        else:
            found = await service_facts.read_units(run, scope.root, scope.home, now)
        plain = () if scope.plain_services is None else await scope.plain_services()
        return (*found, *plain)

    async def read_engines() -> Any:
        engines = await in_thread(
            lambda: process_facts.read_engines(scope.engine_folders, expected, now)
        )
        if scope.agent is None or not is_mac:
            return engines
        return process_facts.with_in_flight(engines, await scope.agent.in_flight())

    return {
        "models": lambda: in_thread(lambda: process_facts.read_models_folder(folder)),
        "disk": lambda: in_thread(
            lambda: min(
                probe.read_disks((folder, *scope.engine_folders)), key=lambda disk: disk.free_bytes
            )
        ),
        "engines": read_engines,
        "services": read_services,
    }


def _linux_readers(scope: CollectionScope) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {
        "clock": lambda: in_thread(read_linux_clock),
        "listeners": lambda: in_thread(
            lambda: process_facts.name_listeners(process_facts.read_sockets(), scope.ports)
        ),
    }


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
