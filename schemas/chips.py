"""Apple silicon: the chips that Macs were sold with, points of a Mac, and the minimum Mac for a size of model.

The table has one row per chip, and one per GPU bin where bins differ in bandwidth. Sources: huggingface.js
`hardware-apple.ts` (PR #1937) for cores and memory options; Ars Technica (M4 Max), TechPowerUp (M3 Ultra, M4 Max) and
mikeshouts.com, techdeskweekly, cputronic (M5 family) for bandwidth; Apple TN3205 and exo's README for Thunderbolt 5,
which RDMA needs; Apple's newsroom of 2026-08-25 and its pages as chimeraforge's tests quote them (M6, M5 Ultra). An M4
Ultra was never sold. A chip that is not listed is measured (engine/device_check.py), and `rdma_ctl` says what it can do.

Points and size tiers are those of the mlx-serving proposal. Its "GB" are GiB here: Apple sells memory in GiB, and
`hw.memsize` reports 2**30 bytes for each. The gateway (strategy HardwareAware) and the reconciler (score `hardware`,
placement tiers) both call this module, so that they cannot disagree.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

GIB: Final = 2**30

_DESIGNATION: Final = re.compile(r"Apple M([1-9]\d*)(?: ([A-Z][a-z]+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Designation:
    """Generation and variant as a chip's name gives them; works for chips that are not in the table."""

    generation: int
    variant: str  # "", "Pro", "Max", "Ultra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip as sold: each tuple lists the options, smallest first."""

    name: str
    cpu_cores: tuple[int, ...]
    gpu_cores: tuple[int, ...]
    memory_gib: tuple[int, ...]
    bandwidth_gbps: float
    thunderbolt: str  # "3 or 4" where it depends on the Mac the chip sits in


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTier:
    """The minimum Mac for models from `min_parameters` parameters on."""

    min_parameters: int
    min_gpu_cores: int
    min_memory_bytes: int


def _chip(
    name: str,
    cores: tuple[tuple[int, ...], tuple[int, ...]],
    memory_gib: tuple[int, ...],
    bandwidth_gbps: float,
    thunderbolt: str,
) -> Chip:
    return Chip(
        name=f"Apple {name}",
        cpu_cores=cores[0],
        gpu_cores=cores[1],
        memory_gib=memory_gib,
        bandwidth_gbps=bandwidth_gbps,
        thunderbolt=thunderbolt,
    )


CHIPS: Final = (
    _chip("M1", ((8,), (7, 8)), (8, 16), 68.25, "3"),
    _chip("M1 Pro", ((8, 10), (14, 16)), (16, 32), 200, "4"),
    _chip("M1 Max", ((10,), (24, 32)), (32, 64), 400, "4"),
    _chip("M1 Ultra", ((20,), (48, 64)), (64, 128), 800, "4"),
    _chip("M2", ((8,), (8, 10)), (8, 16, 24), 100, "3 or 4"),
    _chip("M2 Pro", ((10, 12), (16, 19)), (16, 32), 200, "4"),
    _chip("M2 Max", ((12,), (30, 38)), (32, 64, 96), 400, "4"),
    _chip("M2 Ultra", ((24,), (60, 76)), (64, 128, 192), 800, "4"),
    _chip("M3", ((8,), (8, 10)), (8, 16, 24), 100, "3 or 4"),
    _chip("M3 Pro", ((11, 12), (14, 18)), (18, 36), 150, "4"),
    _chip("M3 Max", ((14, 16), (30,)), (36, 96), 300, "4"),
    _chip("M3 Max", ((14, 16), (40,)), (48, 64, 128), 400, "4"),
    _chip("M3 Ultra", ((28, 32), (60, 80)), (96, 256, 512), 819, "5"),
    _chip("M4", ((8, 10), (8, 10)), (16, 24, 32), 120, "4"),
    _chip("M4 Pro", ((12, 14), (16, 20)), (24, 48, 64), 273, "5"),
    _chip("M4 Max", ((14, 16), (32,)), (36,), 410, "5"),
    _chip("M4 Max", ((14, 16), (40,)), (48, 64, 128), 546, "5"),
    _chip("M5", ((9, 10), (8, 10)), (16, 24, 32), 153, "4"),
    _chip("M5 Pro", ((15, 18), (16, 20)), (24, 48, 64), 307, "5"),
    _chip("M5 Max", ((18,), (32,)), (36,), 460, "5"),  # 460 is not verified
    _chip("M5 Max", ((18,), (40,)), (48, 64, 128), 614, "5"),
    _chip("M5 Ultra", ((36,), (64, 80)), (96, 256, 512), 1200, "5"),
    # Its ports are not verified.
    _chip("M6", ((12,), (12,)), (16,), 153, "4 or 5"),
    _chip("M6", ((12,), (12,)), (24, 32), 170, "4 or 5"),
)


MEMORY_GIB: Final = tuple(sorted({size for chip in CHIPS for size in chip.memory_gib}))
"""Sizes of unified memory that Apple has sold, the smallest first."""

