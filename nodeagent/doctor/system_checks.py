"""Checks of the operating system: network, firewall, power, updates, limits, folders, clock. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from machinery import macos_commands
from nodeagent.doctor.check import fail, finding, ok, unknown, warn
from nodeagent.doctor.host_facts import (
    ClockFacts,
    FirewallFacts,
    FolderFacts,
    NeighbourProbe,
    OpenFileFacts,
    ProcessOrigin,
    PythonFacts,
    Reach,
    SleepFacts,
    System,
)
from nodeagent.hardware.macos import RDMA_SINCE
from nodeagent.hardware.metal import MetalVerdict
from nodeagent.hardware.readings import DiskReading
from nodeagent.hardware.system_text import parse_system_version
from schemas import local_network, quantity
from schemas.node import NodeFabric
from schemas.wire.findings import Finding, Level

METAL_CHECK: Final = "python -m engine.device_check shows what MLX says"
POWER_FIX: Final = "power"
"""The power settings of `fleetctl service install`."""
FIREWALL_FIX: Final = "firewall"
"""The interpreter through the application firewall."""
# Earlier than an agent's DiskPressure; etcd stops when the disk is full.
_DISK_WARN_BYTES: Final = 10 * 2**30
_DISK_FAIL_BYTES: Final = 2**30
_CLOCK_WARN_S: Final = 3.0
# A larger offset makes a new certificate not yet valid.
_CLOCK_FAIL_S: Final = 60.0
# mlx-lm raises the limit to this, and fails below it (nodeagent/engines/engine_processes.py).
_MIN_HARD_FILES: Final = 4096
# An agent holds a few files for each engine; launchd's default of 256 was too few (nix#5726).
_MIN_SOFT_FILES: Final = 1024
_MAX_NAMES: Final = 3
# Longer than two readings of the clocks are apart on a busy machine.
_SLEPT_S: Final = 10.0
NO_NEIGHBOUR: Final = unknown(
    "no other machine is known on this network", "ping another Mac, and run doctor again"
)


def disk_level(free_bytes: int) -> Level:
    """Return the level of a disk with so much free space."""
    if free_bytes >= _DISK_WARN_BYTES:
        return "OK"
    return "FAIL" if free_bytes < _DISK_FAIL_BYTES else "WARN"


def clock_level(offset_s: float) -> Level:
    """Return the level of a clock that is off by so much."""
    if abs(offset_s) <= _CLOCK_WARN_S:
        return "OK"
    return "FAIL" if abs(offset_s) > _CLOCK_FAIL_S else "WARN"


def check_local_network(
    neighbours: Sequence[NeighbourProbe], origin: ProcessOrigin | None, denials: int | None
) -> Iterator[Finding]:
    """Yield whether macOS lets this process reach its neighbours: Apple's own tools pass where it may not.

    A process that outlived its terminal is known without them: EHOSTUNREACH, while loopback works.
    """
    is_reached = any(probe.own is Reach.REACHED for probe in neighbours)
    is_orphan = origin is not None and origin.is_orphan and origin.reaches_loopback
    denied = [
        probe
        for probe in neighbours
        if probe.is_denied
        or (
            is_orphan
            and not is_reached
            and probe.own is Reach.UNREACHABLE
            and local_network.is_local(probe.address)
        )
    ]
    if denied:
        where = ", ".join(f"{probe.address}:{probe.port}" for probe in denied[:_MAX_NAMES])
        log = f"; the system's log has {denials} denials" if denials else ""
        why = ", and /usr/bin/nc does" if any(probe.is_denied for probe in denied) else ""
        if is_orphan:
            why += "; it is an orphaned process: its terminal or ssh session has ended"
        yield fail(
            f"macOS keeps this program from other Macs ({local_network.NAME}): its own socket does not reach {where}"
            f"{why}{log}",
            local_network.REMEDY,
        )
    elif is_reached:
        yield ok("this program reaches another machine on its network")
    elif neighbours:
        yield unknown(
            f"neither this program nor nc reaches {neighbours[0].address}:{neighbours[0].port}"
        )
    else:
        yield NO_NEIGHBOUR


def check_firewall(firewall: FirewallFacts, python: PythonFacts) -> Iterator[Finding]:
    """Yield whether the application firewall drops connections from other machines."""
    socketfilterfw, path = macos_commands.FIREWALL_ADD.program, python.path
    if not firewall.is_on:
        yield ok("the application firewall is off")
    elif firewall.blocks_all:
        yield fail(
            "the application firewall blocks all incoming connections",
            f"sudo {socketfilterfw} --setblockall off",
        )
    elif firewall.is_python_allowed is None:
        yield unknown("the firewall is on, and its list of programs cannot be read")
    elif firewall.is_python_allowed:
        yield ok(f"the application firewall lets {path} accept connections")
    else:
        yield warn(
            f"the application firewall is on and does not list {path}: other machines may not reach it",
            f"sudo {socketfilterfw} --add {path} --unblockapp {path}",
            fix=FIREWALL_FIX,
        )


def check_sleep(sleep: SleepFacts | None, slept_s: float | None) -> Iterator[Finding]:
    """Yield whether the Mac sleeps when it is not used; every engine on it then vanishes."""
    at = None if sleep is None else sleep.last_slept_at
    last = "" if at is None else f", the last time on {at:%Y-%m-%d at %H:%M} UTC"
    if slept_s is not None and slept_s > _SLEPT_S:
        yield warn(
            f"this Mac slept for {slept_s:.0f} s since its agent started{last}",
            "`pmset -g log | grep Sleep` says why: the settings, a shut lid, the battery or a person",
        )
    if sleep is None:
        yield unknown("`pmset -g custom` did not tell when this Mac sleeps")
        return
    if sleep.is_low_power:
        yield warn(
            "Low Power Mode is on for mains power: the GPU is slower",
            "sudo pmset -c lowpowermode 0",
        )
    after, remedy = f"this Mac sleeps after {sleep.sleep_minutes} min", "sudo pmset -c sleep 0"
    if sleep.sleep_minutes == 0:
        yield ok("this Mac does not sleep on mains power")
    elif sleep.blockers:
        names = ", ".join(sleep.blockers[:_MAX_NAMES])
        yield warn(f"{after}; only {names} keeps it awake now", remedy, fix=POWER_FIX)
    else:
        yield fail(f"{after} without use{last}", remedy, fix=POWER_FIX)


def check_updates(*, installs_updates: bool) -> Iterator[Finding]:
    """Yield whether macOS restarts the machine for updates."""
    if installs_updates:
        yield warn("macOS installs updates, and restarts this Mac, when it likes")
    else:
        yield ok("macOS waits for a person before it installs updates")


def check_filevault(*, has_filevault: bool) -> Iterator[Finding]:
    """Yield whether a restart waits for a password before anything runs."""
    if has_filevault:
        yield warn(
            "FileVault is on: after a restart nothing runs here until someone unlocks the disk"
        )
    else:
        yield ok("FileVault is off: services start at boot")


def check_open_files(open_files: OpenFileFacts, *, is_agent: bool) -> Iterator[Finding]:
    """Yield whether the process may open enough files."""
    soft, hard = open_files.soft, open_files.hard
    owner = "the agent" if is_agent else "a program started from this shell"
    remedy = (
        "install the service again: `sudo fleetctl service install nodeagent -- FLAGS` sets the limit to 65536"
        if is_agent
        else f"ulimit -n {_MIN_HARD_FILES}"
    )
    if hard is not None and hard < _MIN_HARD_FILES:
        yield fail(
            f"{owner} may open {hard} files at most; an engine needs {_MIN_HARD_FILES}",
            remedy,
        )
    elif is_agent and soft is not None and soft < _MIN_SOFT_FILES:
        # Programs of the fleet raise their own limit, and that of their children, so a shell's does not matter.
        yield fail(f"{owner} may open {soft} files; clients and engines need one each", remedy)
    else:
        number = "any number of" if soft is None else str(soft)
        yield ok(f"{owner} may open {number} files")


def check_models_folder(models: FolderFacts, system: System) -> Iterator[Finding]:
    """Yield whether this process can list the folder of models."""
    path, user = models.path, models.user
    if not models.error:
        yield ok(f"{user} can list {path}")
    elif models.error == "missing":
        yield warn(f"{path} does not exist", f"mkdir -p {path}")
    else:
        refused = "macOS (TCC) refuses it" if system == "macOS" else "the system refuses it"
        why = refused if models.error == "refused" else models.reason
        yield fail(
            f"{user} cannot list {path}: {why} ({models.reason})",
            "move the models to /Library/Application Support/mlx-fleet/models: Documents, Desktop, Downloads and external "
            "disks are closed to services"
            if system == "macOS"
            else f"sudo chown -R {user} {path}",
        )


def check_disk(disk: DiskReading) -> Iterator[Finding]:
    """Yield whether the disks of the models and of the agent's state have space; `disk` is the fuller one."""
    size = f"{quantity.show(disk.free_bytes)} of {quantity.show(disk.total_bytes)}"
    level, place = disk_level(disk.free_bytes), f"free on the disk of {disk.path}"
    if level == "OK":
        yield ok(f"{size} are {place}")
        return
    yield finding(
        level,
        f"only {size} are {place}: loading and downloading may fail",
        f"du -sh {disk.path}/* shows what takes the space",
    )


