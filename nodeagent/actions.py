"""The actions that the agent can take for one replica, and a plan of them. A closed set of values; execute.py acts."""

from dataclasses import dataclass
from typing import Final, TypeAlias

from nodeagent.replicas.observation import EngineFault, EpochEnd, ObservedReplica
from schemas.formation import GoldenAnswer
from schemas.meta import Condition
from schemas.replica import FetchStatus

FAST_REQUEUE_S: Final = 0.1
SLOW_REQUEUE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchModel:
    """Start to fetch the replica's model from its hub, or wait for the fetch of another replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFetch:
    """Give the fetch up that the replica waits for; it ends if no other replica waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Start a child process for the replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopEngine:
    """Ask the engine to drain and end, or kill it."""

    kill: bool = False
    fault: EngineFault | None = None
    """The reason, if the engine is still wanted: its next start backs off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEngine:
    """Probe the engine with one token, or a rank with the golden question: its report of Ready is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishEndpoint:
    """Write the endpoint under our lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawEndpoint:
    """Delete the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetEngine:
    """Drop the state of an engine that ended and is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpEpoch:
    """Record why the rank's epoch is over; later observations do not change it."""

    epoch_end: EpochEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeReference:
    """Start one process alone that answers the golden question, before the rank starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReference:
    """End that process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRank:
    """Write the rank's status."""

    conditions: tuple[Condition, ...]
    peak_bytes: int = 0
    """The peak memory of the replica's engines here."""
    golden: GoldenAnswer | None = None
    """The answer by which later epochs are checked."""
    fetch: FetchStatus | None = None
    """The fetch of the model that runs."""


Action: TypeAlias = (
    FetchModel
    | ReleaseFetch
    | StartEngine
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPlan:
    """The actions to take now, and the time after which to reconcile again without an event."""

    actions: tuple[Action, ...] = ()
    requeue_after_s: float | None = None


def withdraw_then(
    seen: ObservedReplica, *more: Action, requeue_s: float | None = None
) -> ActionPlan:
    """Return a plan of the actions, after the withdrawal of the endpoint if it is published."""
    withdraw = (WithdrawEndpoint(),) if seen.is_published else ()
    return ActionPlan(actions=(*withdraw, *more), requeue_after_s=requeue_s)
