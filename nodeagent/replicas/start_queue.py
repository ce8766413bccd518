"""The order in which the engines of a node load: a few at a time, by priority. Touches no process.

A Mac that reads a dozen models at once is no faster, and its lease is in danger. Only engines that have a whole model wait
here. The ranks of a group must load at the same time on several Macs, which know nothing of each other's queues: two
groups could wait for each other. So ranks start at once, and engines wait for them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

DEFAULT_CONCURRENCY: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """An engine that waits to load."""

    replica: str
    priority: int
    """spec.priority of its deployment."""
    restarts: int = 0
    """Its consecutive failures: an engine that fails again and again lets others go first."""
    created_at: datetime | None = None
    ordinal: int = 0

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Return the order: priority, then fewest failures, then age, ordinal and name."""
        created_s = self.created_at.timestamp() if self.created_at is not None else 0.0
        return -self.priority, self.restarts, created_s, self.ordinal, self.replica


def place_in_queue(
    request: StartRequest, waiting: Iterable[StartRequest], *, loading: int, limit: int
) -> int:
    """Return the place among those that must wait, from 1 on; 0 if the engine may start now."""
    before = sum(other.sort_key < request.sort_key for other in waiting)
    return max(0, before + 1 - max(0, limit - loading))


@dataclass(slots=True, kw_only=True)
class StartQueue:
    """The engines of one node that wait to load."""

    limit: int = DEFAULT_CONCURRENCY
    """The number of engines that may load at once (--start-concurrency)."""
    _waiting: dict[str, StartRequest] = field(default_factory=dict)

    def add(self, request: StartRequest) -> None:
        """Add an engine, or replace its request."""
        self._waiting[request.replica] = request

    def remove(self, replica: str) -> None:
        """Remove an engine that started, or is not wanted any more."""
        self._waiting.pop(replica, None)

    def place(self, request: StartRequest, *, loading: int) -> int:
        """Add the engine, and return its place; 0 if it may start now, while `loading` others load."""
        self.add(request)
        return place_in_queue(request, self._waiting.values(), loading=loading, limit=self.limit)
