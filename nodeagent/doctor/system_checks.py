"""Checks of the operating system: network, firewall, power, updates, limits, folders, clock. Pure."""

from collections.abc import Iterator
from typing import Final

from nodeagent.doctor.host_facts import HostFacts, Reach
from schemas import quantity
from schemas.wire.findings import Finding, Level

POWER_FIX: Final = "power"
"""The power settings of `fleetctl service install`."""
FIREWALL_FIX: Final = "firewall"
"""The interpreter through the application firewall."""
DISK_WARN_BYTES: Final = 10 * 2**30
"""Earlier than an agent's DiskPressure; etcd stops when the disk is full."""
DISK_FAIL_BYTES: Final = 2**30
CLOCK_WARN_S: Final = 3.0
CLOCK_FAIL_S: Final = 60.0
"""A larger offset makes a new certificate not yet valid."""
# mlx-lm raises the limit to this, and fails below it (nodeagent/engines/engine_processes.py).
_MIN_HARD_FILES: Final = 4096
# An agent holds a few files for each engine; launchd's default of 256 was too few (nix#5726).
_MIN_SOFT_FILES: Final = 1024
_MAX_NAMES: Final = 3
# Longer than two readings of the clocks are apart on a busy machine.
_SLEPT_S: Final = 10.0


def ok(check: str, message: str) -> Finding:
    """Return the finding of a check that found no problem."""
    return Finding(check=check, level="OK", message=message)


def unknown(check: str, message: str, advice: str = "") -> Finding:
    """Return the finding of a check that could not be made."""
    return Finding(check=check, level="UNKNOWN", message=message, advice=advice)


