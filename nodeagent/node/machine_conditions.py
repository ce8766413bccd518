"""The conditions of a node's machine, computed from its readings: memory, disk, heat, restart. Pure.

A condition has two thresholds: it becomes true at one, and false only beyond the other. A part that cannot be read keeps
its condition for a minute; then the condition becomes Unknown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from machinery.state_disk import is_almost_full, least_free_bytes
from nodeagent.hardware.macos import gpu_memory_limit
from nodeagent.hardware.readings import (
    DiskReading,
    HeatReading,
    MachineReading,
    MemoryPressure,
    MemoryReading,
    PowerSource,
    RebootReading,
)
from nodeagent.node.leaked_resources import RebootReason
from schemas.meta import Condition, ConditionStatus, find_condition, is_true, with_condition
from schemas.node import KernelPanic, MemoryLimitSource, WiredLimit
from schemas.quantity import show

_GIB: Final = 2**30
_SMALL_STEP_BELOW = 20 * _GIB


def quantize_free_bytes(size_bytes: int, *, shown: int | None) -> int:
    """Return the free space to report: a multiple of 1 GiB below 20 GiB, of 10 GiB above.

    The reported value stays until the size leaves its step by a quarter of one: every write wakes all watchers.
    """
    if shown is not None:
        # Downwards the margin is that of the lower step: near the end of a disk a GiB matters.
        margin_below = _free_space_step(min(size_bytes, shown)) // 4
        margin_above = _free_space_step(shown) // 4
        if shown - margin_below <= size_bytes < shown + _free_space_step(shown) + margin_above:
            return shown
    return size_bytes - size_bytes % _free_space_step(size_bytes)


def _free_space_step(size_bytes: int) -> int:
    return _GIB if size_bytes < _SMALL_STEP_BELOW else 10 * _GIB


MEMORY_PRESSURE: Final = "MemoryPressure"
DISK_PRESSURE: Final = "DiskPressure"
THERMAL_PRESSURE: Final = "ThermalPressure"
NEEDS_REBOOT: Final = "NeedsReboot"
CONDITION_TYPES: Final = (MEMORY_PRESSURE, DISK_PRESSURE, THERMAL_PRESSURE, NEEDS_REBOOT)
"""The conditions that each node has, and that the next run of the agent continues."""
CABLES_UNSTABLE: Final = "CablesUnstable"
"""Only a node whose cables are or were unstable has it; the next run of the agent counts anew."""
KERNEL_PANICS: Final = "KernelPanics"
"""Only a Mac that panicked repeatedly has it."""

MEMORY_STRANDED: Final = "MemoryStranded"

# A single failure of a command means nothing; failures for this long make the condition Unknown.
_UNREADABLE_AFTER: Final = timedelta(seconds=60)
# A core that was just throttled will be throttled again: heat decreases slowly.
_COOLING_TIME: Final = timedelta(seconds=60)
_COOLER_CELSIUS: Final = 5.0
# An engine of 370 GB took 4 s to release its memory at its end; none takes this long.
_UNWIRE_TIME: Final = timedelta(seconds=60)
# A DHCP that fails on a cable takes the address and gives another one each half hour (exo#2067). A person who plugs
# cables makes changes within minutes, and then none.
_CHANGES_TIME: Final = timedelta(hours=2)
_MANY_CHANGES, _FEW_CHANGES = 4, 1
# Macs that panic under MLX do so again within hours (mlx#3346: nine panics in six days).
_PANICS_TIME: Final = timedelta(hours=72)
_MANY_PANICS: Final = 2
# An owner that only reads the screen is active, too.
_OWNER_ACTIVE_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineHistory:
    """The conditions so far, and the values with which the next reading is compared."""

    conditions: tuple[Condition, ...] = ()
    unread_since: Mapping[str, datetime] = field(default_factory=dict)
    """The parts that could not be read at the last reading, and since when."""
    throttle_count: int | None = None
    was_throttled: bool = False
    """True if cores were throttled between the last two readings."""
    hot_at: datetime | None = None
    """The last time at which it was too warm."""
    wired_since: datetime | None = None
    """The time since which much memory is wired although no engine runs."""
    excess_since: datetime | None = None
    """The time since which more than usual is wired although no engine runs."""
    excess_wired_bytes: int = 0
    """Memory beyond the usual that others wired, in steps of 1 GiB: models cannot have it."""
    disk_bytes: int = 0
    disk_free_bytes: int | None = None
    """In coarse steps; None before the first reading."""
    power: PowerSource = "Unknown"
    is_owner_active: bool = False
    is_in_meeting: bool = False
    is_lid_shut: bool = False
    wakes_on_lan: bool | None = None
    runs_etcd: bool = False
    cable_addresses: frozenset[tuple[str, str]] | None = None
    """Interface and address of each cable; None before the first reading."""
    cable_changes: tuple[datetime, ...] = ()
    """The times of their last changes."""
    panics: tuple[KernelPanic, ...] = ()
    """The newest kernel panics."""
    wired_limit: WiredLimit | None = None
    """As at the last reading that had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionVerdict:
    """The result of one reading for one condition."""

    holds: bool | None
    """None: this machine cannot know."""
    reason: str
    message: str
    is_lasting: bool = False
    """True if the first message stays as long as the reason does, because its figures change all the time."""


