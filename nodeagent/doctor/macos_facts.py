"""Readers of a Mac's settings and reports, by the commands of macOS.

Tested on captures only, not on a Mac: docs/hardware.md says what the first Mac must confirm.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from machinery import macos_commands
from machinery.macos_commands import MacCommand
from nodeagent.doctor import process_facts
from nodeagent.doctor.host_facts import (
    BackgroundFacts,
    ClockFacts,
    FirewallFacts,
    Listener,
    NeighbourProbe,
    ProcessOrigin,
    Reach,
    SleepFacts,
)
from nodeagent.doctor.readers import CollectionScope, CommandRunner, in_thread, try_connect
from nodeagent.hardware import load, macos, macos_fabric, macos_settings, panic_reports
from nodeagent.hardware.load import Macmon
from nodeagent.hardware.macos_settings import JetsamReport
from nodeagent.hardware.readings import RebootReading
from nodeagent.hardware.system_text import parse_pairs, parse_system_version
from nodeagent.node.machine_conditions import recent_panics

_MAX_NEIGHBOURS: Final = 3
# A neighbour found by ARP answers there: with SSH, or with a refusal.
_ANY_PORT: Final = 22
_MAX_REPORTS: Final = 10
_MAX_REPORT_BYTES: Final = 8 << 20
_REPORTS: Final = Path("Library") / "Logs" / "DiagnosticReports"
_UNREACHABLE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def readers(
    scope: CollectionScope, run: CommandRunner, now: datetime
) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the readers by the field of HostFacts that each fills."""

    async def read(parse: Callable[[str], Any], command: MacCommand) -> Any:
        return parse(await run(command.argv(**command.examples)) or "")

    readings: dict[str, Callable[[], Awaitable[Any]]] = {
        # Rosetta translates what a translated process starts.
        "is_translated": lambda: read(parse_translation, macos_commands.TRANSLATED),
        "system_version": lambda: read(
            lambda text: parse_system_version(macos.parse_os_version(text)), macos_commands.VERSION
        ),
        "firewall": lambda: read_firewall(run),
        "sleep": lambda: read_sleep(run),
        "installs_updates": lambda: read(
            macos_settings.parse_installs_updates, macos_commands.UPDATES
        ),
        "has_filevault": lambda: read(macos_settings.parse_filevault, macos_commands.FILEVAULT),
        "background": lambda: read_background(scope, run),
        "is_user_at_screen": lambda: read(parse_screen_user, macos_commands.SCREEN_USER),
        # It sets nothing.
        "clock": lambda: read(parse_clock, macos_commands.CLOCK),
        "neighbours": lambda: read_neighbours(scope, run),
        "fabric": macos_fabric.read_fabric,
        "default_interface": lambda: read(
            lambda text: parse_pairs(text).get("interface") or None, macos_commands.DEFAULT_ROUTE
        ),
        "wired": lambda: read_wired(run),
        "listeners": lambda: read_listeners(scope, run),
        "panics": lambda: in_thread(
            lambda: recent_panics(panic_reports.read_panics(scope.root / _REPORTS), now)
        ),
        "jetsam": lambda: in_thread(lambda: read_jetsam(scope.root / _REPORTS)),
        "gpu": lambda: read(parse_gpu, macos_commands.MACMON),
    }
    return readings if scope.metal is None else readings | {"metal": scope.metal}


def parse_translation(sysctl: str) -> bool | None:
    """Return whether `sysctl sysctl.proc_translated` says that Rosetta translates the process."""
    return {"0": False, "1": True}.get(parse_pairs(sysctl).get("sysctl.proc_translated", ""))


def parse_screen_user(owner: str) -> bool | None:
    """Return whether a user is logged in at the screen; root owns the console otherwise."""
    return owner.strip() not in ("root", "_mbsetupuser") if owner.strip() else None


def parse_clock(sntp: str) -> ClockFacts | None:
    """Return the difference to the time server."""
    offset_s = macos_settings.parse_clock_offset(sntp)
    return None if offset_s is None else ClockFacts(offset_s=offset_s)


def parse_gpu(printed: str) -> Macmon | None:
    """Return the GPU's use and power by macmon; None if it does not show both."""
    macmon = load.parse_macmon(printed)
    return None if macmon.gpu_ratio is None or macmon.gpu_watts is None else macmon


async def read_firewall(run: CommandRunner) -> FirewallFacts | None:
    """Return the application firewall's state, and whether it lists this interpreter."""
    state, block, apps = await asyncio.gather(
        run(macos_commands.FIREWALL_STATE.argv()),
        run(macos_commands.FIREWALL_BLOCK_ALL.argv()),
        run(macos_commands.FIREWALL_APPS.argv()),
    )
    number = macos_settings.parse_firewall_state(state or "")
    if number is None:
        return None
    path = process_facts.read_python(is_translated=None).path
    return FirewallFacts(
        is_on=number > 0,
        blocks_all=number == 2 or macos_settings.parse_block_all(block or ""),
        is_python_allowed=macos_settings.parse_firewall_apps(apps).get(path, False)
        if apps
        else None,
    )


async def read_background(scope: CollectionScope, run: CommandRunner) -> BackgroundFacts | None:
    """Return the services that macOS does not start."""
    printed = await run(macos_commands.DISABLED_SERVICES.argv())
    disabled = macos_settings.parse_disabled_services(printed or "")
    items = await run(macos_commands.BACKGROUND_ITEMS.argv()) if scope.is_root else None
    if disabled is None:
        return None
    return BackgroundFacts(
        disabled=disabled, disallowed=macos_settings.parse_disallowed_items(items or "")
    )


