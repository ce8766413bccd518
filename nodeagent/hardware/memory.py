"""How much memory is free on a Mac now. Pure: parses what vm_stat and sysctl print, decides what to believe.

Free memory alone is a poor signal on macOS (exo#976): the kernel keeps caches and compresses before it frees. Its
own verdict, the pressure level, therefore decides how much of the reclaimable memory counts.
Run against captured output only, not on a Mac.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from nodeagent.hardware.parsing import pairs, positive

PRESSURE_SYSCTL: Final = "kern.memorystatus_vm_pressure_level"


class Pressure(IntEnum):
    """The levels of <sys/kern_memorystatus.h>; there is no 3."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MacMemory:
    free_bytes: int  # free now, speculative reads included
    inactive_bytes: int  # not used lately: reclaimable, some of it only by compressing or swapping
    wired_bytes: int  # never reclaimable; what a killed engine may leave behind until reboot
    pressure: Pressure


def parse(vm_stat: str, sysctl: str) -> MacMemory | None:
    """Read `vm_stat` and `sysctl kern.memorystatus_vm_pressure_level`; None if vm_stat did not answer.

    The page size is read, not assumed: it is 16384 on Apple silicon and 4096 on Intel and under Rosetta.
    """
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    said = pairs(vm_stat)
    if page is None or "Pages free" not in said:
        return None

    def of(*names: str) -> int:
        return sum(positive(said.get(name)) or 0 for name in names) * int(page[1])

    return MacMemory(
        free_bytes=of("Pages free", "Pages speculative"),
        inactive_bytes=of("Pages inactive"),
        wired_bytes=of("Pages wired down"),
        pressure=parse_pressure(sysctl),
    )


def parse_pressure(sysctl: str) -> Pressure:
    """Read the level. One that is missing or new counts as a warning: believe less, refuse nothing."""
    level = positive(pairs(sysctl).get(PRESSURE_SYSCTL))
    return next((known for known in Pressure if known == level), Pressure.WARNING)


def available_bytes(memory: MacMemory) -> int:
    """Return what a new model could take: psutil's free + inactive, as long as the kernel is at ease.

    Under a warning the inactive pages are already being compressed, so only free ones count; when pressure is
    critical nothing does.
    """
    match memory.pressure:
        case Pressure.NORMAL:
            return memory.free_bytes + memory.inactive_bytes
        case Pressure.WARNING:
            return memory.free_bytes
        case Pressure.CRITICAL:
            return 0
