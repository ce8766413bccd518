"""Autoscaling of a deployment: bounds for the number of replicas, the load that counts, schedules, and the wait at zero."""

import math
from datetime import datetime
from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, Field, StringConstraints, model_validator

from schemas.duration import Duration
from schemas.meta import ApiModel, Examples, ObjectName


def _cron(text: str) -> str:
    try:
        CronSim(text, datetime(2000, 1, 1))  # noqa: DTZ001 - only its form is looked at
    except CronSimError as error:
        raise ValueError(
            f'is not a cron expression ({error}); write minute, hour, day, month and weekday as in "0 8 * * 1-5"'
        ) from error
    return text


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            'is not a time zone; write one such as "Europe/Berlin" or "UTC"'
        ) from error
    return name


Cron = Annotated[
    str,
    StringConstraints(min_length=1, max_length=100),
    AfterValidator(_cron),
    Examples(("0 8 * * 1-5", "30 18 * * *", "0 0 1 * *")),
]
TimeZone = Annotated[
    str,
    StringConstraints(min_length=1, max_length=64),
    AfterValidator(_zone),
    Examples(("UTC", "Europe/Berlin", "America/New_York")),
]
Count = Annotated[int, Field(ge=0, le=10_000)]


class ScheduleWindow(ApiModel):
    """Other bounds, from each `start` to the next `end`."""

    start: Cron
    """Opening time, such as "0 8 * * 1-5"."""
    end: Cron
    """Closing time."""
    time_zone: TimeZone = "UTC"
    """The time zone of `start` and `end`."""
    min_replicas: Count | None = None
    """Fewest replicas while it is open. Default: the deployment's own, or maxReplicas if that is less."""
    max_replicas: Count | None = None
    """Most replicas while it is open. Default: the deployment's own, or minReplicas if that is more."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        least, most = self.min_replicas, self.max_replicas
        if least is not None and most is not None and least > most:
            raise ValueError(f"has minReplicas {least} above maxReplicas {most}")
        return self


class Autoscaling(ApiModel):
    """Bounds for the number of replicas, and the load that one replica should have."""

    min_replicas: Count = 1
    """Fewest replicas. 0: the last replica ends after `idleTime`, and the first request starts it again."""
    max_replicas: Annotated[int, Field(ge=1, le=10_000)]
    """Most replicas."""
    target_requests: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Requests in flight or waiting that one replica should have. Default: three quarters of `concurrency`."""
    scale_up_stabilization: Duration = "0s"
    """Time for which the load must ask for more replicas before they are started."""
    scale_down_stabilization: Duration = "5m"
    """Time for which the load must ask for fewer replicas before some are ended."""
    idle_time: Duration = "15m"
    """Time without any request after which the last replica ends, if minReplicas is 0."""
    swap: Literal["Allowed", "Pinned"] = "Allowed"
    """Swap of models. Allowed: while the fewest replicas are 0, idle replicas end before `idleTime` if requests wait for
    another model at zero that has no room, and whose priority is not lower. Pinned: they never do."""
    schedule: Annotated[tuple[ScheduleWindow, ...], Field(max_length=50)] = ()
    """Windows with other bounds; where windows overlap, the later one in the list applies."""

    @property
    def may_be_at_zero(self) -> bool:
        """Return whether the bounds, or those of a window, allow no replica."""
        return 0 in (self.min_replicas, *(window.min_replicas for window in self.schedule))

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"has minReplicas {self.min_replicas} above maxReplicas {self.max_replicas}"
            )
        return self


class LoadForecast(ApiModel):
    """The expected wait until the first replica serves, while requests wait for it."""

    seconds: Annotated[float, Field(ge=0)]
    """Seconds from `since` on: until replicas that give way have ended, the model is fetched, and the engine has loaded."""
    since: datetime
    """The time of the forecast."""
    gives_way: tuple[ObjectName, ...] = ()
    """The replicas of other deployments that end for it."""
    fetch_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of the files that are fetched; 0 if all are there."""
    fetched_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of them that have arrived, in coarse steps."""

    def remaining_s(self, now: datetime) -> float:
        """Return the seconds left, whatever the clock of another machine says: from 0 to `seconds`."""
        return min(self.seconds, max(0.0, self.seconds - (now - self.since).total_seconds()))

    def text(self, now: datetime, verb: str = "loads") -> str:
        """Return the forecast for people, as in `loads in 14 s: qwen-0 gives way`."""
        left_s = math.ceil(self.remaining_s(now))
        names, verb_of_names = ", ".join(self.gives_way), "give" if self.gives_way[1:] else "gives"
        when = f"{verb} in {left_s} s" if left_s else f"{verb}"
        return f"{when}: {names} {verb_of_names} way" if names else when