def unreadable_parts(reading: MachineReading) -> tuple[str, ...]:
    """Return the parts of the reading that could not be read."""
    parts = {
        MEMORY_PRESSURE: reading.memory,
        DISK_PRESSURE: reading.disk,
        THERMAL_PRESSURE: reading.heat,
        NEEDS_REBOOT: reading.reboot,
        "power": None if reading.power == "Unknown" else reading.power,
        "owner": reading.owner_idle_s,
        "meeting": reading.is_in_meeting,
        "lid": reading.is_lid_shut,
    }
    return tuple(name for name, part in parts.items() if part is None)


def is_expired(part: str, past: MachineHistory, now: datetime) -> bool:
    """Return whether the part could not be read for so long that its last value is void."""
    since = past.unread_since.get(part)
    return since is not None and now - since >= _UNREADABLE_AFTER


def next_history(
    reading: MachineReading,
    past: MachineHistory,
    now: datetime,
    *,
    has_engines: bool,
    reboot_reason: RebootReason | None = None,
) -> MachineHistory:
    """Return the conditions after this reading.

    `has_engines` says whether engines run here, or may run, so that wired memory is normal; `reboot_reason` is a reason
    that engines caused.
    """
    after = _remember(reading, past, now, has_engines=has_engines)
    verdicts = _verdicts(reading, after, now, has_engines=has_engines)
    if reboot_reason is not None:
        verdicts[NEEDS_REBOOT] = ConditionVerdict(
            holds=True, reason=reboot_reason.reason, message=reboot_reason.message, is_lasting=True
        )
    conditions = past.conditions
    for type_ in CONDITION_TYPES:
        condition = _new_condition(type_, verdicts.get(type_), after, now)
        if condition is not None:
            conditions = with_condition(conditions, condition)
    rare = {
        CABLES_UNSTABLE: _cables_verdict(after, was=is_true(past.conditions, CABLES_UNSTABLE)),
        KERNEL_PANICS: _panics_verdict(after, now, was=is_true(past.conditions, KERNEL_PANICS)),
    }
    for type_, verdict in rare.items():
        condition = None if verdict is None else _new_condition(type_, verdict, after, now)
        conditions = conditions if condition is None else with_condition(conditions, condition)
    return replace(after, conditions=conditions)


def _verdicts(
    reading: MachineReading, past: MachineHistory, now: datetime, *, has_engines: bool
) -> dict[str, ConditionVerdict]:
    """Return the results of the parts that could be read."""
    was = {type_: is_true(past.conditions, type_) for type_ in CONDITION_TYPES}
    condition_verdicts: dict[str, ConditionVerdict] = {}
    if reading.memory is not None:
        condition_verdicts[MEMORY_PRESSURE] = _memory_verdict(
            reading.memory, was=was[MEMORY_PRESSURE]
        )
    if reading.disk is not None:
        condition_verdicts[DISK_PRESSURE] = _disk_verdict(
            reading.disk, reading.state_disk, past, was=was[DISK_PRESSURE]
        )
    if reading.heat is not None:
        condition_verdicts[THERMAL_PRESSURE] = _heat_verdict(
            reading.heat, past, now, was=was[THERMAL_PRESSURE]
        )
    if reading.reboot is not None:
        condition_verdicts[NEEDS_REBOOT] = _reboot_verdict(
            reading.reboot, past, now, has_engines=has_engines
        )
    return condition_verdicts


def _was_stranded(past: MachineHistory) -> bool:
    before = find_condition(past.conditions, NEEDS_REBOOT)
    return (
        before is not None
        and before.status is ConditionStatus.TRUE
        and before.reason == MEMORY_STRANDED
    )


