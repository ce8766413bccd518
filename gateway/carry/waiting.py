"""Where requests wait for a deployment that autoscaling left without a replica. Starts nothing itself.

That somebody waits here is in the metrics; the reconciler reads them, and has a replica started.
"""

from gateway import errors
from gateway.errors import Refusal
from gateway.known.keeper import TableKeeper
from gateway.routing.choosing import NothingReady
from machinery.clock import Clock


class WaitingRoom:
    """Holds so many requests of a deployment for so long; others are turned away at once."""

    def __init__(self, keeper: TableKeeper, clock: Clock, *, limit: int, patience_s: float) -> None:
        self._keeper = keeper
        self._clock = clock
        self._limit = limit
        self._patience_s = patience_s
        self._waiting: dict[str, int] = {}

    def waiting(self) -> dict[str, int]:
        """Return how many wait now, by deployment; those for which nobody waits any more with 0."""
        return dict(self._waiting)

    async def hold(self, name: str, choice: NothingReady, began_s: float) -> Refusal | None:
        """Wait for the next change of the table; return what to say if it is no use to wait longer.

        `began_s`: when the request began to wait.
        """
        left_s = began_s + self._patience_s - self._clock.monotonic()
        if left_s <= 0:
            return errors.model_starting(name, self._patience_s, choice.reason)
        before = self._waiting.get(choice.wakes, 0)
        if before >= self._limit:
            return errors.too_many_waiting(name, self._limit)
        self._waiting[choice.wakes] = before + 1
        try:
            await self._keeper.changed(within_s=left_s)
        finally:
            self._waiting[choice.wakes] -= 1
        return None
