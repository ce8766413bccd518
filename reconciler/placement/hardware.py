"""How big a Mac a model wants, and how good a Mac is: the tiers and chip points of the mlx-serving PRD. Pure.

The PRD's other terms (requests in flight, GPU load) change by the second, and are the gateway's business.
"""

from dataclasses import dataclass
from typing import Final

from schemas import chips

_GB: Final = 10**9
_BILLION: Final = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The least Mac for models from so many parameters on."""

    parameters: int
    gpu_cores: int
    memory_bytes: int


# The largest first. The PRD lists 13-27B and 30B+; what lies between is nearer to 13-27B.
TIERS: Final = (
    Tier(parameters=30 * _BILLION, gpu_cores=30, memory_bytes=64 * _GB),
    Tier(parameters=13 * _BILLION, gpu_cores=20, memory_bytes=32 * _GB),
    Tier(parameters=7 * _BILLION, gpu_cores=15, memory_bytes=16 * _GB),
    Tier(parameters=3 * _BILLION, gpu_cores=10, memory_bytes=8 * _GB),
    Tier(parameters=0, gpu_cores=8, memory_bytes=8 * _GB),
)

# By generation: the plain chip, Pro, Max, Ultra.
_POINTS: Final = {
    1: (10, 20, 30, 40),
    2: (15, 25, 35, 45),
    3: (20, 30, 40, 50),
    4: (25, 35, 45, 55),
    5: (30, 40, 50, 60),
}
_VARIANTS: Final = ("", "Pro", "Max", "Ultra")
# The M3 Ultra with 80 cores and 512 GB, the best Mac that was ever sold: 50 + 80/2 + 512/4.
_MOST: Final = 218.0

FASTEST_GBPS: Final = max(chip.bandwidth_gbps for chip in chips.CHIPS)


def tier(parameters: int) -> Tier | None:
    """Return the tier of a model; None if nobody counted its parameters."""
    if parameters <= 0:
        return None
    return next(found for found in TIERS if parameters >= found.parameters)


def qualifies(found: Tier, *, gpu_cores: int, memory_bytes: int) -> bool:
    """Return whether a machine is big enough for the tier."""
    return gpu_cores >= found.gpu_cores and memory_bytes >= found.memory_bytes


def chip_points(name: str) -> int:
    """Return the PRD's points for a chip; a newer generation counts as the newest we know, others as 0."""
    found = chips.parse_designation(name)
    if found is None or found.variant not in _VARIANTS:
        return 0
    return _POINTS[min(found.generation, max(_POINTS))][_VARIANTS.index(found.variant)]


def points(*, chip: str, gpu_cores: int, memory_bytes: int) -> float:
    """Return 0..100 for a machine: chip points + GPU cores / 2 + GB / 4, of the most there can be."""
    found = chip_points(chip) + gpu_cores / 2 + memory_bytes / _GB / 4
    return min(100.0, 100.0 * found / _MOST)
