"""Decides whether an engine that starts now wires its model. Pure."""

from dataclasses import dataclass

from schemas.memory import EngineMemory, Wired


@dataclass(slots=True, kw_only=True)
class WiringPolicy:
    """The wishes of the node's pools, which deployments may override, and the history of the Mac, which goes first."""

    pools: Wired = "Auto"
    has_panics: bool = False
    """True while the kernel panics again and again."""

    def wired(self, memory: EngineMemory | None) -> Wired:
        """Return the setting for an engine whose deployment has this `memory`."""
        if self.has_panics:
            return "Off"
        return self.pools if memory is None else memory.wired