def check_clock(clock: ClockFacts | None, system: System) -> Iterator[Finding]:
    """Yield whether a time server agrees with the clock: a certificate is not yet valid for a clock that is late."""
    sets = "sudo sntp -sS time.apple.com" if system == "macOS" else "sudo timedatectl set-ntp on"
    if clock is None or (clock.offset_s is None and clock.is_synchronized is None):
        yield unknown("no time server answered, and the system does not say more", sets)
        return
    level = clock_level(clock.offset_s or 0.0)
    if clock.offset_s is not None and level != "OK":
        direction = "behind" if clock.offset_s > 0 else "ahead of"
        offset = f"{abs(clock.offset_s):.0f} s"
        yield finding(level, f"the clock is {offset} {direction} the time server", sets)
    elif clock.is_synchronized is False and clock.offset_s is None:
        yield warn("no time server sets the clock of this machine", sets)
    else:
        yield ok("a time server agrees with the clock")


def check_rosetta(python: PythonFacts) -> Iterator[Finding]:
    """Yield whether the interpreter runs natively: under Rosetta there is no MLX."""
    if python.machine != "arm64" or python.is_translated:
        under = " under Rosetta" if python.is_translated else ""
        yield fail(f"{python.path} is an {python.machine} program{under}: MLX has no Metal there")
    elif python.is_translated is None:
        yield unknown("`sysctl sysctl.proc_translated` did not answer")
    else:
        yield ok(f"{python.path} runs natively")