def check_local_network(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether macOS lets this process reach its neighbours: Apple's own tools pass where it may not."""
    check = "local network"
    probes = facts.neighbours
    denied = [one for one in probes or () if one.is_denied]
    if denied:
        where = ", ".join(f"{one.address}:{one.port}" for one in denied[:_MAX_NAMES])
        words = f"; the system's log has {facts.denials} denials" if facts.denials else ""
        yield Finding(
            check=check,
            level="FAIL",
            message=f"macOS keeps this program from other Macs: its own socket does not reach {where}, and /usr/bin/nc "
            f"does{words}",
            advice="run it as a LaunchDaemon (`sudo fleetctl service install nodeagent`), or allow it in System Settings > "
            "Privacy & Security > Local Network",
        )
    elif any(one.own is Reach.REACHED for one in probes or ()):
        yield ok(check, "this program reaches another machine on its network")
    elif probes:
        yield unknown(
            check, f"neither this program nor nc reaches {probes[0].address}:{probes[0].port}"
        )
    else:
        yield unknown(
            check,
            "no other machine is known on this network",
            "ping another Mac, and run doctor again",
        )


def check_firewall(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether the application firewall drops connections from other machines."""
    check, found = "firewall", facts.firewall
    socketfilterfw = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    if found is None:
        yield unknown(check, "socketfilterfw did not tell the state of the firewall")
    elif not found.is_on:
        yield ok(check, "the application firewall is off")
    elif found.blocks_all:
        yield Finding(
            check=check,
            level="FAIL",
            message="the application firewall blocks all incoming connections",
            advice=f"sudo {socketfilterfw} --setblockall off",
        )
    elif found.is_python_allowed is None:
        yield unknown(check, "the firewall is on, and its list of programs cannot be read")
    elif not found.is_python_allowed:
        path = facts.python.path
        yield Finding(
            check=check,
            level="WARN",
            message=f"the application firewall is on and does not list {path}: other machines may not reach it",
            advice=f"sudo {socketfilterfw} --add {path} --unblockapp {path}",
            fix=FIREWALL_FIX,
        )
    else:
        yield ok(check, f"the application firewall lets {facts.python.path} accept connections")


def check_sleep(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether the Mac sleeps when it is not used; every engine on it then vanishes."""
    check, found = "sleep", facts.sleep
    if facts.slept_s is not None and facts.slept_s > _SLEPT_S:
        yield Finding(
            check=check,
            level="WARN",
            message=f"this Mac slept for {facts.slept_s:.0f} s since its agent started{_last_sleep(facts)}",
            advice="`pmset -g log | grep Sleep` says why: the settings, a shut lid, the battery or a person",
        )
    if found is None:
        yield unknown(check, "`pmset -g custom` did not tell when this Mac sleeps")
        return
    if found.is_low_power:
        yield Finding(
            check=check,
            level="WARN",
            message="Low Power Mode is on for mains power: the GPU is slower",
            advice="sudo pmset -c lowpowermode 0",
        )
    if found.sleep_minutes == 0:
        yield ok(check, "this Mac does not sleep on mains power")
    elif found.blockers:
        names = ", ".join(found.blockers[:_MAX_NAMES])
        yield Finding(
            check=check,
            level="WARN",
            message=f"this Mac sleeps after {found.sleep_minutes} min; only {names} keeps it awake now",
            advice="sudo pmset -c sleep 0",
            fix=POWER_FIX,
        )
    else:
        yield Finding(
            check=check,
            level="FAIL",
            message=f"this Mac sleeps after {found.sleep_minutes} min without use{_last_sleep(facts)}",
            advice="sudo pmset -c sleep 0",
            fix=POWER_FIX,
        )


def _last_sleep(facts: HostFacts) -> str:
    at = None if facts.sleep is None else facts.sleep.last_slept_at
    return "" if at is None else f", the last time on {at:%Y-%m-%d at %H:%M} UTC"


def check_updates(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether macOS restarts the machine for updates."""
    domain = "/Library/Preferences/com.apple.SoftwareUpdate"
    if facts.installs_updates is None:
        yield unknown(
            "updates",
            "macOS does not say whether it installs updates by itself",
            f"see System Settings > General > Software Update, or `defaults read {domain}`",
        )
    elif facts.installs_updates:
        yield Finding(
            check="updates",
            level="WARN",
            message="macOS installs updates, and restarts this Mac, when it likes",
            advice=f"sudo defaults write {domain} AutomaticallyInstallMacOSUpdates -bool false",
        )
    else:
        yield ok("updates", "macOS waits for a person before it installs updates")


def check_filevault(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether a restart waits for a password before anything runs."""
    if facts.has_filevault is None:
        yield unknown("filevault", "`fdesetup status` did not tell the state of FileVault")
    elif facts.has_filevault:
        yield Finding(
            check="filevault",
            level="WARN",
            message="FileVault is on: after a restart nothing runs here until someone unlocks the disk",
            advice="restart planned with `sudo fdesetup authrestart`, which unlocks it once",
        )
    else:
        yield ok("filevault", "FileVault is off: services start at boot")


def check_open_files(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether the process may open enough files."""
    check, found = "open files", facts.open_files
    if found is None:
        yield unknown(check, "the limit of open files cannot be read")
        return
    of = "the agent" if facts.is_agent else "a program started from this shell"
    if found.hard is not None and found.hard < _MIN_HARD_FILES:
        yield Finding(
            check=check,
            level="FAIL",
            message=f"{of} may open {found.hard} files at most; an engine needs {_MIN_HARD_FILES}",
            advice=_limit_advice(facts),
        )
    elif facts.is_agent and found.soft is not None and found.soft < _MIN_SOFT_FILES:
        # Programs of the fleet raise their own limit, and that of their children, so a shell's does not matter.
        yield Finding(
            check=check,
            level="FAIL",
            message=f"{of} may open {found.soft} files; clients and engines need one each",
            advice=_limit_advice(facts),
        )
    else:
        number = "any number of" if found.soft is None else str(found.soft)
        yield ok(check, f"{of} may open {number} files")


def _limit_advice(facts: HostFacts) -> str:
    if not facts.is_agent:
        return f"ulimit -n {_MIN_HARD_FILES}"
    return "install the service again: `sudo fleetctl service install nodeagent -- FLAGS` sets the limit to 65536"


def check_models_folder(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether this process can list the folder of models."""
    check, found = "models folder", facts.models
    if found is None:
        yield unknown(check, "the folder of models was not listed in time: its disk may not answer")
    elif not found.error:
        yield ok(check, f"{found.user} can list {found.path}")
    elif found.error == "missing":
        yield Finding(
            check=check,
            level="WARN",
            message=f"{found.path} does not exist",
            advice=f"mkdir -p {found.path}",
        )
    else:
        refused = "macOS (TCC) " if facts.system == "macOS" else "the system "
        why = refused + "refuses it" if found.error == "refused" else found.reason
        yield Finding(
            check=check,
            level="FAIL",
            message=f"{found.user} cannot list {found.path}: {why} ({found.reason})",
            advice=_folder_advice(facts, found.path, found.user),
        )


def _folder_advice(facts: HostFacts, path: str, user: str) -> str:
    if facts.system == "macOS":
        return (
            "move the models to /Library/Application Support/mlx-fleet/models: Documents, Desktop, Downloads and external "
            "disks are closed to services"
        )
    return f"sudo chown -R {user} {path}"


def check_disk(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether the disks of the models and of the agent's state have space; `facts` has the fuller one."""
    if facts.disk is None:
        yield unknown("disk", "the free space of the disks of models and state cannot be read")
        return
    free = facts.disk.free_bytes
    size = f"{quantity.show(free)} of {quantity.show(facts.disk.total_bytes)}"
    if free >= DISK_WARN_BYTES:
        yield ok("disk", f"{size} are free on the disk of {facts.disk.path}")
        return
    level: Level = "FAIL" if free < DISK_FAIL_BYTES else "WARN"
    yield Finding(
        check="disk",
        level=level,
        message=f"only {size} are free on the disk of {facts.disk.path}: loading and downloading may fail",
        advice=f"du -sh {facts.disk.path}/* shows what takes the space",
    )


def check_clock(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether a time server agrees with the clock: a certificate is not yet valid for a clock that is late."""
    found = facts.clock
    sets = (
        "sudo sntp -sS time.apple.com" if facts.system == "macOS" else "sudo timedatectl set-ntp on"
    )
    if found is None or (found.offset_s is None and found.is_synchronized is None):
        yield unknown("clock", "no time server answered, and the system does not say more", sets)
        return
    if found.offset_s is not None and abs(found.offset_s) > CLOCK_WARN_S:
        word = "behind" if found.offset_s > 0 else "ahead of"
        yield Finding(
            check="clock",
            level="FAIL" if abs(found.offset_s) > CLOCK_FAIL_S else "WARN",
            message=f"the clock is {abs(found.offset_s):.0f} s {word} the time server",
            advice=sets,
        )
    elif found.is_synchronized is False and found.offset_s is None:
        yield Finding(
            check="clock",
            level="WARN",
            message="no time server sets the clock of this machine",
            advice=sets,
        )
    else:
        yield ok("clock", "a time server agrees with the clock")


def check_rosetta(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether the interpreter runs natively: under Rosetta there is no MLX."""
    found = facts.python
    if found.machine != "arm64" or found.is_translated:
        yield Finding(
            check="rosetta",
            level="FAIL",
            message=f"{found.path} is an {found.machine} program"
            + (" under Rosetta" if found.is_translated else "")
            + ": MLX has no Metal there",
            advice="uv venv --python cpython-3.11-macos-aarch64, and install mlx-fleet in it",
        )
    elif found.is_translated is None:
        yield unknown("rosetta", "`sysctl sysctl.proc_translated` did not answer")
    else:
        yield ok("rosetta", f"{found.path} runs natively")


def check_metal(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether MLX computes on the GPU."""
    found = facts.metal
    if found is None:
        yield unknown("metal", "the GPU has not been checked yet", "run doctor again in a minute")
    elif found.is_available:
        yield ok("metal", found.message)
    else:
        yield Finding(
            check="metal",
            level="FAIL",
            message=f"{found.reason}: {found.message}",
            advice="python -m engine.device_check shows what MLX says",
        )


def check_thunderbolt_bridge(facts: HostFacts) -> Iterator[Finding]:
    """Yield whether a Thunderbolt Bridge with several cables may make a loop (dnet#69)."""
    check, fabric = "thunderbolt bridge", facts.fabric
    if fabric is None:
        yield unknown(check, "system_profiler or ifconfig did not tell about cables and the bridge")
        return
    cabled = [port for port in fabric.ports if port.is_bridged and port.peer]
    peers = {port.peer for port in cabled}
    if len(cabled) < 2:
        yield ok(
            check, "the Thunderbolt Bridge has fewer than two cables to Macs, so it has no loop"
        )
        return
    names = ", ".join(port.interface or f"port {port.receptacle}" for port in cabled)
    is_loop = len(peers) < len(cabled)
    yield Finding(
        check=check,
        level="FAIL" if is_loop else "WARN",
        message=f"the Thunderbolt Bridge connects {names}: "
        + (
            "two of the cables lead to the same Mac, which makes a loop"
            if is_loop
            else "a ring of cables makes a loop, which floods all networks"
        ),
        advice="sudo networksetup -deletenetworkservice 'Thunderbolt Bridge', and give each port an address",
    )
