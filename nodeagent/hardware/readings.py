"""How a machine is just now, in our own words, and the port to whoever says so. Types only; `machine` fills them."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from nodeagent.hardware.memory import Pressure
from schemas.fabric import NodeFabric

Power: TypeAlias = Literal["Mains", "Battery", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The machine's memory. `level` is macOS' own verdict, `stalled_percent` Linux' (see PSI)."""

    total_bytes: int
    available_bytes: int
    level: Pressure | None = None
    """None where the system gives no verdict."""
    stalled_percent: float = 0.0
    """Share of the last minute in which everything that wanted to run waited for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk that holds models."""

    total_bytes: int
    free_bytes: int
    """What a user may still write; what is kept for root does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """How warm it is, as far as this machine has a way to say so."""

    has_sensor: bool = True
    """False if nothing here would ever tell."""
    throttled: str = ""
    """How the system says that it slows down because of heat; empty if it does not."""
    throttle_count: int = 0
    """How often cores were slowed down since the machine started; only that it grows is news."""
    hottest: str = ""
    """The sensor that is nearest to its limit, or furthest above."""
    celsius: float = 0.0
    limit_celsius: float = 0.0
    """Where the system begins to slow down; 0 if no sensor has such a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot:
    """What only a restart of the machine would mend."""

    wanted_by: str = ""
    """What the system says needs a restart, such as packages; empty if it wants none."""
    total_bytes: int = 0
    wired_bytes: int = 0
    """Memory that the system cannot take back (macOS); 0 where that is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Everything at one moment; None is "could not be read", which is neither good nor bad news."""

    memory: Memory | None = None
    disk: Disk | None = None
    heat: Heat | None = None
    reboot: Reboot | None = None
    power: Power = "Unknown"
    owner_idle_s: float | None = None
    """Seconds since somebody used keyboard or mouse; None if nobody sits at such a machine."""
    fabric: NodeFabric | None = None
    """Its cables; None if they were not looked at this time."""


class Readings(Protocol):
    """Whoever knows how the machine is. Tests and simulations have one of their own."""

    async def take(self) -> Reading:
        """Return how the machine is. Does not block the event loop, and ends within seconds.

        What cannot be read is None in it. May raise OSError if nothing can.
        """
        ...
