"""What the agent can do about one replica: a closed set of values. Doing it is execute.py's job.

What a plan for one replica is, and the pieces that plans are made of. Decides nothing.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

from nodeagent.replicas.observed import EpochEnd, ObservedReplica
from schemas.formation import GoldenAnswer
from schemas.meta import Condition


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Start a child process for the replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopEngine:
    """Ask the engine to drain and end; `kill` when it had its time."""

    kill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEngine:
    """Have the engine produce one token, a group the golden answer: that it says it is ready is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishEndpoint:
    """Write the endpoint under our lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawEndpoint:
    """Delete the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetEngine:
    """Drop what is remembered about an engine that ended and is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpEpoch:
    """Remember why the rank's epoch is over: what it does from now on changes nothing."""

    over: EpochEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeReference:
    """Have one process answer the golden question, before the rank starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReference:
    """End that process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRank:
    """Write the rank's status."""

    conditions: tuple[Condition, ...]
    peak_bytes: int = 0
    """Most memory that its engines were seen to take."""
    golden: GoldenAnswer | None = None
    """By what later epochs are checked."""


Action: TypeAlias = (
    StartEngine
    | StopEngine
    | ProbeEngine
    | PublishEndpoint
    | WithdrawEndpoint
    | ForgetEngine
    | GiveUpEpoch
    | MakeReference
    | StopReference
    | ReportRank
)


FAST_REQUEUE_S: Final = 0.1
SLOW_REQUEUE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPlan:
    """What to do now, and when to look again though nothing was heard."""

    actions: tuple[Action, ...] = ()
    requeue_after_s: float | None = None


def withdraw_then(seen: ObservedReplica, *more: Action) -> tuple[Action, ...]:
    """Return the actions, after taking the endpoint away if there is one."""
    return (*((WithdrawEndpoint(),) if seen.is_published else ()), *more)
