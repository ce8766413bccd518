"""Registry of the macOS commands that production runs: argument lists, time limits and rights, never their results.

It lives here and not in nodeagent, because the gateway and mDNS run such commands, too. A report of a Mac runs all
that only read; tests/lint/test_macos_commands.py refuses a macOS program that another file starts.
"""

import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

Rights: TypeAlias = Literal["User", "Root"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MacCommand:
    """One command of macOS."""

    name: str
    program: str
    """Its path; a name without a folder is searched in PATH, and then in `folders`."""
    arguments: tuple[str, ...] = ()
    """A word may have parameters, such as "{target}"."""
    timeout_s: float = 5.0
    rights: Rights = "User"
    is_change: bool = False
    """True if it changes the Mac: a report never runs it."""
    folders: str = ""
    examples: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Values of the parameters for a report."""

    def argv(self, **values: str) -> tuple[str, ...]:
        """Return the argument list with the whole path. Raises KeyError: a parameter has no value."""
        program = self.program
        if "/" not in program:
            path = shutil.which(program) or shutil.which(program, path=self.folders or None)
            program = path or program
        return (program, *self.words(**values)[1:])

    def words(self, **values: str) -> tuple[str, ...]:
        """Return the argument list with the program's name, for a search in PATH. Raises KeyError."""
        name = self.program.rpartition("/")[2]
        return (name, *(word.format(**values) for word in self.arguments))

    @property
    def parameters(self) -> frozenset[str]:
        """Return the names of the parameters."""
        parsed = (string.Formatter().parse(word) for word in self.arguments)
        return frozenset(name for parts in parsed for _, name, _, _ in parts if name)


def _read(
    name: str, program: str, /, *arguments: str, timeout_s: float = 5.0, **examples: str
) -> MacCommand:
    return MacCommand(
        name=name,
        program=program,
        arguments=arguments,
        timeout_s=timeout_s,
        examples=MappingProxyType(examples),
    )


def _change(name: str, program: str, *arguments: str, rights: Rights = "Root") -> MacCommand:
    # sysadminctl is slow, and `launchctl bootout` may wait for ExitTimeOut.
    return MacCommand(
        name=name,
        program=program,
        arguments=arguments,
        timeout_s=120.0,
        rights=rights,
        is_change=True,
    )


_SYSCTL: Final = "/usr/sbin/sysctl"
_PROFILER: Final = "/usr/sbin/system_profiler"
_IOREG: Final = "/usr/sbin/ioreg"
_PMSET: Final = "/usr/bin/pmset"
_FIREWALL: Final = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_LAUNCHCTL: Final = "/bin/launchctl"
_NETWORKSETUP: Final = "/usr/sbin/networksetup"
_IFCONFIG: Final = "/sbin/ifconfig"
_DSEDITGROUP: Final = "/usr/sbin/dseditgroup"
_SYSADMINCTL: Final = "/usr/sbin/sysadminctl"
_FDESETUP: Final = "/usr/bin/fdesetup"
_DEFAULTS: Final = "/usr/bin/defaults"
_NETSTAT: Final = "/usr/sbin/netstat"
_SW_VERS: Final = "/usr/bin/sw_vers"
_PS: Final = "/bin/ps"
_TMUTIL: Final = "/usr/bin/tmutil"
# system_profiler takes seconds when it is cold.
_PROFILER_S: Final = 20.0
# Below the period of the load's samples.
_SAMPLE_S: Final = 4.0
_PLIST_BUDDY: Final = "/usr/libexec/PlistBuddy"
_NETWORK_FILE: Final = "/Library/Preferences/SystemConfiguration/preferences.plist"
_BRIDGES: Final = ":VirtualNetworkInterfaces:Bridge"
_WIRED_LIMIT: Final = "iogpu.wired_limit_mb"
UPDATES_FILE: Final = "/Library/Preferences/com.apple.SoftwareUpdate"
"""The settings of updates, for `defaults`."""

# Facts of the machine, once at the agent's start.
FACTS_SYSCTL: Final = _read(
    "sysctl-facts", _SYSCTL, "machdep.cpu.brand_string", "hw.memsize", "hw.ncpu",
    "hw.perflevel0.physicalcpu", "hw.model", _WIRED_LIMIT,
)  # fmt: skip
HARDWARE: Final = _read(
    *("profiler-hardware", _PROFILER, "SPHardwareDataType", "SPDisplaysDataType", "-json"),
    timeout_s=_PROFILER_S,
)
VERSION: Final = _read("sw_vers", _SW_VERS)
GPU_REGISTRY: Final = _read("ioreg-gpu", _IOREG, "-rd1", "-c", "AGXAccelerator")
BOARD_REGISTRY: Final = _read("ioreg-platform", _IOREG, "-rd1", "-c", "IOPlatformExpertDevice")
LOCAL_NAME: Final = _read("scutil-name", "/usr/sbin/scutil", "--get", "LocalHostName")

# Readings of the machine, every ten seconds.
VM_STAT: Final = _read("vm_stat", "/usr/bin/vm_stat")
MEMORY_SYSCTL: Final = _read(
    "sysctl-memory", _SYSCTL, "kern.memorystatus_vm_pressure_level", "hw.memsize", _WIRED_LIMIT
)
THERMAL_LEVEL: Final = _read(
    *("notifyutil-thermal", "/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel"),
    timeout_s=_SAMPLE_S,
)
THERM: Final = _read("pmset-therm", _PMSET, "-g", "therm")
BATTERY: Final = _read("pmset-batt", _PMSET, "-g", "batt")
HID_REGISTRY: Final = _read("ioreg-hid", _IOREG, "-rd1", "-c", "IOHIDSystem")
LID_REGISTRY: Final = _read("ioreg-lid", _IOREG, "-r", "-k", "AppleClamshellState", "-d", "4")
CAMERA_REGISTRY: Final = _read(
    "ioreg-camera", _IOREG, "-r", "-k", "FrontCameraStreaming", "-d", "2"
)
GPU_LOAD: Final = _read(
    "ioreg-gpu-load", _IOREG, "-r", "-c", "IOAccelerator", "-d", "1", timeout_s=_SAMPLE_S
)
MEMORY_FREE: Final = _read(
    "sysctl-memory-free", _SYSCTL, "kern.memorystatus_level", timeout_s=_SAMPLE_S
)
MACMON: Final = MacCommand(
    name="macmon",
    program="macmon",
    arguments=("pipe", "-s", "1", "-i", "200"),
    timeout_s=_SAMPLE_S,
    # launchd gives agents a short PATH, without Homebrew's folders.
    folders="/opt/homebrew/bin:/usr/local/bin",
)

# Cables and RDMA, every 30 seconds. rdma_ctl and ibv_devinfo came with macOS 26.2 and are found by PATH.
THUNDERBOLT: Final = _read(
    "profiler-thunderbolt", _PROFILER, "SPThunderboltDataType", "-json", timeout_s=_PROFILER_S
)
HARDWARE_PORTS: Final = _read("networksetup-ports", _NETWORKSETUP, "-listallhardwareports")
INTERFACES: Final = _read("ifconfig", _IFCONFIG)
RDMA_STATUS: Final = _read("rdma_ctl", "rdma_ctl", "status")
RDMA_DEVICES: Final = _read("ibv_devinfo", "ibv_devinfo")
CHIP_SYSCTL: Final = _read("sysctl-chip", _SYSCTL, "machdep.cpu.brand_string")
BUILD: Final = _read("sw_vers-build", _SW_VERS, "-buildVersion")

# The doctor's facts.
TRANSLATED: Final = _read("sysctl-translated", _SYSCTL, "sysctl.proc_translated")
SLEEP_TIME: Final = _read("sysctl-sleeptime", _SYSCTL, "kern.sleeptime")
FIREWALL_STATE: Final = _read("socketfilterfw-state", _FIREWALL, "--getglobalstate")
FIREWALL_BLOCK_ALL: Final = _read("socketfilterfw-blockall", _FIREWALL, "--getblockall")
FIREWALL_APPS: Final = _read("socketfilterfw-apps", _FIREWALL, "--listapps")
POWER_SETTINGS: Final = _read("pmset-custom", _PMSET, "-g", "custom")
ASSERTIONS: Final = _read("pmset-assertions", _PMSET, "-g", "assertions")
UPDATES: Final = _read("defaults-updates", _DEFAULTS, "read", UPDATES_FILE)
FILEVAULT: Final = _read("fdesetup-status", _FDESETUP, "status")
DISABLED_SERVICES: Final = _read("launchctl-disabled", _LAUNCHCTL, "print-disabled", "system")
# Without root it asks for the password of an administrator, in a window.
BACKGROUND_ITEMS: Final = MacCommand(
    name="sfltool", program="/usr/bin/sfltool", arguments=("dumpbtm",), timeout_s=6.0, rights="Root"
)
SCREEN_USER: Final = _read("stat-console", "/usr/bin/stat", "-f", "%Su", "/dev/console")
# It sets nothing.
CLOCK: Final = _read(
    "sntp", "/usr/bin/sntp", "-t", "3", "{server}", timeout_s=6.0, server="time.apple.com"
)
LISTENERS: Final = _read("netstat-listeners", _NETSTAT, "-anv", "-p", "tcp")
NETWORK_DENIALS: Final = _read(
    *("log-denials", "/usr/bin/log", "show", "--last", "10m", "--style", "compact", "--predicate"),
    'process == "nehelper" AND eventMessage CONTAINS[c] "denied"',
    timeout_s=20.0,
)
NEIGHBOURS: Final = _read("arp", "/usr/sbin/arp", "-an")
DEFAULT_ROUTE: Final = _read("route-default", "/sbin/route", "-n", "get", "default")
CONNECT: Final = _read(
    *("nc", "/usr/bin/nc", "-v", "-z", "-G", "2", "-w", "2", "{address}", "{port}"),
    address="127.0.0.1",
    port="22",
)

# Services of launchd, and the settings that they need.
JOB: Final = _read(
    "launchctl-print", _LAUNCHCTL, "print", "{target}", target="system/com.apple.mDNSResponder"
)
PLIST_CHECK: Final = _read(
    *("plutil", "/usr/bin/plutil", "-lint", "{path}"),
    path="/System/Library/LaunchDaemons/com.apple.mDNSResponder.plist",
)
JOB_ENABLE: Final = _change("launchctl-enable", _LAUNCHCTL, "enable", "{target}")
JOB_START: Final = _change("launchctl-kickstart", _LAUNCHCTL, "kickstart", "{target}")
JOB_LOAD: Final = _change("launchctl-bootstrap", _LAUNCHCTL, "bootstrap", "{domain}", "{path}")
JOB_UNLOAD: Final = _change("launchctl-bootout", _LAUNCHCTL, "bootout", "{target}")
POWER_SET: Final = _change("pmset-set", _PMSET, "-c", "{key}", "{value}")
FIREWALL_ADD: Final = _change("socketfilterfw-add", _FIREWALL, "--add", "{path}")
FIREWALL_UNBLOCK: Final = _change("socketfilterfw-unblock", _FIREWALL, "--unblockapp", "{path}")
FIREWALL_REMOVE: Final = _change("socketfilterfw-remove", _FIREWALL, "--remove", "{path}")
BACKUP_EXCLUSION: Final = _read("tmutil-excluded", _TMUTIL, "isexcluded", "{path}", path="/Library")
# Without -p: a fixed path needs Full Disk Access (nix-installer's set_tmutil_exclusions.rs).
BACKUP_EXCLUDE: Final = _change("tmutil-exclude", _TMUTIL, "addexclusion", "{path}")
BACKUP_INCLUDE: Final = _change("tmutil-include", _TMUTIL, "removeexclusion", "{path}")
WIRED_LIMIT: Final = _read("sysctl-wired", _SYSCTL, "-n", _WIRED_LIMIT)
WIRED_LIMIT_SET: Final = _change("sysctl-wired-set", _SYSCTL, f"{_WIRED_LIMIT}={{mebibytes}}")
GROUP: Final = _read("dseditgroup-read", _DSEDITGROUP, "-o", "read", "{name}", name="staff")
GROUP_ADD: Final = _change(
    "dseditgroup-create", _DSEDITGROUP, "-o", "create", "-i", "{number}", "-r", "mlx-fleet", "{name}"
)  # fmt: skip
GROUP_DELETE: Final = _change("dseditgroup-delete", _DSEDITGROUP, "-o", "delete", "{name}")
MEMBER: Final = _read(
    *("dseditgroup-member", _DSEDITGROUP, "-o", "checkmember", "-m", "{user}", "{group}"),
    user="root",
    group="_analyticsusers",
)
MEMBER_ADD: Final = _change(
    "dseditgroup-add", _DSEDITGROUP, "-o", "edit", "-a", "{user}", "-t", "user", "{group}"
)
MEMBER_REMOVE: Final = _change(
    "dseditgroup-remove", _DSEDITGROUP, "-o", "edit", "-d", "{user}", "-t", "user", "{group}"
)
USER_ADD: Final = _change(
    "sysadminctl-add", _SYSADMINCTL, "-addUser", "{name}", "-fullName", "mlx-fleet", "-UID", "{number}",
    "-GID", "{number}", "-home", "/var/empty", "-shell", "/usr/bin/false", "-roleAccount",
)  # fmt: skip
USER_DELETE: Final = _change("sysadminctl-delete", _SYSADMINCTL, "-deleteUser", "{name}")
ACCOUNT_IDS: Final = _read(
    *("dscl-ids", "/usr/bin/dscl", ".", "-list", "{kind}", "{key}"), kind="/Users", key="UniqueID"
)

# Network services and bridges of Thunderbolt ports.
SERVICE_ORDER: Final = _read("networksetup-order", _NETWORKSETUP, "-listnetworkserviceorder")
SERVICE_INFO: Final = _read(
    "networksetup-info", _NETWORKSETUP, "-getinfo", "{service}", service="Wi-Fi"
)
STORED_BRIDGES: Final = _read(
    "plistbuddy-bridges", _PLIST_BUDDY, "-x", "-c", f"Print {_BRIDGES}", _NETWORK_FILE
)
SERVICE_CREATE: Final = _change(
    "networksetup-create", _NETWORKSETUP, "-createnetworkservice", "{service}", "{port}"
)
SERVICE_DELETE: Final = _change(
    "networksetup-remove", _NETWORKSETUP, "-removenetworkservice", "{service}"
)
# Without a router: a cable between two Macs must never carry the default route.
SERVICE_ADDRESS: Final = _change(
    "networksetup-manual", _NETWORKSETUP, "-setmanual", "{service}", "{address}", "{netmask}"
)
SERVICE_DHCP: Final = _change("networksetup-dhcp", _NETWORKSETUP, "-setdhcp", "{service}")
SERVICE_SWITCH: Final = _change(
    "networksetup-switch", _NETWORKSETUP, "-setnetworkserviceenabled", "{service}", "{state}"
)
BRIDGE_CREATE: Final = _change("ifconfig-create", _IFCONFIG, "{bridge}", "create")
BRIDGE_ADD: Final = _change("ifconfig-addm", _IFCONFIG, "{bridge}", "addm", "{interface}")
BRIDGE_REMOVE: Final = _change("ifconfig-deletem", _IFCONFIG, "{bridge}", "deletem", "{interface}")
BRIDGE_DESTROY: Final = _change("ifconfig-destroy", _IFCONFIG, "{bridge}", "destroy")
BRIDGE_UP: Final = _change("ifconfig-up", _IFCONFIG, "{bridge}", "up")
BRIDGE_FORGET: Final = _change(
    "plistbuddy-delete", _PLIST_BUDDY, "-c", f"Delete {_BRIDGES}:{{bridge}}", _NETWORK_FILE
)
BRIDGES_ADD: Final = _change(
    "plistbuddy-add", _PLIST_BUDDY, "-c", f"Add {_BRIDGES} dict", _NETWORK_FILE
)
BRIDGE_STORE: Final = _change(
    "plistbuddy-merge", _PLIST_BUDDY, "-c", f"Merge {{path}} {_BRIDGES}", _NETWORK_FILE
)
SLEEP: Final = _change("sleep", "/bin/sleep", "{seconds}", rights="User")

# A Mac before anything is on it, over SSH.
HOST_NAME: Final = _read("hostname", "/bin/hostname")
HOME: Final = _read("pwd", "/bin/pwd")
DATE: Final = _read("date", "/bin/date", "-u", "+%s")
DISK: Final = _read("df", "/bin/df", "-Pk", "{folder}", folder="/")
PROGRAMS: Final = _read("ps-programs", _PS, "-axo", "comm=")
MODEL_SYSCTL: Final = _read("sysctl-model", _SYSCTL, "hw.memsize", "hw.model")
IS_TRANSLATED: Final = _read("sysctl-translated-n", _SYSCTL, "-n", "sysctl.proc_translated")
SOCKETS: Final = _read("netstat-sockets", _NETSTAT, "-an", "-p", "tcp")
INSTALLS_UPDATES: Final = _read(
    "defaults-install", _DEFAULTS, "read", UPDATES_FILE, "AutomaticallyInstallMacOSUpdates"
)
KERNEL: Final = _read("uname", "/usr/bin/uname", "-sm")

# Restarts and upgrades.
PROCESS: Final = _read("ps-args", _PS, "-ww", "-o", "args=", "-p", "{pid}", pid="1")
RESTART_UNLOCKED: Final = _change("fdesetup-authrestart", _FDESETUP, "authrestart", "-inputplist")

SLEEP_NOW: Final = _change("pmset-sleepnow", _PMSET, "sleepnow", rights="User")

# `fleetctl up`, and an agent that serves. -s holds on mains power only; -w ends it with the process.
KEEP_AWAKE: Final = _change(
    "caffeinate", "/usr/bin/caffeinate", "-i", "-s", "-w", "{pid}", rights="User"
)

# Reports: other rights for the commands above.
AS_ROOT: Final = _change("sudo-root", "/usr/bin/sudo", "-n", "--")
AS_USER: Final = _change("sudo-user", "/usr/bin/sudo", "-n", "-u", "{user}", "--")
ASK_PASSWORD: Final = _change("sudo-ask", "/usr/bin/sudo", "-v")
ROOT_FOLDER: Final = _change("mktemp", "/usr/bin/mktemp", "-d", "{template}")
ROOT_WRITE: Final = _change("tee", "/usr/bin/tee", "{path}")
ROOT_MODE: Final = _change("chmod", "/bin/chmod", "{mode}", "{path}")
ROOT_OWNER: Final = _change("chown", "/usr/sbin/chown", "{owner}", "{path}")
ROOT_REMOVE: Final = _change("rm", "/bin/rm", "-rf", "--", "{path}")
ROOT_SIGNAL: Final = _change("kill", "/bin/kill", "-{signal}", "{pid}")

# The gateway's floating address.
ADDRESS_ADD: Final = _change(
    *("ifconfig-alias", _IFCONFIG, "{interface}", "inet", "{address}"),
    *("netmask", "255.255.255.255", "alias"),
)
ADDRESS_REMOVE: Final = _change(
    "ifconfig-unalias", _IFCONFIG, "{interface}", "inet", "{address}", "-alias"
)

COMMANDS: Final[Mapping[str, MacCommand]] = MappingProxyType(
    {value.name: value for value in tuple(globals().values()) if isinstance(value, MacCommand)}
)
"""All commands by name."""


def find_program(name: str) -> str | None:
    """Return the path of a program by name: from PATH, else the registry's; None if the machine has none."""
    program = shutil.which(name)
    if program is None:
        paths = {command.program for command in COMMANDS.values() if "/" in command.program}
        return next((p for p in paths if p.endswith(f"/{name}") and Path(p).exists()), None)
    return program