def _remember(
    reading: MachineReading, past: MachineHistory, now: datetime, *, has_engines: bool
) -> MachineHistory:
    heat, reboot = reading.heat, reading.reboot
    after = replace(
        past,
        unread_since={part: past.unread_since.get(part, now) for part in unreadable_parts(reading)},
    )
    if heat is not None:
        grew = past.throttle_count is not None and heat.throttle_count > past.throttle_count
        # A single burst throttles a core for a moment; two readings in a row mean heat.
        is_hot = heat.throttled or (grew and past.was_throttled) or _is_above_limit(heat)
        after = replace(
            after,
            throttle_count=heat.throttle_count,
            was_throttled=grew,
            hot_at=now if is_hot else past.hot_at,
        )
    if reboot is not None:
        is_wired = (
            not has_engines and reboot.wired_bytes >= stranded_thresholds(reboot.total_bytes)[1]
        )
        after = replace(after, wired_since=(past.wired_since or now) if is_wired else None)
        if not has_engines:  # while one runs, its memory cannot be told from that of others
            after = _remember_excess(reboot, after, now)
    if reading.disk is not None:
        free = quantize_free_bytes(reading.disk.free_bytes, shown=past.disk_free_bytes)
        after = replace(after, disk_bytes=reading.disk.total_bytes, disk_free_bytes=free)
    if reading.fabric is not None:
        # Update the addresses of the cables and the times of their changes.
        ports = {port.interface for port in reading.fabric.ports if port.interface}
        found = frozenset(
            (interface.name, interface.address)
            for interface in reading.fabric.interfaces
            if interface.name in ports
        )
        recent = [at for at in after.cable_changes if now - at < _CHANGES_TIME]
        if after.cable_addresses is not None and found != after.cable_addresses:
            recent.append(now)
        after = replace(after, cable_addresses=found, cable_changes=tuple(recent[-_MANY_CHANGES:]))
    after = replace(
        after,
        wired_limit=reading.wired_limit or past.wired_limit,
        panics=past.panics if reading.panics is None else reading.panics,
        wakes_on_lan=past.wakes_on_lan if reading.wakes_on_lan is None else reading.wakes_on_lan,
        runs_etcd=past.runs_etcd if reading.runs_etcd is None else reading.runs_etcd,
    )
    # Update power and owner; replicas may be moved because of them, so one failed command must not
    # change them.
    power, idle_s = reading.power, reading.owner_idle_s
    if power == "Unknown" and not is_expired("power", after, now):
        power = after.power
    is_active = idle_s is not None and idle_s < _OWNER_ACTIVE_S
    if idle_s is None and not is_expired("owner", after, now):
        is_active = after.is_owner_active
    is_in_meeting, is_lid_shut = reading.is_in_meeting, reading.is_lid_shut
    if is_in_meeting is None:
        is_in_meeting = after.is_in_meeting and not is_expired("meeting", after, now)
    if is_lid_shut is None:
        is_lid_shut = after.is_lid_shut and not is_expired("lid", after, now)
    return replace(
        after,
        power=power,
        is_owner_active=is_active,
        is_in_meeting=is_in_meeting,
        is_lid_shut=is_lid_shut,
    )


def _cables_verdict(past: MachineHistory, *, was: bool) -> ConditionVerdict | None:
    """Return the result for the addresses of cables; None as long as they were always stable."""
    count = len(past.cable_changes)
    if count >= _MANY_CHANGES or (was and count > _FEW_CHANGES):
        names = ", ".join(sorted({name for name, _ in past.cable_addresses or ()})) or "no cable"
        message = (
            f"the addresses of its cables changed {_MANY_CHANGES} times within two hours ({names} has one now): "
            "set them by hand instead of DHCP, with another network for each cable"
        )
        return ConditionVerdict(
            holds=True, reason="AddressesChange", message=message, is_lasting=True
        )
    if was:
        return ConditionVerdict(holds=False, reason="AddressesStable", message="")
    return None


def recent_panics(panics: Iterable[KernelPanic], now: datetime) -> tuple[KernelPanic, ...]:
    """Return the panics of the last three days."""
    return tuple(panic for panic in panics if now - panic.at < _PANICS_TIME)


def are_many(panics: Iterable[KernelPanic], now: datetime) -> bool:
    """Return whether the Mac panics so often that engines must not wire memory."""
    return len(recent_panics(panics, now)) >= _MANY_PANICS


