"""Rules that hold a node back from new replicas, and say whether its replicas should leave. Pure.

Each rule is a function from the node's documents to a Rejection or None; the first hold is the one that messages show.
A hold keeps new replicas away; only the holds in `_REASONS_TO_LEAVE` move replicas elsewhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from machinery.version import is_compatible, parse_release
from reconciler.nodes.liveness import Flapping
from reconciler.placement.inputs import Rejection
from schemas import quantity
from schemas.meta import Condition, ConditionStatus, find_condition, is_true
from schemas.node import Node, NodeStatus
from schemas.pools import DailyWindow, NodePool

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
# A window comes at least once a week, or once in two weeks if clocks go forward over it.
_HORIZON: Final = timedelta(days=16)
_MINUTE: Final = timedelta(minutes=1)


def is_within(hours: DailyWindow, now: datetime) -> bool:
    """Return whether `now` is inside the window."""
    local = now.astimezone(ZoneInfo(hours.time_zone))
    clock, today = local.time().isoformat("minutes"), local.date()
    if hours.start < hours.end:
        return hours.start <= clock < hours.end and _begins_on(hours, today)
    if clock >= hours.start and _begins_on(hours, today):
        return True
    return clock < hours.end and _begins_on(hours, today - timedelta(days=1))


def _begins_on(hours: DailyWindow, day: date) -> bool:
    return not hours.days or _DAYS[day.weekday()] in hours.days


def next_change(hours: DailyWindow, now: datetime) -> datetime | None:
    """Return when the window next begins or ends; None if it never does."""
    was = is_within(hours, now)
    first = now.astimezone(ZoneInfo(hours.time_zone)).date() - timedelta(days=1)
    instants = (
        at
        for number in range(_HORIZON.days + 1)
        for at in _instants(hours, first + timedelta(days=number))
    )
    return next((at for at in sorted(instants) if at > now and is_within(hours, at) != was), None)


def _instants(hours: DailyWindow, day: date) -> Iterator[datetime]:
    """Yield the instants of a day at which the answer may change: both ends of the window, and a clock change."""
    zone = ZoneInfo(hours.time_zone)
    for text in (hours.start, hours.end):
        for fold in (0, 1):
            wall = datetime.combine(day, time.fromisoformat(text).replace(fold=fold), zone)
            yield wall.astimezone(UTC)
    yield from _clock_change(day, zone)


def _clock_change(day: date, zone: ZoneInfo) -> Iterator[datetime]:
    """Yield the minute of that day at which the zone's offset changes, if it does."""
    low = datetime.combine(day, time(), zone).astimezone(UTC)
    high = datetime.combine(day + timedelta(days=1), time(), zone).astimezone(UTC)

    def offset(at: datetime) -> timedelta | None:
        return at.astimezone(zone).utcoffset()

    before = offset(low)
    if offset(high) == before:
        return
    while high - low > _MINUTE:
        middle = low + (high - low) // _MINUTE // 2 * _MINUTE
        low, high = (middle, high) if offset(middle) == before else (low, middle)
    yield high


def quiet_until(windows: Sequence[DailyWindow], now: datetime) -> tuple[datetime, str] | None:
    """Return when quiet hours end, and the time zone for it; `now` outside of them, None if no end is in sight."""
    until, zone = now, "UTC"
    while until - now < _HORIZON:
        active = [window for window in windows if is_within(window, until)]
        if not active:
            return until, zone
        ends = [
            (end, replica.time_zone) for replica in active if (end := next_change(replica, until))
        ]
        if len(ends) < len(active):
            return None
        until, zone = max(ends)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietCalendar:
    """The pools that are in quiet hours, and how long that holds."""

    quiet: dict[str, str]
    """Message by name of a pool in quiet hours."""
    since: datetime
    until: datetime | None
    """The time at which the calendar must be computed again; None if no pool has quiet hours."""

    def holds(self, now: datetime) -> bool:
        """Return whether the calendar is valid at `now`; it is not after the clock was set back."""
        return self.since <= now and (self.until is None or now < self.until)


def quiet_calendar(pools: Iterable[NodePool], now: datetime) -> QuietCalendar:
    """Return which of the pools are in quiet hours at `now`."""
    quiet: dict[str, str] = {}
    changes: list[datetime] = []
    for pool in pools:
        windows = pool.spec.policy.quiet_hours if pool.spec.policy else ()
        # A window without a change is checked again after the horizon of the search.
        changes.extend(next_change(window, now) or now + _HORIZON for window in windows)
        if any(is_within(hours, now) for hours in windows):
            quiet[pool.name] = f"quiet hours{_end_text(quiet_until(windows, now))}"
    return QuietCalendar(quiet=quiet, since=now, until=min(changes, default=None))


