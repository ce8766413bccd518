"""Facts of a machine before anything of ours is on it, from the commands of its system. Parsing is pure.

The formats of macOS are published ones; they were not read from a Mac.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from fleetctl.remote.errors import RemoteError
from fleetctl.remote.session import RemoteMac
from machinery import macos_commands
from machinery.clock import Clock
from nodeagent.hardware import macos, macos_settings
from nodeagent.hardware.linux import parse_machine_id
from nodeagent.hardware.system_text import parse_pairs, parse_positive

_COMMAND_S: Final = 15.0
_LISTEN: Final = "0A"
"""The state of a listening socket in /proc/net/tcp."""

# The argument lists of commands; a command that fails counts as unknown.
_COMMON: Final = {
    "hostname": macos_commands.HOST_NAME.words(),
    "home": macos_commands.HOME.words(),
    "clock": macos_commands.DATE.words(),
    "disk": macos_commands.DISK.words(folder="/"),
    "processes": macos_commands.PROGRAMS.words(),
}
_MACOS: Final = {
    **_COMMON,
    "sw_vers": macos_commands.VERSION.words(),
    "sysctl": macos_commands.MODEL_SYSCTL.words(),
    "rosetta": macos_commands.IS_TRANSLATED.words(),
    "ioreg": macos_commands.BOARD_REGISTRY.words(),
    "sockets": macos_commands.SOCKETS.words(),
    "filevault": macos_commands.FILEVAULT.words(),
    "power": macos_commands.POWER_SETTINGS.words(),
    "updates": macos_commands.INSTALLS_UPDATES.words(),
    # Its folder is not in PATH.
    "firewall": macos_commands.FIREWALL_STATE.argv(),
    "route": macos_commands.DEFAULT_ROUTE.words(),
    "ports": macos_commands.HARDWARE_PORTS.words(),
}
_LINUX: Final = {
    **_COMMON,
    "release": ("cat", "/etc/os-release"),
    "memory": ("cat", "/proc/meminfo"),
    "machine_id": ("cat", "/etc/machine-id"),
    "sockets": ("cat", "/proc/net/tcp", "/proc/net/tcp6"),
    "systemd": ("test", "-d", "/run/systemd/system"),
}
# systemd prints nothing: its exit code is the answer.
_YES: Final = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts of one machine. None and "" mean unknown."""

    system: Literal["Darwin", "Linux"]
    architecture: str
    version: str = ""
    """The version of macOS, such as 14.5; the name of a Linux."""
    build: str = ""
    model: str = ""
    hostname: str = ""
    home: str = ""
    """The home of the user that logged in."""
    hardware_uuid: str = ""
    memory_bytes: int | None = None
    free_bytes: int | None = None
    clock_offset_s: float | None = None
    """Lead of its clock over ours."""
    is_translated: bool = False
    """True in a shell under Rosetta."""
    has_systemd: bool = False
    listening: frozenset[int] = frozenset()
    programs: frozenset[str] = frozenset()
    """Names of running programs."""
    is_encrypted: bool | None = None
    """True if FileVault is on."""
    sleep_minutes: int | None = None
    """Minutes until it sleeps on mains; 0 for never."""
    is_low_power: bool | None = None
    updates_itself: bool | None = None
    has_firewall: bool | None = None
    is_on_wifi: bool | None = None
    """True if its default route is over Wi-Fi."""

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"


async def read_facts(mac: RemoteMac, clock: Clock) -> MachineFacts:
    """Read the facts of a machine.

    Raises:
        RemoteError: its system is not supported, or the connection broke.

    """
    uname = (await mac.must_run(macos_commands.KERNEL.words(), limit_s=_COMMAND_S)).out.split()
    if len(uname) != 2 or uname[0] not in ("Darwin", "Linux"):
        raise RemoteError(
            f"{mac.target.host}: `uname -sm` says {' '.join(uname)[:60]!r}; nodes run macOS, and Linux for trials"
        )
    outputs, offset_s = {}, None
    for name, argv in (_MACOS if uname[0] == "Darwin" else _LINUX).items():
        before = clock.now().timestamp()
        result = await mac.run(argv, limit_s=_COMMAND_S)
        outputs[name] = (result.out or _YES) if result.is_ok else ""
        if name == "clock" and (seconds := parse_positive(result.out.strip())):
            # `date` shows whole seconds, and half a second is the mean of what it hides.
            offset_s = seconds + 0.5 - (before + clock.now().timestamp()) / 2
    parse = parse_macos if uname[0] == "Darwin" else parse_linux
    return parse(uname[1], MappingProxyType(outputs), offset_s)


