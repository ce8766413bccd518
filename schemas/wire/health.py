"""The fields by which a process reports its view of the store on `/health`, for every process that has the path."""

from enum import StrEnum
from typing import Final, NamedTuple

STORE: Final = "store"
"""The state of the view: a `StoreState`."""
STORE_STALENESS: Final = "storeStalenessSeconds"
"""Seconds since the store last sent anything; null before the first time."""
STORE_MESSAGE: Final = "storeMessage"
"""The store's refusal in words; omitted if there is none."""

STALE_S: Final = 20.0
"""The age from which on a view is stale. An idle watch is silent for 17 s at most (`store.etcd.adapter.IDLE_S`)."""


class StoreState(StrEnum):
    """The state of a process's view of the store."""

    OK = "ok"
    STALE = "stale"
    """The store has been silent for too long."""
    REFUSED = "refused"
    """The store refuses the process: its password is missing, wrong, or has too few rights."""


class StoreView(NamedTuple):
    """The age of a process's view of the store, and why the store refuses the process, if it does."""

    staleness_s: float | None
    refusal: str = ""

    @property
    def state(self) -> StoreState:
        if self.refusal:
            return StoreState.REFUSED
        is_fresh = self.staleness_s is not None and self.staleness_s < STALE_S
        return StoreState.OK if is_fresh else StoreState.STALE

    def fields(self) -> dict[str, str | float | None]:
        """Return the fields of `/health`."""
        age_s = None if self.staleness_s is None else round(self.staleness_s, 3)
        found: dict[str, str | float | None] = {STORE: self.state.value, STORE_STALENESS: age_s}
        return {**found, STORE_MESSAGE: self.refusal} if self.refusal else found