def _panics_verdict(past: MachineHistory, now: datetime, *, was: bool) -> ConditionVerdict | None:
    """Return the result for kernel panics; None as long as there were few."""
    recent = recent_panics(past.panics, now)
    if are_many(recent, now):
        message = (
            f"the kernel panicked {len(recent)} times within three days, last at {recent[0].at:%Y-%m-%d %H:%M} UTC: "
            f"{recent[0].text or 'the agent may not read the report'}. New engines start with memory.wired Off"
        )
        return ConditionVerdict(holds=True, reason="PanicsRepeatedly", message=message)
    if was:
        return ConditionVerdict(holds=False, reason="NoMorePanics", message="")
    return None


def _remember_excess(reboot: RebootReading, past: MachineHistory, now: datetime) -> MachineHistory:
    """Update the memory that others wired, once it has been wired for longer than an engine takes to release its own."""
    excess = reboot.wired_bytes - stranded_thresholds(reboot.total_bytes)[0]
    if excess <= 0:
        return replace(past, excess_since=None, excess_wired_bytes=0)
    since = past.excess_since or now
    after = replace(past, excess_since=since)
    # A small change is no reason to write: every write wakes all watchers.
    if now - since < _UNWIRE_TIME or -_GIB // 2 < past.excess_wired_bytes - excess <= _GIB:
        return after
    return replace(after, excess_wired_bytes=-(-excess // _GIB) * _GIB)


def memory_limit(
    configured: int,
    memory_bytes: int,
    limit: WiredLimit | None,
    recommended_bytes: int,
    *,
    is_chosen: bool,
) -> tuple[int, MemoryLimitSource]:
    """Return the memory for models, and its origin, after a verdict of Metal or a change of the wired limit.

    `recommended_bytes` is Metal's default, 0 if unknown. `is_chosen` says that a person chose the configured memory
    (`--memory`): then only a wired limit below it counts.
    """
    wired_mb = None if limit is None else limit.mebibytes
    effective, source = gpu_memory_limit(memory_bytes, wired_mb, recommended_bytes)
    if is_chosen and (not wired_mb or configured <= effective):
        return configured, MemoryLimitSource.CHOSEN
    return effective, source


def allocatable_bytes(configured: int, recommended: int, past: MachineHistory) -> int:
    """Return the memory for models: the configured one, as far as what others wired leaves it."""
    left = max(configured, recommended) - past.excess_wired_bytes
    return max(0, min(configured, left))


def _new_condition(
    type_: str, verdict: ConditionVerdict | None, past: MachineHistory, now: datetime
) -> Condition | None:
    """Return the new condition; None if it stays as it was, because its part could not be read."""
    before = find_condition(past.conditions, type_)
    if verdict is None:
        is_known = before is not None and before.status is not ConditionStatus.UNKNOWN
        if is_known and not is_expired(type_, past, now):
            return None
        verdict = ConditionVerdict(
            holds=None,
            reason="NotReadable",
            message="this part of the machine cannot be read; the agent's log names the failed parts",
        )
    truth = {
        True: ConditionStatus.TRUE,
        False: ConditionStatus.FALSE,
        None: ConditionStatus.UNKNOWN,
    }[verdict.holds]
    is_same = before is not None and (before.status, before.reason) == (truth, verdict.reason)
    message = before.message if before and is_same and verdict.is_lasting else verdict.message
    return Condition(
        type=type_,
        status=truth,
        reason=verdict.reason,
        message=message,
        last_transition_time=now,
    )


def _memory_verdict(seen: MemoryReading, *, was: bool) -> ConditionVerdict:
    if not _is_memory_short(seen, was=was):
        return ConditionVerdict(
            holds=False, reason="EnoughMemory", message="programs get the memory that they request"
        )
    left = f"{show(seen.available_bytes)} of {show(seen.total_bytes)} were free when this began"
    why = left
    if seen.level is not None:
        why = f"macOS reports critical memory pressure; {left}"
    elif seen.stalled_percent >= 10:
        why = f"programs waited for memory for {seen.stalled_percent:.0f} % of a minute; {left}"
    return ConditionVerdict(
        holds=True,
        reason="MemoryShort",
        message=f"{why}. Close programs that are not needed on this machine, or move its replicas away (fleetctl drain)",
        is_lasting=True,
    )


def _is_memory_short(seen: MemoryReading, *, was: bool) -> bool:
    if seen.level is not None:
        # A warning is normal on a Mac with a model: it neither begins nor ends the condition.
        return seen.level is MemoryPressure.CRITICAL or (
            was and seen.level is MemoryPressure.WARNING
        )
    percent, stalled = (10, 10.0) if was else (5, 20.0)
    return (
        100 * seen.available_bytes < percent * seen.total_bytes or seen.stalled_percent >= stalled
    )


def _disk_verdict(
    seen: DiskReading, state: DiskReading | None, past: MachineHistory, *, was: bool
) -> ConditionVerdict:
    if state is not None and is_almost_full(state.free_bytes, state.total_bytes, was=was):
        return ConditionVerdict(
            holds=True,
            reason="DiskAlmostFull",
            message=f"the disk of {state.path}, where the agent and its engines write logs and state, is almost full: "
            f"free more than {show(2 * least_free_bytes(state.total_bytes))} of its {show(state.total_bytes)}",
        )
    percent, least = (7, 8 * _GIB) if was else (5, 5 * _GIB)
    if 100 * seen.free_bytes >= percent * seen.total_bytes and seen.free_bytes >= least:
        return ConditionVerdict(
            holds=False, reason="EnoughDisk", message="there is space for more models"
        )
    # The steps of status.diskFreeBytes, so that the message alone never causes a write.
    free = show(past.disk_free_bytes) if past.disk_free_bytes else "less than 1 GiB"
    return ConditionVerdict(
        holds=True,
        reason="DiskAlmostFull",
        message=f"{free} of {show(seen.total_bytes)} are free on the disk of the models, {seen.path}. Remove unused "
        "models or files until more than 7 % and 8 GiB are free",
    )


def _is_above_limit(seen: HeatReading) -> bool:
    return seen.limit_celsius > 0 and seen.celsius >= seen.limit_celsius


def _heat_verdict(
    seen: HeatReading, past: MachineHistory, now: datetime, *, was: bool
) -> ConditionVerdict:
    if not seen.has_sensor:
        message = "this machine has no sensor that the agent can read, so heat is not detected"
        return ConditionVerdict(holds=None, reason="NoSensor", message=message)
    is_hot = past.hot_at == now
    is_cooling = past.hot_at is not None and now - past.hot_at < _COOLING_TIME
    is_warm = seen.limit_celsius > 0 and seen.celsius > seen.limit_celsius - _COOLER_CELSIUS
    if not is_hot and not (was and (is_cooling or is_warm)):
        return ConditionVerdict(holds=False, reason="CoolEnough", message="heat slows nothing down")
    why = seen.throttled
    if not why and seen.limit_celsius > 0:
        why = f"{seen.hottest} was at {seen.celsius:.0f} °C; the machine slows down at {seen.limit_celsius:.0f} °C"
    return ConditionVerdict(
        holds=True,
        reason="TooWarm",
        message=f"{why or 'the processor is throttled repeatedly'}. Cool this machine, or reduce its load",
        is_lasting=True,
    )


def stranded_thresholds(total_bytes: int) -> tuple[int, int]:
    """Return the wired bytes that are normal without an engine, and the bytes from which on they are too many.

    macOS wires 2 to 4 GiB for itself, and more on larger machines. The share is an estimate, wide enough that no healthy
    machine is reported; see docs/operations/nodes.md.
    """
    return (
        4 * _GIB + total_bytes // 20,
        4 * _GIB + total_bytes // 10,
    )


def _reboot_verdict(
    seen: RebootReading, past: MachineHistory, now: datetime, *, has_engines: bool
) -> ConditionVerdict:
    low, high = stranded_thresholds(seen.total_bytes)
    # While an engine runs, its memory cannot be told from stranded memory: the condition stays as it was.
    is_stranded = _was_stranded(past) and seen.wired_bytes >= low
    if not has_engines and past.wired_since is not None and seen.wired_bytes >= high:
        is_stranded = is_stranded or now - past.wired_since >= _UNWIRE_TIME
    if is_stranded:
        message = (
            f"{show(seen.wired_bytes)} of {show(seen.total_bytes)} stay wired although no engine of the fleet runs: "
            "a killed engine stranded them, or another program (Ollama, LM Studio) holds them. "
            "Quit that program, or run `fleetctl node reboot NAME --drain`"
        )
        return ConditionVerdict(
            holds=True, reason=MEMORY_STRANDED, message=message, is_lasting=True
        )
    if seen.wanted_by:
        message = (
            f"an update waits for a restart ({seen.wanted_by}): `fleetctl node reboot NAME --drain`"
        )
        return ConditionVerdict(holds=True, reason="UpdateWaiting", message=message)
    return ConditionVerdict(holds=False, reason="NothingWaits", message="")