# The largest first. The proposal lists 13 to 27 and 30 billion parameters; 27 to 30 count as 13 to 27.
SIZE_TIERS: Final = (
    SizeTier(min_parameters=30 * 10**9, min_gpu_cores=30, min_memory_bytes=64 * GIB),
    SizeTier(min_parameters=13 * 10**9, min_gpu_cores=20, min_memory_bytes=32 * GIB),
    SizeTier(min_parameters=7 * 10**9, min_gpu_cores=15, min_memory_bytes=16 * GIB),
    SizeTier(min_parameters=3 * 10**9, min_gpu_cores=10, min_memory_bytes=8 * GIB),
    SizeTier(min_parameters=1, min_gpu_cores=8, min_memory_bytes=8 * GIB),
)

# The proposal's table (M1 10, 20, 30, 40 for the plain chip, Pro, Max and Ultra, up to M5 30, 40, 50, 60) as a sum.
_POINTS_PER_GENERATION: Final = 5
_VARIANT_POINTS: Final = {"": 5, "Pro": 15, "Max": 25, "Ultra": 35}

# That of an M3 Ultra, and not of the fastest chip in the table: a new row would change which of two older Macs is chosen.
FULL_SPEED_GBPS: Final = 819.0
"""The bandwidth from which on a Mac has the best score for speed."""


# A fleet has few kinds of machines, and many of each.
_MACHINES: Final = 1024


@lru_cache(maxsize=_MACHINES)
def parse_designation(name: str) -> Designation | None:
    """Return generation and variant: 4 and "Pro" of "Apple M4 Pro"; None for other names, such as a virtual chip's."""
    match = _DESIGNATION.fullmatch(_normalize(name))
    return Designation(generation=int(match[1]), variant=match[2] or "") if match else None


@lru_cache(maxsize=_MACHINES)
def find_chip(name: str, *, gpu_cores: int | None, memory_bytes: int | None) -> Chip | None:
    """Return the row for a machine; GPU cores choose between bins, then memory, then the lower bandwidth.

    A chip that is not listed is None, never a row of zeroes (exo#1752 shows 0/0 memory on a new chip).
    """
    rows = [chip for chip in CHIPS if chip.name == _normalize(name)]
    if not rows:
        return None
    by_cores = [chip for chip in rows if gpu_cores in chip.gpu_cores] or rows
    by_memory = [c for c in by_cores if memory_bytes in {gib * GIB for gib in c.memory_gib}]
    return min(by_memory or by_cores, key=lambda chip: chip.bandwidth_gbps)


def bandwidths_with(memory_bytes: int) -> tuple[float, float]:
    """Return the least and the most bandwidth in GB/s of chips sold with so much memory; zeroes if there is none."""
    sold = [c.bandwidth_gbps for c in CHIPS if memory_bytes in {gib * GIB for gib in c.memory_gib}]
    return (min(sold), max(sold)) if sold else (0.0, 0.0)


def chip_points(name: str) -> int:
    """Return the points of a chip by its name; 0 if the name is not one of Apple silicon.

    A generation that is newer than the table continues its line: each has been at least as fast as the one before,
    and a cap would rank a new Mac as an old one until the next release. A variant that is not known counts as the
    plain chip.
    """
    designation = parse_designation(name)
    if designation is None:
        return 0
    variant = _VARIANT_POINTS.get(designation.variant, _VARIANT_POINTS[""])
    return _POINTS_PER_GENERATION * designation.generation + variant


def machine_points(*, chip: str, gpu_cores: int, memory_bytes: int) -> float:
    """Return the points of a Mac: chip points + GPU cores / 2 + memory in GiB / 4. Unknown parts (0, "") add nothing.

    The proposal's other terms depend on load and are added by the gateway's strategy.
    """
    return chip_points(chip) + gpu_cores / 2 + memory_bytes / GIB / 4


def size_tier(parameters: int) -> SizeTier | None:
    """Return the tier of a model with so many parameters; None if the number is not known (0)."""
    return next((tier for tier in SIZE_TIERS if parameters >= tier.min_parameters), None)


def meets_tier(tier: SizeTier | None, *, gpu_cores: int, memory_bytes: int) -> bool:
    """Return whether a Mac has the minimum of the tier; without a tier every Mac has it.

    A Mac of which nothing is known (0 cores, 0 bytes) does not have it.
    """
    return tier is None or (
        gpu_cores >= tier.min_gpu_cores and memory_bytes >= tier.min_memory_bytes
    )


def supported_tiers(*, gpu_cores: int, memory_bytes: int) -> tuple[str, ...]:
    """Return the size tiers whose minimum a Mac has, such as "7B-13B", the largest first."""
    found, above = [], ""
    for tier in SIZE_TIERS:
        billions = tier.min_parameters // 10**9
        label = f"{billions}B-{above}" if above else f"{billions}B+"
        if meets_tier(tier, gpu_cores=gpu_cores, memory_bytes=memory_bytes):
            found.append(label if billions else f"<{above}")
        above = f"{billions}B"
    return tuple(found)


def _normalize(name: str) -> str:
    return " ".join(name.split())


MOST_POINTS: Final = max(
    machine_points(
        chip=chip.name, gpu_cores=chip.gpu_cores[-1], memory_bytes=chip.memory_gib[-1] * GIB
    )
    for chip in CHIPS
)
"""The points of the best Mac that was sold: an M5 Ultra with 80 GPU cores and 512 GiB has 60 + 40 + 128 = 228."""