def check_metal(metal: MetalVerdict) -> Iterator[Finding]:
    """Yield whether MLX computes on the GPU."""
    yield ok(metal.message) if metal.is_available else fail(f"{metal.reason}: {metal.message}")


def check_mlx_build(metal: MetalVerdict, system_version: tuple[int, int]) -> Iterator[Finding]:
    """Yield whether MLX is the build for this macOS: the wheels of one release differ in what they contain."""
    build = metal.build
    minimum = None if build is None else parse_system_version(build.minimum_system)
    if build is None or minimum is None:
        yield unknown("the device check did not tell the macOS that MLX is built for", METAL_CHECK)
        return
    system = "{}.{}".format(*system_version)
    name = f"MLX is built for macOS {build.minimum_system} and newer ({build.tag or 'no wheel'})"
    if minimum > system_version:
        # The tag cannot say 26.2, so installers take it for 26.0 and 26.1 (mlx#4525).
        yield fail(
            f"{name}, and this is macOS {system}: the kernels of an M5 do not run here",
            f"update macOS to {build.minimum_system}, or install mlx-fleet again from its archive",
        )
    elif (26, 0) <= system_version < RDMA_SINCE:
        yield warn(
            f"{name}; macOS {system} has neither RDMA nor what the M5's neural accelerators need",
            "update macOS to 26.2 or newer, and install mlx-fleet again from its archive",
        )
    elif minimum < RDMA_SINCE <= system_version:
        yield warn(
            f"{name}, and this is macOS {system}: it has no RDMA (JACCL), and no kernels for the M5's neural accelerators",
            "install mlx-fleet again from an archive of `fleetctl bundle create`, which has the wheels of all versions; in "
            "a checkout `make clean setup`",
        )
    else:
        yield ok(name)


def check_default_route(fabric: NodeFabric, default_interface: str) -> Iterator[Finding]:
    """Yield whether the default route leads over a cable between Macs: a bridge with DHCP may take it (dnet#66)."""
    cables = {port.interface for port in fabric.ports}
    cables |= {interface.name for interface in fabric.interfaces if interface.is_thunderbolt}
    if default_interface in cables:
        yield fail(
            f"the default route leads over {default_interface}, a Thunderbolt interface, to another Mac and not to the Internet"
        )
    else:
        yield ok(
            f"the default route leads over {default_interface}, which is no Thunderbolt interface"
        )


def check_thunderbolt_bridge(fabric: NodeFabric) -> Iterator[Finding]:
    """Yield whether a Thunderbolt Bridge with several cables may make a loop (dnet#69)."""
    cabled = [port for port in fabric.ports if port.is_bridged and port.peer]
    names = ", ".join(port.interface or f"port {port.receptacle}" for port in cabled)
    if len(cabled) < 2:
        yield ok("the Thunderbolt Bridge has fewer than two cables to Macs, so it has no loop")
    elif len({port.peer for port in cabled}) < len(cabled):
        yield fail(
            f"the Thunderbolt Bridge connects {names}: two of the cables lead to the same Mac, which makes a loop"
        )
    else:
        yield warn(
            f"the Thunderbolt Bridge connects {names}: a ring of cables makes a loop, which floods all networks"
        )