async def read_sleep(run: CommandRunner) -> SleepFacts | None:
    """Return when the Mac sleeps, and what keeps it awake now."""
    custom, assertions, slept = await asyncio.gather(
        run(macos_commands.POWER_SETTINGS.argv()),
        run(macos_commands.ASSERTIONS.argv()),
        run(macos_commands.SLEEP_TIME.argv()),
    )
    minutes = macos_settings.parse_sleep_minutes(custom or "")
    if minutes is None:
        return None
    return SleepFacts(
        sleep_minutes=minutes,
        blockers=macos_settings.parse_sleep_blockers(assertions or ""),
        last_slept_at=macos_settings.parse_timeval(slept or ""),
        is_low_power=macos_settings.parse_low_power(custom or ""),
    )


async def read_wired(run: CommandRunner) -> RebootReading | None:
    """Return the wired memory."""
    vm_stat, sysctl = await asyncio.gather(
        run(macos_commands.VM_STAT.argv()), run(macos_commands.MEMORY_SYSCTL.argv())
    )
    printed = macos.ReadingOutput(vm_stat=vm_stat or "", sysctl=sysctl or "")
    return macos.assemble_reading(printed).reboot


async def read_listeners(scope: CollectionScope, run: CommandRunner) -> tuple[Listener, ...] | None:
    """Return the listeners on the fleet's ports; psutil would need root to see other users' sockets."""
    printed = await run(macos_commands.LISTENERS.argv())
    if not printed or "Local Address" not in printed:
        return None
    sockets = list(macos_settings.parse_listeners(printed))
    return await in_thread(lambda: process_facts.name_listeners(sockets, scope.ports))


def read_jetsam(folder: Path) -> tuple[JetsamReport, ...]:
    """Return the newest reports about processes that macOS killed. Raises OSError: they cannot be read."""
    paths = [path for path in folder.iterdir() if path.name.startswith("JetsamEvent")]
    reports = []
    # Their names have the time.
    for path in sorted(paths, reverse=True)[:_MAX_REPORTS]:
        with path.open("rb") as file:
            text = file.read(_MAX_REPORT_BYTES).decode(errors="replace")
        report = macos_settings.parse_jetsam(text)
        if report is not None:
            reports.append(report)
    return tuple(reports)


async def count_denials(run: CommandRunner) -> int | None:
    """Return the number of entries about the local network in the system's log of the last ten minutes."""
    printed = await run(macos_commands.NETWORK_DENIALS.argv())
    return None if printed is None else parse_denials(printed)


def parse_denials(log: str) -> int:
    """Return the number of entries of nehelper in the output of `log show`."""
    return sum("nehelper" in line for line in log.splitlines())


async def read_neighbours(
    scope: CollectionScope, run: CommandRunner
) -> tuple[NeighbourProbe, ...] | None:
    """Connect to other machines of this network; with a tool of the system, too, where our own socket fails."""
    if scope.agent is not None:
        places: Sequence[tuple[str, int]] = await scope.agent.neighbours()
    else:
        arp, route = await asyncio.gather(
            run(macos_commands.NEIGHBOURS.argv()), run(macos_commands.DEFAULT_ROUTE.argv())
        )
        neighbours = macos_settings.parse_neighbours(arp or "", route or "")
        places = [(address, _ANY_PORT) for address in neighbours]
    if not places:
        return None
    probes = [probe(run, *place) for place in places[:_MAX_NEIGHBOURS]]
    return tuple(await asyncio.gather(*probes))


async def probe(run: CommandRunner, address: str, port: int) -> NeighbourProbe:
    """Connect to a machine with a socket of this process; with nc, too, if that fails."""
    own, tool = await connect(address, port), None
    if own is not Reach.REACHED:
        # nc reports to stderr, which the runner does not keep.
        words = macos_commands.CONNECT.argv(address=address, port=str(port))
        tool = parse_nc(await run(("/bin/sh", "-c", 'exec "$0" "$@" 2>&1', *words)) or "")
    return NeighbourProbe(address=address, port=port, own=own, tool=tool)


async def connect(address: str, port: int) -> Reach:
    """Connect with a socket of this process, and close it."""
    error = await try_connect(address, port)
    if error is None or isinstance(error, ConnectionError):
        return Reach.REACHED
    return Reach.UNREACHABLE if error.errno in _UNREACHABLE else Reach.SILENT


async def read_origin(services: Iterable[int | None]) -> ProcessOrigin:
    """Return what started this process; `services` are the processes that launchd or systemd runs.

    Raises:
        OSError, psutil.Error: this machine has no loopback, or the processes cannot be read.

    """
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as own:
        reached = await connect(*own.sockets[0].getsockname()[:2])
    return ProcessOrigin(
        is_orphan=process_facts.is_orphan(services), reaches_loopback=reached is Reach.REACHED
    )


def parse_nc(text: str) -> Reach:
    """Return how far `nc -v -z` came: "Connection to ... succeeded!", or "... failed: Connection refused"."""
    if "succeeded" in text or "refused" in text:
        return Reach.REACHED
    return Reach.UNREACHABLE if "No route" in text or "unreachable" in text else Reach.SILENT
