"""Where the ranks of hollow groups find each other, and notice each other's end. No sockets: one process holds them all."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

# A closed channel is noticed at once, and the process takes a moment to go.
_LIFELINE_S = 0.2


class Rank(Protocol):
    """One rank, as the others see it."""

    started_at: float
    ends_at: float
    """When it ends by itself, or was ended: infinite while nobody ended it."""

    def running(self) -> bool: ...


@dataclass(slots=True, kw_only=True)
class Meeting:
    """The ranks of one epoch."""

    world_size: int
    ranks: dict[int, Rank] = field(default_factory=dict)

    @property
    def joined_at(self) -> float:
        """When the last rank came; infinite before."""
        if len(self.ranks) < self.world_size:
            return float("inf")
        return max(rank.started_at for rank in self.ranks.values())

    def lost_at(self, number: int) -> float:
        """Return when this rank notices that another one ended; infinite while none did."""
        others = (rank.ends_at for other, rank in self.ranks.items() if other != number)
        return min(others, default=float("inf")) + _LIFELINE_S


class Meetings:
    """All groups of one process, by replica and epoch."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[str, int], Meeting] = {}

    def join(self, uid: str, epoch: int, *, number: int, world_size: int, rank: Rank) -> Meeting:
        """Have a rank wait for the others of its epoch."""
        for key in list(self._over()):
            del self._meetings[key]
        meeting = self._meetings.setdefault((uid, epoch), Meeting(world_size=world_size))
        meeting.ranks[number] = rank
        return meeting

    def _over(self) -> Iterator[tuple[str, int]]:
        for key, meeting in self._meetings.items():
            if not any(rank.running() for rank in meeting.ranks.values()):
                yield key
