"""What a node says of its machine: conditions out of readings. Pure.

A condition has two marks: it becomes true at one, and false again only beyond the other. What could not be
read leaves it as it was for a minute, and then makes it Unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from nodeagent import coarse
from nodeagent.breakage import Broken
from nodeagent.hardware.memory import Pressure
from nodeagent.hardware.readings import Disk, Heat, Memory, Power, Reading, Reboot
from schemas.meta import Condition, Truth, find_condition, is_true, with_condition
from schemas.quantity import show

MEMORY: Final = "MemoryPressure"
DISK: Final = "DiskPressure"
HEAT: Final = "ThermalPressure"
REBOOT: Final = "NeedsReboot"
TYPES: Final = (MEMORY, DISK, HEAT, REBOOT)

STRANDED: Final = "MemoryStranded"

_GIB: Final = 2**30
# A command that fails now and then is no news; one that has failed for this long is.
_UNREAD: Final = timedelta(seconds=60)
# A core that was slowed down a moment ago will be again: heat goes slowly.
_COOLING: Final = timedelta(seconds=60)
_COOLER_CELSIUS: Final = 5.0
# An engine of 370 GB took 4 s to give its memory back when it ended; nothing takes this long.
_UNWIRING: Final = timedelta(seconds=60)
# Who reads what is on the screen is there, too.
_OWNER_TAIL_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What was held to be true so far, and what the next reading has to be compared with."""

    conditions: tuple[Condition, ...] = ()
    unread_since: Mapping[str, datetime] = field(default_factory=dict)
    """The parts that could not be read the last time, and since when."""
    throttle_count: int | None = None
    was_throttled: bool = False
    """Whether cores were slowed down between the last two readings."""
    hot_at: datetime | None = None
    """When it was last too warm."""
    wired_since: datetime | None = None
    """Since when much memory has been wired though no engine runs."""
    disk_bytes: int = 0
    disk_free_bytes: int | None = None
    """In coarse steps; None before the first reading."""
    power: Power = "Unknown"
    is_owner_active: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one reading says of one condition."""

    holds: bool | None
    """None: this machine has no way to know."""
    reason: str
    message: str
    is_lasting: bool = False
    """Whether the first message stays for as long as the reason does: its figures move all the time."""


def unread(reading: Reading) -> tuple[str, ...]:
    """Return the parts of the reading that could not be read."""
    parts = {
        MEMORY: reading.memory,
        DISK: reading.disk,
        HEAT: reading.heat,
        REBOOT: reading.reboot,
        "power": None if reading.power == "Unknown" else reading.power,
        "owner": reading.owner_idle_s,
    }
    return tuple(name for name, part in parts.items() if part is None)


def is_lost(part: str, past: Past, now: datetime) -> bool:
    """Return whether the part could not be read for so long that what was known of it is void."""
    since = past.unread_since.get(part)
    return since is not None and now - since >= _UNREAD


def judge(
    reading: Reading,
    past: Past,
    now: datetime,
    *,
    has_engines: bool,
    broken: Broken | None = None,
) -> Past:
    """Return what is true after this reading.

    `has_engines` says whether engines run here, or may run, whose memory is wired rightly; `broken` what engines
    left behind.
    """
    after = _remember(reading, past, now, has_engines=has_engines)
    verdicts = _verdicts(reading, after, now, has_engines=has_engines)
    if broken is not None:
        verdicts[REBOOT] = Verdict(
            holds=True, reason=broken.reason, message=broken.message, is_lasting=True
        )
    conditions = past.conditions
    for type_ in TYPES:
        said = _said(type_, verdicts.get(type_), after, now)
        if said is not None:
            conditions = with_condition(conditions, said)
    return replace(after, conditions=conditions)


def _verdicts(
    reading: Reading, past: Past, now: datetime, *, has_engines: bool
) -> dict[str, Verdict]:
    """Return what the parts that could be read say."""
    was = {type_: is_true(past.conditions, type_) for type_ in TYPES}
    found: dict[str, Verdict] = {}
    if reading.memory is not None:
        found[MEMORY] = _memory(reading.memory, was=was[MEMORY])
    if reading.disk is not None:
        found[DISK] = _disk(reading.disk, past, was=was[DISK])
    if reading.heat is not None:
        found[HEAT] = _heat(reading.heat, past, now, was=was[HEAT])
    if reading.reboot is not None:
        found[REBOOT] = _reboot(reading.reboot, past, now, has_engines=has_engines)
    return found


def _was_stranded(past: Past) -> bool:
    before = find_condition(past.conditions, REBOOT)
    return before is not None and before.status is Truth.TRUE and before.reason == STRANDED


def _remember(reading: Reading, past: Past, now: datetime, *, has_engines: bool) -> Past:
    heat, reboot = reading.heat, reading.reboot
    after = replace(
        past, unread_since={part: past.unread_since.get(part, now) for part in unread(reading)}
    )
    if heat is not None:
        grew = past.throttle_count is not None and heat.throttle_count > past.throttle_count
        # A single burst slows a core down for a blink; twice in a row is heat.
        is_hot = heat.throttled or (grew and past.was_throttled) or _is_over(heat)
        after = replace(
            after,
            throttle_count=heat.throttle_count,
            was_throttled=grew,
            hot_at=now if is_hot else past.hot_at,
        )
    if reboot is not None:
        is_wired = not has_engines and reboot.wired_bytes >= stranded_marks(reboot.total_bytes)[1]
        after = replace(after, wired_since=(past.wired_since or now) if is_wired else None)
    if reading.disk is not None:
        free = coarse.free_space(reading.disk.free_bytes, shown=past.disk_free_bytes)
        after = replace(after, disk_bytes=reading.disk.total_bytes, disk_free_bytes=free)
    return _remember_owner(reading, after, now)


def _remember_owner(reading: Reading, past: Past, now: datetime) -> Past:
    """Note power and owner; replicas may be moved because of them, so one failed command counts for nothing."""
    power, idle_s = reading.power, reading.owner_idle_s
    if power == "Unknown" and not is_lost("power", past, now):
        power = past.power
    is_active = idle_s is not None and idle_s < _OWNER_TAIL_S
    if idle_s is None and not is_lost("owner", past, now):
        is_active = past.is_owner_active
    return replace(past, power=power, is_owner_active=is_active)


def _said(type_: str, verdict: Verdict | None, past: Past, now: datetime) -> Condition | None:
    """Return the condition as it is now; None if it stays as it was, for want of a reading."""
    before = find_condition(past.conditions, type_)
    if verdict is None:
        is_known = before is not None and before.status is not Truth.UNKNOWN
        if is_known and not is_lost(type_, past, now):
            return None
        verdict = Verdict(
            holds=None,
            reason="NotReadable",
            message="this machine does not say; the agent's log names what could not be read",
        )
    truth = {True: Truth.TRUE, False: Truth.FALSE, None: Truth.UNKNOWN}[verdict.holds]
    is_same = before is not None and (before.status, before.reason) == (truth, verdict.reason)
    message = before.message if before and is_same and verdict.is_lasting else verdict.message
    return Condition(
        type=type_,
        status=truth,
        reason=verdict.reason,
        message=message,
        last_transition_time=now,
    )


def _memory(seen: Memory, *, was: bool) -> Verdict:
    if not _is_short(seen, was=was):
        return Verdict(
            holds=False, reason="EnoughMemory", message="programs get the memory they ask for"
        )
    left = f"{show(seen.available_bytes)} of {show(seen.total_bytes)} were left when this began"
    why = left
    if seen.level is not None:
        why = f"macOS reports critical memory pressure; {left}"
    elif seen.stalled_percent >= 10:
        why = f"programs waited for memory {seen.stalled_percent:.0f} % of a minute; {left}"
    return Verdict(
        holds=True,
        reason="MemoryShort",
        message=f"{why}. Close what is not needed on this machine, or move replicas away (fleetctl drain)",
        is_lasting=True,
    )


def _is_short(seen: Memory, *, was: bool) -> bool:
    if seen.level is not None:
        # A warning is everyday life on a Mac with a model: it neither begins nor ends anything.
        return seen.level is Pressure.CRITICAL or (was and seen.level is Pressure.WARNING)
    percent, stalled = (10, 10.0) if was else (5, 20.0)
    return (
        100 * seen.available_bytes < percent * seen.total_bytes or seen.stalled_percent >= stalled
    )


def _disk(seen: Disk, past: Past, *, was: bool) -> Verdict:
    percent, least = (7, 8 * _GIB) if was else (5, 5 * _GIB)
    if 100 * seen.free_bytes >= percent * seen.total_bytes and seen.free_bytes >= least:
        return Verdict(holds=False, reason="EnoughDisk", message="there is room for more models")
    # The same steps as in status.diskFreeBytes, so that no write is made for the message alone.
    free = show(past.disk_free_bytes) if past.disk_free_bytes else "less than 1 GiB"
    return Verdict(
        holds=True,
        reason="DiskAlmostFull",
        message=f"{free} of {show(seen.total_bytes)} are free on the disk that holds models. Remove models or "
        "files that nobody needs, until more than 7 % and 8 GiB are free",
    )


def _is_over(seen: Heat) -> bool:
    return seen.limit_celsius > 0 and seen.celsius >= seen.limit_celsius


def _heat(seen: Heat, past: Past, now: datetime, *, was: bool) -> Verdict:
    if not seen.has_sensor:
        message = "this machine has no sensor that the agent can read, so heat would not be noticed"
        return Verdict(holds=None, reason="NoSensor", message=message)
    is_hot = past.hot_at == now
    is_cooling = past.hot_at is not None and now - past.hot_at < _COOLING
    is_warm = seen.limit_celsius > 0 and seen.celsius > seen.limit_celsius - _COOLER_CELSIUS
    if not is_hot and not (was and (is_cooling or is_warm)):
        return Verdict(holds=False, reason="CoolEnough", message="nothing is slowed down by heat")
    why = seen.throttled
    if not why and seen.limit_celsius > 0:
        why = f"{seen.hottest} was at {seen.celsius:.0f} °C, and slows down at {seen.limit_celsius:.0f} °C"
    return Verdict(
        holds=True,
        reason="TooWarm",
        message=f"{why or 'the processor is slowed down again and again'}. Give this machine air, or less to do",
        is_lasting=True,
    )


def stranded_marks(total_bytes: int) -> tuple[int, int]:
    """Return how much wired memory is normal without an engine, and from where on it is too much.

    macOS wires some 2 to 4 GiB for itself, and more on larger machines. The share is a guess of ours, wide
    enough that no machine which is well is called broken; see docs/operations/nodes.md.
    """
    return 4 * _GIB + total_bytes // 20, 4 * _GIB + total_bytes // 10


def _reboot(seen: Reboot, past: Past, now: datetime, *, has_engines: bool) -> Verdict:
    low, high = stranded_marks(seen.total_bytes)
    # While an engine runs nobody can tell its memory from stranded memory: then it is as it was.
    is_stranded = _was_stranded(past) and seen.wired_bytes >= low
    if not has_engines and past.wired_since is not None and seen.wired_bytes >= high:
        is_stranded = is_stranded or now - past.wired_since >= _UNWIRING
    if is_stranded:
        message = (
            f"{show(seen.wired_bytes)} of {show(seen.total_bytes)} stay wired though no engine of the fleet runs: "
            "an engine was killed and left them behind, or another program (Ollama, LM Studio) holds them. "
            "Quit that program, or restart this machine"
        )
        return Verdict(holds=True, reason=STRANDED, message=message, is_lasting=True)
    if seen.wanted_by:
        message = (
            f"an update waits for a restart ({seen.wanted_by}). Drain this node (fleetctl drain), "
            "restart the machine, and uncordon the node"
        )
        return Verdict(holds=True, reason="UpdateWaiting", message=message)
    return Verdict(holds=False, reason="NothingWaits", message="")