def _end_text(until: tuple[datetime, str] | None) -> str:
    if until is None:
        return " that do not end"
    at, zone = until
    return f" until {at.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M} {zone}"


MLX_LM: Final = "0.32"
"""The mlx-lm that the memory rules were tested with (pyproject.toml pins it, models/cache_rules.py has them)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedPart:
    """One part of a fleet and its version."""

    label: str
    """Such as `gateway g`, or `its agent` in a message of the node."""
    version: str
    upgrade: str = ""
    """The part to upgrade; the label if empty."""


def skew_text(part: VersionedPart, other: VersionedPart) -> str:
    """Describe how far two parts are apart, and which one to upgrade; empty if they may work together."""
    theirs, ours = parse_release(part.version), parse_release(other.version)
    if theirs is None or ours is None or is_compatible(part.version, other.version):
        return ""  # a checkout and a foreign program have no release
    older = part if theirs < ours else other
    return (
        f"{part.label} is {part.version}, {other.label} is {other.version}; they may differ by one minor version: "
        f"upgrade {older.upgrade or older.label}"
    )


def mlx_skew_text(label: str, version: str) -> str:
    """Describe how an mlx-lm differs from the tested version; empty if it does not, or is unknown."""
    theirs = parse_release(version)
    if theirs is None or theirs == parse_release(MLX_LM):
        return ""
    return (
        f"{label} is {version}, memory proofs were tested with {MLX_LM}: install mlx-lm {MLX_LM} there. Until then "
        "replicas may take more memory than proven"
    )


# The agent's conditions that keep new replicas away.
_PRESSURES: Final = ("MemoryPressure", "DiskPressure", "ThermalPressure", "NeedsReboot")
# Pressure is no reason to leave: replicas stay within their proof, so another program causes it, and it may be over
# before another Mac has loaded the model.
_REASONS_TO_LEAVE: Final = {"NodeWithheld": "withheld"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The inputs for the state of a node besides its own documents."""

    pools: tuple[NodePool, ...]
    """Pools that contain the node."""
    calendar: QuietCalendar
    version: str
    """Version of the reconciler."""
    flapping: Flapping | None = None
    """Set while the node is held back for flapping."""
    asleep: Condition | None = None
    """The condition Asleep of a Mac that may sleep."""
    peers: tuple[Node, ...] = ()
    """Other nodes that report the same hardware UUID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The state of a node, as placement and its status need it."""

    holds: tuple[Rejection, ...]
    leave_reason: str
    """Reason to move replicas elsewhere; empty if they may stay."""
    skew: str
    """Version difference, whether it holds the node back or not; empty if there is none."""

    def hold(self, reason: str) -> Rejection | None:
        """Return the hold with that reason."""
        return next((replica for replica in self.holds if replica.reason == reason), None)


def evaluate_node(node: Node, status: NodeStatus, context: NodeContext) -> NodeState:
    """Apply all rules to a node."""
    rules = (
        _draining(node),
        _withheld(status, context),
        _duplicate(node, status, context.peers),
        _skewed(status, context.version),
        _flapping(context.flapping),
        *_pressed(status),
        _metal(status),
        _disk(status, context.pools),
    )
    holds = tuple(hold for hold in rules if hold is not None)
    differs = agent_skew(status, context.version) or mlx_skew(status)
    return NodeState(holds=holds, leave_reason=_leave_reason(node, holds), skew=differs)


def _draining(node: Node) -> Rejection | None:
    if not node.spec.draining:
        return None
    message = f"it is being drained; `fleetctl uncordon {node.name}` lets new replicas in again"
    return Rejection(reason="NodeDraining", message=message)


def _withheld(status: NodeStatus, context: NodeContext) -> Rejection | None:
    if not context.pools:
        return None
    rules = [
        f"pool {pool.name}: {why}"
        for pool in context.pools
        for why in _rules(pool, status, context)
    ]
    return Rejection(reason="NodeWithheld", message="; ".join(rules)) if rules else None


def _rules(pool: NodePool, status: NodeStatus, context: NodeContext) -> Iterator[str]:
    policy = pool.spec.policy
    if policy is None:
        return
    if pool.name in context.calendar.quiet:
        yield context.calendar.quiet[pool.name]
    # A machine that reports no power source counts as one without a battery.
    if policy.mains_only and status.power == "Battery":
        yield "mainsOnly, until it runs on mains power again"
    if policy.owner_active == "Yield":
        if status.is_owner_active:
            yield "ownerActive, until its owner has been away for some minutes"
        if status.is_in_meeting:
            yield "ownerActive, until no program uses its camera or microphone"
        if status.is_lid_shut:
            yield "ownerActive, until its lid is open or an external display keeps it awake"
    if policy.after_panics == "Withhold" and is_true(status.conditions, "KernelPanics"):
        yield "afterPanics, until three days without two kernel panics have passed"


