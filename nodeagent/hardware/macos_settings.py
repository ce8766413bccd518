"""Settings and reports of macOS, as its commands print them. Pure; None or empty for what an output does not have.

Tested on captures only, not on a Mac: tests/nodeagent/hardware/captures/settings holds output in the published formats.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from nodeagent.hardware.system_text import parse_pairs

_ASSERTIONS: Final = ("PreventUserIdleSystemSleep", "PreventSystemSleep", "NoIdleSleepAssertion")
# It only says that the display is on, which ends by itself.
_TEMPORARY_HOLDERS: Final = frozenset(("powerd",))
_MAX_NAMES: Final = 10


def parse_power(text: str) -> dict[str, str]:
    """Return the settings for mains power in the output of `pmset -g custom`."""
    block = re.search(r"^AC Power:\n((?:[ \t]+.*\n?)*)", text, re.MULTILINE)
    lines = re.findall(r"^[ \t]+(\w[\w ]*?)[ \t]+(\d+)\b", block[1] if block else "", re.MULTILINE)
    return dict(lines)


def parse_sleep_minutes(text: str) -> int | None:
    """Return the minutes until the Mac sleeps on mains power, in the output of `pmset -g custom`."""
    minutes = parse_power(text).get("sleep", "")
    return int(minutes[:6]) if minutes else None


def parse_low_power(text: str) -> bool | None:
    """Return whether Low Power Mode is on for mains power, in the output of `pmset -g custom`."""
    settings = parse_power(text)
    mode = settings.get("lowpowermode", settings.get("powermode"))
    return None if mode is None else mode == "1"


def parse_wakes_on_lan(text: str) -> bool | None:
    """Return whether a magic packet wakes the Mac on mains power, in the output of `pmset -g custom`; None if unknown."""
    return {"1": True, "0": False}.get(parse_power(text).get("womp", ""))


def parse_sleep_blockers(text: str) -> tuple[str, ...]:
    """Return the processes in `pmset -g assertions` that keep the Mac awake."""
    pattern = r"^\s*pid \d+\(([^)]{1,64})\): \[\w+\] \S+ (\w+) named:"
    names = {
        name
        for name, assertion in re.findall(pattern, text, re.MULTILINE)
        if assertion in _ASSERTIONS and name not in _TEMPORARY_HOLDERS
    }
    return tuple(sorted(names)[:_MAX_NAMES])


def parse_timeval(text: str) -> datetime | None:
    """Return the time in `sysctl kern.sleeptime`: "{ sec = 1763800000, usec = 12 } Sat ..."; None for never."""
    match = re.search(r"\bsec = (\d{1,11})\b", text, re.ASCII)
    return datetime.fromtimestamp(int(match[1]), UTC) if match and int(match[1]) else None


def parse_firewall_state(text: str) -> int | None:
    """Return the state in `socketfilterfw --getglobalstate`: 0 off, 1 on, 2 on and blocking all."""
    match = re.search(r"\(State = (\d)\)", text, re.ASCII)
    return int(match[1]) if match else None


def parse_block_all(text: str) -> bool:
    """Return whether `socketfilterfw --getblockall` says that everything is blocked."""
    return bool(re.search(r"block all (?:state set to )?enabled", text, re.IGNORECASE))


def parse_firewall_apps(text: str) -> dict[str, bool]:
    """Return the programs in `socketfilterfw --listapps`, and whether each may accept connections."""
    pattern = r"^\s*\d+ ?:\s+(\S.*?)\s*\n\s*\(\s*(Allow|Block) incoming connections\s*\)"
    entries = re.findall(pattern, text, re.MULTILINE | re.IGNORECASE)
    return {path: word.lower() == "allow" for path, word in entries}


def parse_installs_updates(text: str) -> bool | None:
    """Return AutomaticallyInstallMacOSUpdates in `defaults read .../com.apple.SoftwareUpdate`; None if it is not set."""
    match = re.search(r"^\s*AutomaticallyInstallMacOSUpdates = (\d);", text, re.MULTILINE)
    return match[1] == "1" if match else None


def parse_filevault(text: str) -> bool | None:
    """Return whether `fdesetup status` says that FileVault is on."""
    match = re.search(r"\bFileVault is (On|Off)\b", text)
    return match[1] == "On" if match else None


def parse_disabled_services(text: str) -> frozenset[str] | None:
    """Return the labels that `launchctl print-disabled` lists as disabled: "true" until macOS 12, "disabled" from 13 on."""
    if "disabled services = {" not in text:
        return None
    return frozenset(re.findall(r'^\s*"([^"]+)" => (?:true|disabled)\b', text, re.MULTILINE))


def parse_disallowed_items(text: str) -> frozenset[str] | None:
    """Return the labels of services in `sfltool dumpbtm` that an owner has switched off in Login Items & Extensions.

    A record names its property list as a URL, or as a path until macOS 13; the groups of developers have none.
    """
    if "Records for UID" not in text:
        return None
    labels = set()
    for record in re.split(r"^\s*#\d+:\s*$", text, flags=re.MULTILINE):
        url = re.search(r"^\s*URL: \S.*/([^/]+)\.plist\s*$", record, re.MULTILINE)
        if url and re.search(r"^\s*Disposition: \[[^\]]*\bdisallowed\b", record, re.MULTILINE):
            labels.add(url[1])
    return frozenset(labels)


def parse_clock_offset(text: str) -> float | None:
    """Return the seconds in `sntp time.apple.com`: "+0.001234 +/- 0.012345 time.apple.com 17.253.14.125".

    Newer builds print the date and the time zone before it.
    """
    match = re.search(r"(?:^|\s)([+-]\d{1,12}(?:\.\d{1,9})?) \+/- ", text, re.ASCII)
    return float(match[1]) if match else None


def parse_neighbours(arp: str, route: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of other machines in `arp -an`, without the router in `route -n get default`.

    macOS lets every program reach the router, so it proves nothing.
    """
    router = parse_pairs(route).get("gateway", "")
    pattern = r"\((\d{1,3}(?:\.\d{1,3}){3})\) at ((?:[0-9a-f]{1,2}:){5}[0-9a-f]{1,2}) on "
    return tuple(
        address
        for address, hardware in re.findall(pattern, arp, re.ASCII)
        # Multicast and broadcast have hardware addresses with an odd first byte.
        if address != router and int(hardware.partition(":")[0], 16) % 2 == 0
    )


