"""FabricTest: Macs of a group sum arrays together, and say how fast and whether rightly.

fleetctl writes it under a lease, and it vanishes with the command; agents report under their own lease.
"""

from typing import Annotated, Literal

from pydantic import Field

from schemas.formation import Formation, Seat
from schemas.meta import ApiModel, ApiObject, ObjectName
from schemas.shardgroup import MOST_RANKS

KIB, MIB = 2**10, 2**20
MOST_BYTES = 1024 * MIB
SIZES = tuple(KIB * 4**n for n in range(1, 9))
"""4 KB to 64 MB, in steps of four."""
QUICK_SIZES = (4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
"""Those of mlx-jaccl-cluster's RDMA test."""

Size = Annotated[int, Field(ge=4, le=MOST_BYTES)]
Sizes = Annotated[tuple[Size, ...], Field(min_length=1, max_length=32)]


class FabricTestSpec(ApiModel):
    """What is summed, how often, and by whom."""

    formation: Formation
    """How the ranks connect; as for a replica (schemas/formation.py)."""
    seats: Annotated[tuple[Seat, ...], Field(min_length=2, max_length=MOST_RANKS)]
    """The Mac of each rank."""
    sizes: Sizes = SIZES
    """Bytes of the arrays, one after the other; what is no whole number of 4 bytes is rounded down."""
    rounds: Annotated[int, Field(ge=1, le=10_000)] = 20
    """How often each is summed and timed."""


class FabricTest(ApiObject):
    """A test of the cables between the Macs of a group; written by `fleetctl fabric bench`."""

    kind: Literal["FabricTest"] = "FabricTest"
    spec: FabricTestSpec
    """What is summed, how often, and by whom."""


class FabricFigures(ApiModel):
    """How one size went on one rank."""

    size: Size
    """Bytes of the array on each rank."""
    times_us: tuple[float, ...]
    """What each round took, in microseconds."""
    wrong: int = 0
    """Rounds whose sum was not right."""


class FabricRank(ApiModel):
    """What the agent of one rank says of a test."""

    test_uid: str
    """Which test of that name."""
    rank: int
    node: ObjectName
    state: Literal["Running", "Done", "Failed"]
    message: str = ""
    """Why it failed."""
    figures: tuple[FabricFigures, ...] = ()
    """The sizes that are done."""
