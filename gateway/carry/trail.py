"""What was tried for one request, and what came of it. Values only."""

from dataclasses import dataclass, field
from typing import TypeAlias

from gateway.carry.held import Held
from gateway.errors import Refusal
from gateway.routing.table import Target
from gateway.upstream.exchange import Headers
from gateway.upstream.pool import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """A stream whose first event is there; the receiver closes `held`."""

    held: Held
    answer: Answer
    first: bytes
    rest: bytes
    """The beginning of the next event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A complete answer."""

    target: Target
    status: int
    headers: Headers
    body: bytes


Result: TypeAlias = Streaming | Whole | Refusal


@dataclass(slots=True)
class Trail:
    """What was tried for one request."""

    attempts: int = 0
    failed: set[Target] = field(default_factory=set)
    refusal: Refusal | None = None
    """What to say if nobody is left and nobody answered."""
    turned_away: Whole | None = None
    """What an engine said that could not serve now; better than any word of ours."""
    is_over: bool = False
    """Whether another engine would be of no use."""
    is_seen: bool = False
    """Whether an engine took the request."""
    waits_since_s: float | None = None
    """Since when the request waits for a replica to be started."""
    served_by: Target | None = None
    """Who answered in the end."""

    def may_wait(self) -> bool:
        """Return whether it may wait for a replica; one that engines died of would kill that, too."""
        return not self.is_seen and self.turned_away is None
