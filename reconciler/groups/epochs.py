"""Epochs: the life of a replica with several ranks, from start to failure, and when the next epoch may begin. Pure.

Agents judge their ranks and report when an epoch cannot go on (condition EpochOver). Macs that are away are seen here.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final
from zlib import crc32

from machinery.backoff import SLOW_RETRY
from schemas.formation import Formation, GoldenAnswer
from schemas.meta import Condition, ConditionStatus, Status, find_condition, is_true
from schemas.replica import RankStatus, Replica

STEADY_S: Final = 60.0
"""An epoch that has served for this long does not count as a failure when it ends."""
TRIES: Final = 3
"""Failures in a row after which the next fallback is tried."""
# Delay after the first, the second, ... failure in a row: a crash loop of seconds helps nothing, as loading is slow.
_DELAYS_S: Final = (0.0, 5.0, 10.0, 20.0, 40.0, 60.0)


class EpochState(StrEnum):
    """The state of an epoch, computed at each reconcile from the agents' reports."""

    FETCHING = "Fetching"
    """Its Macs fetch the files of their ranks; no rank has started. Models of a hub only."""
    STARTING = "Starting"
    """Its ranks load, or rank 0 is not ready."""
    SERVING = "Serving"
    """Rank 0 is ready, for less than a minute so far."""
    STEADY = "Steady"
    """It has served for a minute."""
    FAILED = "Failed"
    """A rank cannot go on, so all ranks stop."""
    LOST = "Lost"
    """A Mac of it is away, which counts as no failure."""
    GIVEN_UP = "GivenUp"
    """All shapes of the group have failed: each gets one attempt in turn, with minutes between them."""


class EpochEvent(StrEnum):
    """An event that moves an epoch from one state to another."""

    FILES_PRESENT = "FilesPresent"
    """Each Mac has the files of its rank: the reconciler lets the ranks start."""
    READY = "Ready"
    NOT_READY = "NotReady"
    SERVED_A_MINUTE = "ServedAMinute"
    RANK_FAILED = "RankFailed"
    NODE_AWAY = "NodeAway"
    """A Mac is away; while it fetches and after it has served, only once the grace period of the Mac is over."""
    NODE_BACK = "NodeBack"
    NEXT_EPOCH = "NextEpoch"
    """The reconciler reforms the replica, once the delay after a failure is over."""
    SHAPES_EXHAUSTED = "ShapesExhausted"


