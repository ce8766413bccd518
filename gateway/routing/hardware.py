"""What a Mac is worth for a model: the points and minimums of mlx-serving's proposal, as far as gateways can know them.

Its formula is: chip + GPU cores / 2 + memory in GB / 4 + max(0, 50 - 5 x active) + 30 if the model is loaded + priority / 5 - GPU load in
percent / 5. The first three are here, the next two in strategies.py. Left out: a Mac has no priority in this
fleet, and nobody measures the load of its GPU.
"""

from dataclasses import dataclass
from typing import Final

from schemas import chips
from schemas.chips import GIB
from schemas.replica import EndpointHardware

# M1 10, 20, 30, 40; each generation 5 more: M5 30, 40, 50, 60.
_GENERATION: Final = 5
_VARIANTS: Final = {"": 5, "Pro": 15, "Max": 25, "Ultra": 35}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMinimum:
    """What a Mac must have for models from this size on."""

    parameters: int
    """Millions."""
    gpu_cores: int
    memory_gib: int


# The proposal leaves 27 to 30 thousand millions out; they go with those just below.
MINIMUMS: Final = (
    ModelMinimum(parameters=30_000, gpu_cores=30, memory_gib=64),
    ModelMinimum(parameters=13_000, gpu_cores=20, memory_gib=32),
    ModelMinimum(parameters=7_000, gpu_cores=15, memory_gib=16),
    ModelMinimum(parameters=3_000, gpu_cores=10, memory_gib=8),
    ModelMinimum(parameters=1, gpu_cores=8, memory_gib=8),
)


def points(hardware: EndpointHardware) -> float:
    """Return what the Mac counts by itself; what is not known of it counts nothing."""
    named = chips.parse_designation(hardware.chip)
    chip = 0
    if named is not None:
        chip = _GENERATION * named.generation + _VARIANTS.get(named.variant, _VARIANTS[""])
    return chip + hardware.gpu_cores / 2 + hardware.memory_bytes / GIB / 4


def is_fit(parameters: int, hardware: EndpointHardware) -> bool:
    """Return whether the Mac has the minimum for a model of so many million weights; 0: nobody knows.

    A Mac of which nothing is known does not have it: where that is so of all, it makes no difference.
    """
    minimum = next((one for one in MINIMUMS if parameters >= one.parameters), None)
    return minimum is None or (
        hardware.gpu_cores >= minimum.gpu_cores
        and hardware.memory_bytes >= minimum.memory_gib * GIB
    )
