"""What the agent can do about one replica: a closed set of values. Doing it is execute.py's job."""

from dataclasses import dataclass
from typing import TypeAlias

from nodeagent.observe import Over
from schemas.formation import Golden
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
class Publish:
    """Write the endpoint under our lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Delete the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Drop what is remembered about an engine that ended and is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Remember why the rank's epoch is over: what it does from now on changes nothing."""

    over: Over


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeReference:
    """Have one process answer the golden question, before the rank starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReference:
    """End that process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Write the rank's status."""

    conditions: tuple[Condition, ...]
    peak_bytes: int = 0
    """Most memory that its engines were seen to take."""
    golden: Golden | None = None
    """By what later epochs are checked."""


Action: TypeAlias = (
    StartEngine
    | StopEngine
    | ProbeEngine
    | Publish
    | Withdraw
    | Forget
    | GiveUp
    | MakeReference
    | StopReference
    | Report
)
