"""The learned week of a model: which of its 168 hours usually have requests. Pure.

The reconciler and the simulation of a week share it.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from schemas.power import HOURS_OF_WEEK, DemandWeek

EMPTY_WEEK: Final = DemandWeek(shares=(None,) * HOURS_OF_WEEK)
"""The week of a model that was never observed for an hour."""
LEAD: Final = timedelta(minutes=5)
"""Macs are awake this long before an hour in which their models are usually used."""
# Used last week, or in most of the weeks before: the share halves with each week without a request.
_USUAL: Final = 0.5


def hour_of_week(at: datetime) -> int:
    """Return the hour of the week, from Monday 0:00 UTC on."""
    utc = at.astimezone(UTC)
    return utc.weekday() * 24 + utc.hour


def with_hour(week: DemandWeek, hour: int, *, is_used: bool) -> DemandWeek:
    """Return the week after another observation of one hour."""
    before, now = week.shares[hour], 1.0 if is_used else 0.0
    share = now if before is None else (before + now) / 2
    return week.model_copy(
        update={"shares": (*week.shares[:hour], share, *week.shares[hour + 1 :])}
    )


def is_usual(week: DemandWeek, hour: int) -> bool:
    """Return whether the hour usually has requests."""
    share = week.shares[hour]
    return share is not None and share >= _USUAL


def is_expected(week: DemandWeek, now: datetime) -> bool:
    """Return whether requests are usual in this hour, or in one that begins soon."""
    return is_usual(week, hour_of_week(now)) or is_usual(week, hour_of_week(now + LEAD))