def _duplicate(node: Node, status: NodeStatus, peers: Sequence[Node]) -> Rejection | None:
    """Hold the younger of two nodes that are one machine: the older one already has replicas."""
    if not peers:
        return None
    others = [
        peer
        for peer in peers
        if peer.name != node.name
        and not (status.is_part and peer.status is not None and peer.status.is_part)
        and _age(peer) < _age(node)
    ]
    if not others:
        return None
    first = min(others, key=_age).name
    return Rejection(
        reason="DuplicateHardware",
        message=f"node {first} is the same machine (hardware UUID {status.hardware_uuid}). If this "
        f"one is a clone, give it its own identity; if the Mac was renamed, "
        f"`fleetctl delete node {first}`; for two agents on one machine, start both with --part-of-machine",
    )


def _age(node: Node) -> tuple[bool, float, str]:
    """Return a sort key, the oldest node first; a node without a spec counts as the youngest."""
    created = node.metadata.creation_timestamp
    return created is None, 0.0 if created is None else created.timestamp(), node.name


def agent_skew(status: NodeStatus, version: str) -> str:
    """Describe the difference between the agent's and the reconciler's version; empty if they are compatible."""
    return _version_skew(status.agent_version, version)


@lru_cache  # a fleet has few versions at a time
def _version_skew(agent_version: str, version: str) -> str:
    return skew_text(
        VersionedPart(label="its agent", version=agent_version, upgrade="its fleet-nodeagent"),
        VersionedPart(label="the reconciler", version=version),
    )


def mlx_skew(status: NodeStatus) -> str:
    """Describe how the node's mlx-lm differs from the tested version; empty if it does not."""
    return mlx_skew_text("its mlx-lm", status.mlx_lm_version)


def _skewed(status: NodeStatus, version: str) -> Rejection | None:
    differs = agent_skew(status, version)
    return Rejection(reason="VersionSkew", message=differs) if differs else None


def _flapping(found: Flapping | None) -> Rejection | None:
    return None if found is None else Rejection(reason="NodeFlapping", message=flap_message(found))


def flap_message(found: Flapping) -> str:
    """Describe how often the node came back, and until when it is held back."""
    return (
        f"it came back {found.returns} times in a row; held back until {_time(found.until_at)}, "
        "each time for longer"
    )


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _pressed(status: NodeStatus) -> Iterator[Rejection]:
    # All conditions are read once, and not once for each pressure: a new leader does it for every node.
    conditions = {
        condition.type: condition
        for condition in status.conditions
        if condition.status is ConditionStatus.TRUE
    }
    for type_ in _PRESSURES:
        if type_ in conditions:
            yield Rejection(
                reason=type_, message=conditions[type_].message or conditions[type_].reason
            )


def _metal(status: NodeStatus) -> Rejection | None:
    condition = find_condition(status.conditions, "MetalAvailable")
    if condition is None or condition.status is not ConditionStatus.FALSE:
        return None  # an earlier agent, or a machine without Metal, has no such condition
    return Rejection(reason="MetalUnavailable", message=condition.message or condition.reason)


def _disk(status: NodeStatus, pools: Sequence[NodePool]) -> Rejection | None:
    if not pools:
        return None
    kept = {p.name: quantity.parse(p.spec.reserved.disk) for p in pools if p.spec.reserved}
    need, have = max(kept.values(), default=0), status.disk_free_bytes
    if not status.disk_bytes or have >= need:  # an agent that reports no disk size
        return None
    pool = min(name for name, size in kept.items() if size == need)
    return Rejection(
        reason="InsufficientDisk",
        message=f"it has {quantity.show(have)} of disk free, pool {pool} reserves "
        f"{quantity.show(need)} (spec.reserved.disk)",
        need=need,
        have=have,
    )


def _leave_reason(node: Node, holds: Sequence[Rejection]) -> str:
    """Return why replicas should leave the node; a drain comes first."""
    if node.spec.draining:
        return "draining: fleetctl drain"
    if not holds:
        return ""
    reasons = (
        f"{_REASONS_TO_LEAVE[hold.reason]}: {hold.message}"
        for hold in holds
        if hold.reason in _REASONS_TO_LEAVE
    )
    return next(reasons, "")