def parse_listeners(netstat: str) -> Iterator[tuple[int, int | None]]:
    """Yield (port, pid) of the listening sockets in `netstat -anv -p tcp`.

    Until macOS 14 the pid is a column of its own, later it follows the name in `process:pid`.
    """
    has_names = "process:pid" in netstat
    for line in netstat.splitlines():
        words = line.split()
        if len(words) < 9 or not words[0].startswith("tcp") or words[5] != "LISTEN":
            continue
        port = words[3].rpartition(".")[2]
        named = re.search(r":(\d{1,9})\s", line, re.ASCII)
        pid = (named[1] if named else "") if has_names else words[8]
        if port.isdecimal():
            yield int(port), int(pid) if pid.isdecimal() and int(pid) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JetsamReport:
    """A report about processes that macOS killed because memory was short."""

    at: datetime
    killed: tuple[str, ...]
    """Names of the processes; the largest one if the report names no victim."""


def parse_jetsam(text: str) -> JetsamReport | None:
    """Return the report in a `JetsamEvent-*.ips`: a line of JSON about the file, then the report as JSON."""
    head, _, body = text.partition("\n")
    try:
        header, tree = json.loads(head), json.loads(body)
        # Such as 2026-11-20 10:11:12.00 +0100.
        at = datetime.strptime(header["timestamp"], "%Y-%m-%d %H:%M:%S.%f %z")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(tree, dict):
        return None
    names = dict.fromkeys(_victims(tree))
    largest = tree.get("largestProcess")
    if not names and isinstance(largest, str):
        names = {largest[:64]: None}
    return JetsamReport(at=at.astimezone(UTC), killed=tuple(names)[:_MAX_NAMES])


def _victims(tree: Mapping[str, object]) -> Iterator[str]:
    processes = tree.get("processes")
    for one in processes if isinstance(processes, list) else ():
        # Only a process that was killed has a reason.
        if isinstance(one, dict) and one.get("reason") and isinstance(one.get("name"), str):
            yield one["name"][:64]