# (from, event, to). NEXT_EPOCH leads to the first state of another epoch.
TRANSITIONS: Final = (
    (EpochState.FETCHING, EpochEvent.FILES_PRESENT, EpochState.STARTING),
    (EpochState.FETCHING, EpochEvent.NODE_AWAY, EpochState.LOST),
    (EpochState.STARTING, EpochEvent.READY, EpochState.SERVING),
    (EpochState.STARTING, EpochEvent.RANK_FAILED, EpochState.FAILED),
    (EpochState.STARTING, EpochEvent.NODE_AWAY, EpochState.LOST),
    (EpochState.SERVING, EpochEvent.NOT_READY, EpochState.STARTING),
    (EpochState.SERVING, EpochEvent.SERVED_A_MINUTE, EpochState.STEADY),
    (EpochState.SERVING, EpochEvent.RANK_FAILED, EpochState.FAILED),
    (EpochState.SERVING, EpochEvent.NODE_AWAY, EpochState.LOST),
    (EpochState.STEADY, EpochEvent.RANK_FAILED, EpochState.FAILED),
    (EpochState.STEADY, EpochEvent.NODE_AWAY, EpochState.LOST),
    (EpochState.FAILED, EpochEvent.NODE_AWAY, EpochState.LOST),
    (EpochState.FAILED, EpochEvent.NEXT_EPOCH, EpochState.FETCHING),
    (EpochState.FAILED, EpochEvent.NEXT_EPOCH, EpochState.STARTING),
    (EpochState.FAILED, EpochEvent.SHAPES_EXHAUSTED, EpochState.GIVEN_UP),
    (EpochState.GIVEN_UP, EpochEvent.NEXT_EPOCH, EpochState.FETCHING),
    (EpochState.GIVEN_UP, EpochEvent.NEXT_EPOCH, EpochState.STARTING),
    (EpochState.LOST, EpochEvent.NODE_BACK, EpochState.FETCHING),
    (EpochState.LOST, EpochEvent.NODE_BACK, EpochState.STARTING),
    (EpochState.LOST, EpochEvent.NODE_BACK, EpochState.STEADY),
    (EpochState.LOST, EpochEvent.NODE_BACK, EpochState.FAILED),
    (EpochState.LOST, EpochEvent.NEXT_EPOCH, EpochState.FETCHING),
    (EpochState.LOST, EpochEvent.NEXT_EPOCH, EpochState.STARTING),
)
_POSSIBLE: Final = frozenset((state, event) for state, event, _ in TRANSITIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The current epoch of a replica, as its agents report it."""

    over: str = ""
    """Reason why it cannot go on, in one word; empty while it can."""
    message: str = ""
    """The reason in a sentence."""
    is_lost: bool = False
    """True if it is over and a Mac of it is away."""
    is_steady: bool = False
    """True if it has served for a minute."""
    awaits_files: bool = False
    """True if a Mac of it does not have its files yet."""
    over_s: float = 0.0
    """Seconds since its end was written to the status."""
    served_s: float = 0.0
    """Seconds for which it has served without a break; 0 while it does not serve."""
    over_since: datetime | None = None
    """The time of its end; None while it goes on."""
    is_given_up: bool = False
    """True if it is over and all shapes of the group have failed."""
    shapes: int = 1
    """The number of shapes of the group; known once it is given up."""
    jitter: float = 1.0
    """From 0 to 1: spreads the slow retries of groups that failed together."""
    golden: GoldenAnswer | None = None
    """Golden answer of this epoch, or of the earlier one that it is checked against."""

    @property
    def state(self) -> EpochState:
        """Return the state: the first row whose condition holds."""
        rows = (
            (self.is_given_up, EpochState.GIVEN_UP),
            (self.is_lost, EpochState.LOST),
            (self.over != "", EpochState.FAILED),
            (self.awaits_files, EpochState.FETCHING),
            (self.is_steady, EpochState.STEADY),
            (self.served_s > 0, EpochState.SERVING),
        )
        return next((state for holds, state in rows if holds), EpochState.STARTING)

    def allows(self, event: EpochEvent) -> bool:
        """Return whether the event is possible in the epoch's state."""
        return (self.state, event) in _POSSIBLE

    def is_due(self, formation: Formation) -> bool:
        """Return whether the next epoch may begin now."""
        return self.allows(EpochEvent.NEXT_EPOCH) and self.delay_s(formation) <= 0

    def delay_s(self, formation: Formation) -> float:
        """Return the seconds until the next epoch may begin, once this one is over."""
        if self.state is EpochState.LOST:
            return 0.0
        return max(0.0, self._whole_delay_s(formation) - self.over_s)

    def next_attempt(self, formation: Formation) -> datetime | None:
        """Return the time at which the next epoch may begin; None while this one goes on."""
        if self.over_since is None:
            return None
        return self.over_since + timedelta(seconds=self._whole_delay_s(formation))

    def _whole_delay_s(self, formation: Formation) -> float:
        if self.is_given_up:
            return SLOW_RETRY.delay_s(1, jitter=self.jitter)
        number = count_failures(formation, self)
        return _DELAYS_S[min(number, len(_DELAYS_S)) - 1]


def next_attempt_text(formation: Formation, epoch: Epoch) -> str:
    """Return when a group that was given up starts again, as the beginning of a sentence."""
    at = epoch.next_attempt(formation)
    return (
        "The next attempt comes within minutes"
        if at is None
        else f"Next attempt at {at:%H:%M:%S} UTC"
    )


def count_failures(formation: Formation, epoch: Epoch) -> int:
    """Return the number of failed epochs in a row, including this one once it is over.

    A lost Mac is no failure, and gives the shape that ran on it all three tries again.
    """
    before = 0 if epoch.is_steady else formation.failures
    if epoch.is_given_up:
        # From here on each failure gives the group up again, until an epoch has served for a minute.
        return max(before + 1, TRIES * epoch.shapes)
    return before - before % TRIES if epoch.is_lost else before + 1


def next_shapes(formation: Formation, epoch: Epoch, number: int) -> tuple[int, ...]:
    """Return which of `number` shapes to try for the next epoch, in order; none if all have failed.

    A group that was given up tries its shapes in turn: the one after the last first.
    """
    if epoch.is_given_up or epoch.is_lost:
        last = min(formation.fallback, number - 1)
        first = (last + 1) % number if epoch.is_given_up else 0 if epoch.is_steady else last
        return (*range(first, number), *range(first))
    failures = count_failures(formation, epoch)
    if failures >= TRIES * number:
        return ()
    return tuple(range(formation.fallback + (failures % TRIES == 0), number))


def epoch_of(
    replica: Replica,
    reports: Sequence[RankStatus | None],
    *,
    away: AbstractSet[str],
    lost: AbstractSet[str],
    old: Status | None,
    now: datetime,
) -> Epoch | None:
    """Return the replica's current epoch; None for a replica with one rank.

    `reports` are the agents' reports on the ranks of this epoch. `away` are nodes without a lease now, `lost` are nodes
    without one for the whole grace period. `old` is the replica's status as it was written last.
    """
    formation = replica.spec.formation
    if formation is None:
        return None
    nodes = [rank.node for rank in replica.spec.ranks]
    away_nodes = [name for name in nodes if name in away]
    over, message = _over(replica, reports)
    first = reports[0]
    has_served = first is not None and is_true(first.conditions, "Ready")
    # An engine outlives its agent, so a serving epoch gets the grace period, and so do files that are on their way:
    # another Mac would fetch them from the beginning. An epoch that is to start needs the agent.
    is_patient = has_served or formation.awaits_files
    missing = [name for name in nodes if name in lost] if is_patient else away_nodes
    if not over and missing:
        over, message = "NodeLost", f"{', '.join(missing)} is away"
    # Each epoch has a generation of its own: conditions of another generation are about another epoch.
    generation = replica.metadata.generation
    written = old.conditions if old is not None else ()
    current = tuple(
        condition for condition in written if condition.observed_generation == generation
    )
    served_s = 0.0 if over else _since(current, "Ready", now)
    return Epoch(
        over=over,
        message=message,
        is_lost=bool(over and away_nodes),
        awaits_files=formation.awaits_files,
        is_steady=is_true(current, "Steady") or _since(current, "Ready", now) >= STEADY_S,
        over_s=_since(current, "EpochOver", now),
        over_since=(_true_since(current, "EpochOver") or now) if over else None,
        jitter=crc32(f"{replica.metadata.uid}/{formation.epoch}".encode()) / 2**32,
        served_s=served_s,
        is_given_up=bool(over) and is_true(current, "CrashLooping"),
        golden=(first.golden if first is not None else None) or formation.golden,
    )


def mark_given_up(replica: Replica, epoch: Epoch | None, number: int) -> Epoch | None:
    """Mark an epoch as given up if it is over and all `number` shapes of its group have failed."""
    formation = replica.spec.formation
    if epoch is None or formation is None or not epoch.over:
        return epoch
    if not epoch.is_given_up and next_shapes(formation, epoch, number):
        return epoch
    return replace(epoch, is_given_up=True, shapes=number)


def _over(replica: Replica, reports: Sequence[RankStatus | None]) -> tuple[str, str]:
    """Return reason and message of the first rank that reports the epoch as over; empty if none does."""
    for number, report in enumerate(reports):
        condition = find_condition(report.conditions, "EpochOver") if report is not None else None
        if condition is not None and condition.status is ConditionStatus.TRUE:
            detail = f": {condition.message}" if condition.message else ""
            return condition.reason, f"rank {number} on {replica.spec.ranks[number].node}{detail}"
    return "", ""


def _since(conditions: Sequence[Condition], type_: str, now: datetime) -> float:
    """Return the seconds for which the condition has been true; 0 if it is not."""
    since = _true_since(conditions, type_)
    return 0.0 if since is None else max(0.0, (now - since) / timedelta(seconds=1))


def _true_since(conditions: Sequence[Condition], type_: str) -> datetime | None:
    """Return the time since which the condition has been true; None if it is not."""
    condition = find_condition(conditions, type_)
    if condition is None or condition.status is not ConditionStatus.TRUE:
        return None
    return condition.last_transition_time


def epoch_requeue_after_s(replica: Replica, epoch: Epoch | None) -> float | None:
    """Return the seconds until the epoch changes its state by itself; None if it does not."""
    formation = replica.spec.formation
    if formation is None or epoch is None:
        return None
    if epoch.allows(EpochEvent.NEXT_EPOCH):
        return epoch.delay_s(formation) or None
    return STEADY_S - epoch.served_s if epoch.allows(EpochEvent.SERVED_A_MINUTE) else None
