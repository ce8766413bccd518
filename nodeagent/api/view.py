"""What the agent's API looks at: values and live views of the agent. Changes nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from machinery.clock import Clock
from machinery.logring import Ring
from nodeagent import groups
from nodeagent.local import Engine
from nodeagent.parts import Feed
from schemas.node import NodeStatus
from schemas.replica import Replica
from store import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One agent from within."""

    name: str
    status: NodeStatus
    """How the node was described when the agent started."""
    clock: Clock
    started_at: float
    """When, on the clock that never goes back."""
    engines: Mapping[str, Engine]
    """The engines that run or ran, by replica: the agent's own, which changes."""
    replicas: Feed[Replica]
    has_lease: Callable[[], bool]
    """Whether the node is there, for the others."""
    folder: Path
    """Where engines' logs lie, in a folder for each replica."""
    host: str
    """Where engines listen."""
    ring: Ring

    def uptime_s(self) -> float:
        """Return for how long the agent runs."""
        return self.clock.monotonic() - self.started_at

    def rank_of(self, replica: str) -> int | None:
        """Return which of a replica's ranks is this node's; None if nobody says any more."""
        found = self.replicas.items.get(keys.spec_key("Replica", replica))
        return None if found is None else groups.rank_on(found, self.name)
