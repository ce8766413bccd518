"""Settings of engines for the memory of a Mac: a part of ModelDeployment and of NodePool."""

from typing import Literal, TypeAlias

from schemas.meta import ApiModel

Wired: TypeAlias = Literal["Auto", "Off"]


class EngineMemory(ApiModel):
    """The memory of engines."""

    wired: Wired
    """Auto: an engine wires its model, so that macOS cannot page it out. Off: it never does, which avoids a kernel panic
    of macOS 26 (IOGPUMemory.cpp:550), and makes a model that nearly fills the Mac many times slower."""
