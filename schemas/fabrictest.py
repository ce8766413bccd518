"""FabricTest: a benchmark of the cables of a group, in which its Macs sum arrays together.

fleetctl or the leading reconciler writes it under a lease, so that it ends with its writer. Agents report under their own lease.
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
"""The sizes of mlx-jaccl-cluster's RDMA test."""

# A rank of MLX's ring tries for 31 s to reach its neighbour (MLX 0.32: 1, 2, 4, 8, 16 s); rank 0 waits forever.
CONNECT_TIMEOUT_S = 45
# 64 MB around a ring over Wi-Fi at 3 MB/s.
ROUND_TIMEOUT_S = 60

Size = Annotated[int, Field(ge=4, le=MOST_BYTES)]
Sizes = Annotated[tuple[Size, ...], Field(min_length=1, max_length=32)]


class FabricTestSpec(ApiModel):
    """The ranks, and what they sum."""

    formation: Formation
    """The connections of the ranks, as for a replica."""
    seats: Annotated[tuple[Seat, ...], Field(min_length=2, max_length=MOST_RANKS)]
    """The Mac of each rank."""
    sizes: Sizes = SIZES
    """Bytes of the arrays, one after the other; rounded down to whole numbers of 4 bytes."""
    rounds: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Repetitions of each size, each of them timed."""


class FabricTest(ApiObject):
    """A benchmark of the cables between the Macs of a group; written by `fleetctl fabric bench` and by the leader."""

    kind: Literal["FabricTest"] = "FabricTest"
    spec: FabricTestSpec
    """The ranks, and what they sum."""


class FabricFigures(ApiModel):
    """The results of one size on one rank."""

    size: Size
    """Bytes of the array on each rank."""
    times_us: tuple[float, ...]
    """The time of each round in microseconds."""
    wrong: int = 0
    """Rounds with a wrong sum."""


class FabricRank(ApiModel):
    """The report of one rank's agent about a test."""

    test_uid: str
    """The uid of the test; a later test may have the same name."""
    rank: int
    node: ObjectName
    state: Literal["Running", "Done", "Failed"]
    message: str = ""
    """The reason it failed."""
    figures: tuple[FabricFigures, ...] = ()
    """The results so far."""
