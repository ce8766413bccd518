"""Decides whether an engine that starts now wires its model. Pure."""

from dataclasses import dataclass

from schemas.memory import EngineMemory, Wired


@dataclass(slots=True, kw_only=True)
class WiringPolicy:
    """The wishes of the node's pools, which deployments may override."""

    pools: Wired = "Auto"

    def wired(self, memory: EngineMemory | None) -> Wired:
        """Return the setting for an engine whose deployment has this `memory`."""
        return self.pools if memory is None else memory.wired
