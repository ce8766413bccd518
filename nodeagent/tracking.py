"""What an agent remembers of one rank of a group between two looks. Keeps count; judging.py decides."""

from dataclasses import dataclass

from nodeagent.health import Health
from nodeagent.observe import Over, RankView
from schemas.formation import Golden

# One answer that does not come is no silence: the agent itself may have been held up while it waited.
_MISSED = 2


@dataclass(slots=True, kw_only=True)
class Track:
    """One rank, as its answers told."""

    epoch: int
    memory_bytes: int
    began_at: float
    """When this agent began to look, like all times in seconds of its clock."""
    answer: Golden | None = None
    over: Over | None = None
    _health: Health | None = None
    _state_since: float = 0.0
    _moved_at: float = 0.0
    _heard_at: float = 0.0
    _missed: int = 0

    def heard(self, health: Health, now: float) -> None:
        """Note an answer."""
        before = self._health
        if before is None or before.state != health.state:
            self._state_since = now
        is_moving = before is None or before.progress != health.progress
        if is_moving or not health.is_busy or before is None or before.state != health.state:
            self._moved_at = now
        self._health, self._heard_at, self._missed = health, now, 0

    def missed(self) -> None:
        """Note that no answer came."""
        self._missed += 1

    @property
    def is_unheard(self) -> bool:
        """Whether it did not answer the last time."""
        return self._missed > 0

    def view(
        self, now: float, *, is_frozen: bool, killed_s: float | None, probe_failures: int
    ) -> RankView:
        """Return what judging needs."""
        health = self._health
        since = self._heard_at if health is not None else self.began_at
        return RankView(
            epoch=self.epoch,
            memory_bytes=self.memory_bytes,
            state_s=now - self._state_since if health is not None else 0.0,
            unheard_s=now - since if self._missed >= _MISSED else 0.0,
            stood_s=self._heard_at - self._moved_at,
            slowest_s=health.slowest_s if health is not None else 0.0,
            loaded=health.loaded if health is not None else 0.0,
            is_frozen=is_frozen,
            killed_s=killed_s,
            answer=self.answer,
            probe_failures=probe_failures,
            over=self.over,
        )