def parse_macos(architecture: str, out: Mapping[str, str], offset_s: float | None) -> MachineFacts:
    """Return the facts in outputs of macOS. Pure."""
    versions, sysctl = parse_pairs(out.get("sw_vers", "")), parse_pairs(out.get("sysctl", ""))
    power = out.get("power", "")
    return MachineFacts(
        system="Darwin",
        architecture=architecture,
        version=versions.get("ProductVersion", ""),
        build=versions.get("BuildVersion", ""),
        model=sysctl.get("hw.model", ""),
        hostname=out.get("hostname", "").strip(),
        home=out.get("home", "").strip(),
        hardware_uuid=(macos.parse_platform_uuid(out.get("ioreg", "")) or "").lower(),
        memory_bytes=parse_positive(sysctl.get("hw.memsize")),
        free_bytes=_free_bytes(out.get("disk", "")),
        clock_offset_s=offset_s,
        is_translated=out.get("rosetta", "").strip() == "1",
        listening=_macos_ports(out.get("sockets", "")),
        programs=_programs(out.get("processes", "")),
        is_encrypted=macos_settings.parse_filevault(out.get("filevault", "")),
        sleep_minutes=macos_settings.parse_sleep_minutes(power),
        is_low_power=macos_settings.parse_low_power(power),
        updates_itself=_word(out.get("updates", ""), yes="1", no="0"),
        has_firewall=_word(out.get("firewall", ""), yes="enabled", no="disabled"),
        is_on_wifi=_is_wifi(out.get("route", ""), out.get("ports", "")),
    )


def parse_linux(architecture: str, out: Mapping[str, str], offset_s: float | None) -> MachineFacts:
    """Return the facts in outputs of Linux. Pure."""
    release = parse_pairs(out.get("release", ""), separator="=")
    memory = parse_pairs(out.get("memory", "")).get("MemTotal", "").split()
    kib = parse_positive(memory[0]) if memory else None
    return MachineFacts(
        system="Linux",
        architecture=architecture,
        version=release.get("PRETTY_NAME", "").strip('"'),
        hostname=out.get("hostname", "").strip(),
        home=out.get("home", "").strip(),
        hardware_uuid=parse_machine_id(out.get("machine_id", "")),
        memory_bytes=None if kib is None else kib << 10,
        free_bytes=_free_bytes(out.get("disk", "")),
        clock_offset_s=offset_s,
        has_systemd=bool(out.get("systemd")),
        listening=_linux_ports(out.get("sockets", "")),
        programs=_programs(out.get("processes", "")),
    )


def _free_bytes(df: str) -> int | None:
    """Return the free space in the second line of `df -Pk`."""
    lines = df.splitlines()
    fields = lines[1].split() if len(lines) > 1 else []
    return int(fields[3]) << 10 if len(fields) > 3 and fields[3].isdigit() else None


def _macos_ports(netstat: str) -> frozenset[int]:
    """Return the ports in lines such as `tcp4  0  0  *.11434  *.*  LISTEN`."""
    rows = [line.split() for line in netstat.splitlines() if line.rstrip().endswith("LISTEN")]
    names = [row[3].rpartition(".")[2] for row in rows if len(row) >= 6]
    return frozenset(int(name) for name in names if name.isdigit())


def _linux_ports(sockets: str) -> frozenset[int]:
    """Return the ports of /proc/net/tcp: `0: 00000000:0016 00000000:0000 0A ...`."""
    rows = [line.split() for line in sockets.splitlines()]
    listening = [row[1] for row in rows if len(row) > 3 and row[3] == _LISTEN]
    return frozenset(int(one.rpartition(":")[2], 16) for one in listening)


def _programs(ps: str) -> frozenset[str]:
    """Return the names of programs; macOS prints whole paths."""
    return frozenset(line.strip().rpartition("/")[2] for line in ps.splitlines() if line.strip())


def _word(text: str, *, yes: str, no: str) -> bool | None:
    if yes in text:
        return True
    return False if no in text else None


def _is_wifi(route: str, ports: str) -> bool | None:
    """Return whether the interface of the default route is the device of a Wi-Fi port."""
    interface = parse_pairs(route).get("interface", "")
    device = re.search(r"Hardware Port: Wi-Fi\nDevice: (\S+)", ports)
    if not interface or not ports.strip():
        return None
    return device is not None and device[1] == interface
