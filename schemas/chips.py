"""The Apple chips that Macs were sold with, as data. Knows no machine, reads nothing.

One row per chip, and one per GPU bin where bins differ in bandwidth. Sources: huggingface.js `hardware-apple.ts`
(PR #1937) for cores and memory options; Ars Technica (M4 Max), TechPowerUp (M3 Ultra, M4 Max) and
mikeshouts.com, techdeskweekly, cputronic (M5 family) for bandwidth; Apple TN3205 and exo's README for
Thunderbolt 5, which is what RDMA needs. Collected in the project's facts, section 4.1.

Left out on purpose: an M4 Ultra was never sold, and the M5 Ultra is a rumour. A chip that is not listed is
None, never a row of zeroes (exo#1752 showed 0/0 memory on a new chip); the caller uses what sysctl says.
"""

import re
from dataclasses import dataclass
from typing import Final

GIB: Final = 2**30

_DESIGNATION: Final = re.compile(r"Apple M([1-9]\d*)(?: ([A-Z][a-z]+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Designation:
    """What a chip's name says by itself, so that it works for chips which are not in the table."""

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

    @property
    def rdma_capable(self) -> bool:
        return self.thunderbolt == "5"


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
)


def parse_designation(name: str) -> Designation | None:
    """Read generation and variant: "Apple M4 Pro" is 4 and "Pro". A virtual machine's chip has neither."""
    match = _DESIGNATION.fullmatch(_normal(name))
    return Designation(generation=int(match[1]), variant=match[2] or "") if match else None


def find_chip(name: str, *, gpu_cores: int | None, memory_bytes: int | None) -> Chip | None:
    """Return the row for this machine; where the bins differ GPU cores decide, then memory, then caution."""
    rows = [chip for chip in CHIPS if chip.name == _normal(name)]
    if not rows:
        return None
    by_cores = [chip for chip in rows if gpu_cores in chip.gpu_cores]
    by_memory = [chip for chip in rows if memory_bytes in {gib * GIB for gib in chip.memory_gib}]
    # With neither known, promising the slower bin errs on the side that disappoints nobody.
    return min(by_cores or by_memory or rows, key=lambda chip: chip.bandwidth_gbps)


def _normal(name: str) -> str:
    return " ".join(name.split())
