"""Where requests wait for a deployment that autoscaling left without a replica. Starts nothing itself.

That somebody waits here is in the metrics; the reconciler reads them, and has a replica started.
"""

from gateway import errors
from gateway.carry.patience import Vigil
from gateway.errors import Refusal
from gateway.known.keeper import TableKeeper
from gateway.routing.choosing import NothingReady
from machinery.clock import Clock

# Longer than the reconciler takes to read the figures again.
_MISSED_S = 30.0


class WaitingRoom:
    """Holds so many requests of a deployment for so long; others are turned away at once."""

    def __init__(self, keeper: TableKeeper, clock: Clock, *, limit: int, patience_s: float) -> None:
        self._keeper = keeper
        self._clock = clock
        self._limit = limit
        self._patience_s = patience_s
        self._waiting: dict[str, int] = {}
        self._missed: dict[str, float] = {}

    def waiting(self) -> dict[str, int]:
        """Return how many wait now, by deployment; those for which nobody waits any more with 0.

        Who was missed a moment ago counts as waited for by one.
        """
        now_s = self._clock.monotonic()
        missed = {name: int(until_s > now_s) for name, until_s in self._missed.items()}
        return {
            name: max(self._waiting.get(name, 0), missed.get(name, 0))
            for name in self._waiting.keys() | missed.keys()
        }

    def miss(self, deployment: str) -> None:
        """Note that a fallback answers what this deployment should: it is to be started, too; "" is none."""
        if deployment:
            self._missed[deployment] = self._clock.monotonic() + _MISSED_S

    async def hold(
        self, name: str, choice: NothingReady, vigil: Vigil, *, began_s: float, until_s: float
    ) -> Refusal | None:
        """Wait for the next change of the table; return what to say if it is no use to wait longer.

        `began_s`: when the request began to wait; `until_s`: when its own time is up.
        """
        end_s = began_s + self._patience_s
        if self._clock.monotonic() >= end_s:
            return errors.model_starting(name, self._patience_s, choice.reason)
        before = self._waiting.get(choice.wakes, 0)
        if before >= self._limit:
            return errors.too_many_waiting(name, self._limit)
        self._waiting[choice.wakes] = before + 1
        try:
            left_s = await vigil.quietly(until_s=min(end_s, until_s))
            await self._keeper.changed(within_s=left_s)
        finally:
            self._waiting[choice.wakes] -= 1
        return None
