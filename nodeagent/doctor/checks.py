"""The table of checks of one machine, and their run over its facts. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from nodeagent.doctor import engine_checks, system_checks
from nodeagent.doctor.host_facts import HostFacts, System
from schemas.wire.findings import Finding

_MAC: Final[frozenset[System]] = frozenset(("macOS",))
_BOTH: Final[frozenset[System]] = frozenset(("macOS", "Linux"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """One check: its stable name, the systems that have it, and what it finds out."""

    name: str
    systems: frozenset[System]
    purpose: str
    """The failure that it finds, for the documentation."""
    source: str
    """Commands and files that it reads, for the documentation."""
    run: Callable[[HostFacts], Iterator[Finding]]


CHECKS: Final[Sequence[MachineCheck]] = (
    MachineCheck(
        name="rosetta",
        systems=_MAC,
        purpose="Python is built for Intel, or runs under Rosetta: there is no MLX",
        source="`platform.machine()`, `sysctl sysctl.proc_translated`",
        run=system_checks.check_rosetta,
    ),
    MachineCheck(
        name="metal",
        systems=_MAC,
        purpose="MLX finds no GPU, or it hangs",
        source="the Metal preflight, a child process that computes once",
        run=system_checks.check_metal,
    ),
    MachineCheck(
        name="local network",
        systems=_MAC,
        purpose="macOS keeps the program from other Macs (local network privacy)",
        source="its own socket and `/usr/bin/nc` to the same neighbour; `log show` of nehelper",
        run=system_checks.check_local_network,
    ),
    MachineCheck(
        name="firewall",
        systems=_MAC,
        purpose="the application firewall drops what other machines send",
        source="`socketfilterfw --getglobalstate`, `--getblockall`, `--listapps`",
        run=system_checks.check_firewall,
    ),
    MachineCheck(
        name="sleep",
        systems=_MAC,
        purpose="the Mac sleeps, and its engines vanish",
        source="`pmset -g custom`, `pmset -g assertions`, `sysctl kern.sleeptime`; the agent's clocks with and without sleep",
        run=system_checks.check_sleep,
    ),
    MachineCheck(
        name="updates",
        systems=_MAC,
        purpose="macOS restarts the Mac for an update",
        source="`defaults read /Library/Preferences/com.apple.SoftwareUpdate`",
        run=system_checks.check_updates,
    ),
    MachineCheck(
        name="filevault",
        systems=_MAC,
        purpose="after a restart nothing runs until someone unlocks the disk",
        source="`fdesetup status`",
        run=system_checks.check_filevault,
    ),
    MachineCheck(
        name="service definition",
        systems=_BOTH,
        purpose="the service manager kills, throttles or forgets a service",
        source="the installed property list or unit file",
        run=engine_checks.check_service_definitions,
    ),
    MachineCheck(
        name="crash loop",
        systems=_BOTH,
        purpose="a service ends again and again: more than 5 restarts, and less than 10 min old",
        source="`launchctl print`, `systemctl show`, the plain supervisor",
        run=engine_checks.check_crash_loops,
    ),
    MachineCheck(
        name="login session",
        systems=_MAC,
        purpose="a service runs only while its user is logged in at the screen",
        source="`launchctl print gui/UID/LABEL`, the owner of `/dev/console`",
        run=engine_checks.check_login_session,
    ),
    MachineCheck(
        name="open files",
        systems=_BOTH,
        purpose="the process may open fewer than 1024 files, or its hard limit is below 4096",
        source="RLIMIT_NOFILE of the process",
        run=system_checks.check_open_files,
    ),
    MachineCheck(
        name="models folder",
        systems=_BOTH,
        purpose="the system closes the folder of models to the process (TCC, permissions)",
        source="the process lists the folder itself",
        run=system_checks.check_models_folder,
    ),
    MachineCheck(
        name="disk",
        systems=_BOTH,
        purpose="the disk of the models is full: below 10 GiB WARN, below 1 GiB FAIL",
        source="statvfs",
        run=system_checks.check_disk,
    ),
    MachineCheck(
        name="clock",
        systems=_BOTH,
        purpose="the clock is wrong, and certificates are not yet valid: 3 s WARN, 60 s FAIL",
        source="`sntp -t 3 time.apple.com`; the kernel's clock state on Linux",
        run=system_checks.check_clock,
    ),
    MachineCheck(
        name="thunderbolt bridge",
        systems=_MAC,
        purpose="cables in one Thunderbolt Bridge make a loop that floods all networks",
        source="`system_profiler SPThunderboltDataType`, `ifconfig`",
        run=system_checks.check_thunderbolt_bridge,
    ),
    MachineCheck(
        name="ports",
        systems=_BOTH,
        purpose="another program listens on a port of the agent or its engines",
        source="the listening sockets, `netstat -anv` on macOS",
        run=engine_checks.check_ports,
    ),
    MachineCheck(
        name="stopped engines",
        systems=_BOTH,
        purpose="an engine still runs, listens and holds memory though its agent does not know it",
        source="the process table, the agent",
        run=engine_checks.check_stopped_engines,
    ),
    MachineCheck(
        name="wired memory",
        systems=_MAC,
        purpose="memory stays wired without an engine",
        source="`vm_stat`",
        run=engine_checks.check_wired_memory,
    ),
    MachineCheck(
        name="memory kills",
        systems=_BOTH,
        purpose="Metal or macOS ended an engine because memory was short",
        source="the last lines of engines' logs, `JetsamEvent*.ips`",
        run=engine_checks.check_memory_kills,
    ),
    MachineCheck(
        name="gpu timeout",
        systems=_MAC,
        purpose="the GPU gave up a command of a long prefill",
        source="the last lines of engines' logs",
        run=engine_checks.check_gpu_timeouts,
    ),
    MachineCheck(
        name="gpu spin",
        systems=_MAC,
        purpose="the GPU is 98 % active below 10 W while nothing is generated; MLX_METAL_FAST_SYNCH",
        source="the engines' environment, `macmon`",
        run=engine_checks.check_gpu_spin,
    ),
)


def run_checks(facts: HostFacts) -> tuple[Finding, ...]:
    """Return the findings of all checks that the machine's system has, in the order of the table."""
    return tuple(
        finding for one in CHECKS if facts.system in one.systems for finding in one.run(facts)
    )
