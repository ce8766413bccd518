"""How the epoch of a replica with several ranks gets on: whether it is over, why, and when the next may begin. Pure.

Agents judge their ranks and say when one cannot go on (condition EpochOver); Macs that are away are seen here.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from schemas.formation import Formation, GoldenAnswer
from schemas.meta import Condition, ConditionStatus, Status, find_condition, is_true
from schemas.replica import RankStatus, Replica

STEADY_S: Final = 60.0
"""An epoch that has served for so long was no failure."""
TRIES: Final = 3
"""Failures in a row after which the next fallback is tried."""
# After the first, the second, ... failure in a row. Loading is slow itself; a crash loop of seconds helps nobody.
_WAITS_S: Final = (0.0, 5.0, 10.0, 20.0, 40.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The current epoch of a replica, as its agents report it."""

    over: str = ""
    """Why it cannot go on, in one word; empty while it can."""
    message: str = ""
    """The same for people."""
    is_lost: bool = False
    """Whether a Mac of it is away: nobody's failure."""
    is_steady: bool = False
    """Whether it served for a minute."""
    over_s: float = 0.0
    """For how long we have known that it is over, in seconds."""
    served_s: float = 0.0
    """For how long it has served, in seconds; 0 while it does not."""
    is_given_up: bool = False
    """Whether everything that may be run was tried, and failed."""
    golden: GoldenAnswer | None = None
    """What it answered when it was checked, or what it was to be checked by."""

    def wait_s(self, formation: Formation) -> float:
        """Return in how many seconds the next one may begin, once this one is over."""
        if self.is_lost:
            return 0.0
        number = count_failures(formation, self)
        return max(0.0, _WAITS_S[min(number, len(_WAITS_S)) - 1] - self.over_s)


def count_failures(formation: Formation, epoch: Epoch) -> int:
    """Return how many epochs in a row will have failed once this one is over.

    A lost Mac is no failure, and what was tried on it gets its three tries again.
    """
    before = 0 if epoch.is_steady else formation.failures
    return before - before % TRIES if epoch.is_lost else before + 1


def next_shapes(formation: Formation, epoch: Epoch, number: int) -> tuple[int, ...]:
    """Return which of `number` shapes to try for the next epoch, in order; none if all failed."""
    if epoch.is_lost:
        first = 0 if epoch.is_steady else min(formation.fallback, number - 1)
        return (*range(first, number), *range(first))
    has_failed = count_failures(formation, epoch) % TRIES == 0
    return tuple(range(formation.fallback + has_failed, number))


def epoch_of(
    replica: Replica,
    reports: Sequence[RankStatus | None],
    *,
    away: AbstractSet[str],
    lost: AbstractSet[str],
    old: Status | None,
    now: datetime,
) -> Epoch | None:
    """Return how the replica's epoch gets on; None where there is one rank.

    `reports` are what agents say of each rank in this very epoch. `away` are nodes whose agents renew no lease now,
    `lost` those that have not for the whole grace period; `old` is the replica's status as we wrote it last.
    """
    formation = replica.spec.formation
    if formation is None:
        return None
    nodes = [rank.node for rank in replica.spec.ranks]
    gone = [name for name in nodes if name in away]
    over, message = _over(replica, reports)
    leading = reports[0]
    has_served = leading is not None and is_true(leading.conditions, "Ready")
    # An engine outlives its agent; but what has not begun to serve will not without one.
    missing = [name for name in nodes if name in lost] if has_served else gone
    if not over and missing:
        over, message = "NodeLost", f"{', '.join(missing)} is away"
    # Each epoch has a generation of its own: what was written about another says nothing.
    generation = replica.metadata.generation
    written = old.conditions if old is not None else ()
    mine = tuple(one for one in written if one.observed_generation == generation)
    served_s = 0.0 if over else _since(mine, "Ready", now)
    return Epoch(
        over=over,
        message=message,
        is_lost=bool(over and gone),
        is_steady=is_true(mine, "Steady") or _since(mine, "Ready", now) >= STEADY_S,
        over_s=_since(mine, "EpochOver", now),
        served_s=served_s,
        is_given_up=bool(over) and is_true(mine, "CrashLooping"),
        golden=(leading.golden if leading is not None else None) or formation.golden,
    )


def mark_given_up(replica: Replica, epoch: Epoch | None, number: int) -> Epoch | None:
    """Return the epoch with whether all of the `number` shapes of its group were tried and failed."""
    formation = replica.spec.formation
    if (
        epoch is None
        or formation is None
        or not epoch.over
        or next_shapes(formation, epoch, number)
    ):
        return epoch
    return replace(epoch, is_given_up=True)


def _over(replica: Replica, reports: Sequence[RankStatus | None]) -> tuple[str, str]:
    """Return why agents say that the epoch is over: the first to say so by rank."""
    for number, report in enumerate(reports):
        said = find_condition(report.conditions, "EpochOver") if report is not None else None
        if said is not None and said.status is ConditionStatus.TRUE:
            words = f": {said.message}" if said.message else ""
            return said.reason, f"rank {number} on {replica.spec.ranks[number].node}{words}"
    return "", ""


def _since(conditions: Sequence[Condition], type_: str, now: datetime) -> float:
    """Return for how long the condition has been true, in seconds; 0 if it is not."""
    found = find_condition(conditions, type_)
    if (
        found is None
        or found.status is not ConditionStatus.TRUE
        or found.last_transition_time is None
    ):
        return 0.0
    return max(0.0, (now - found.last_transition_time) / timedelta(seconds=1))


def epoch_requeue_after_s(replica: Replica, epoch: Epoch | None) -> float | None:
    """Return when the epoch is to be looked at though nothing changes; None if it need not be."""
    formation = replica.spec.formation
    if formation is None or epoch is None or epoch.is_given_up:
        return None
    if epoch.over:
        return epoch.wait_s(formation) or None
    return None if epoch.is_steady or not epoch.served_s else STEADY_S - epoch.served_s
