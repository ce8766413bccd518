"""Formation: how the ranks of one replica work together in an epoch, and the ports at which they meet. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from zlib import crc32

from pydantic import Field

from schemas.meta import ApiModel, ObjectName
from schemas.shardgroup import FIRST_PORT, Backend, Environment, Parallelism


class Seat(ApiModel):
    """The Mac of one rank, and how the others reach it; the position in the list is the rank."""

    node: ObjectName
    addresses: tuple[str, ...] = ()
    """Its addresses on the cables of the group, one per link; at least one where there are several ranks."""
    rdma: tuple[tuple[str, ...], ...] = ()
    """Its RDMA devices towards each rank, in rank order, empty towards itself; () for a ring."""
    meeting: str = ""
    """The address at which every rank reaches this one if it is rank 0; empty for the first of its addresses. The
    address of a cable is known at its two ends only."""


class GoldenAnswer(ApiModel):
    """The reference answer that a group must give before it serves: greedy tokens of a fixed prompt."""

    pieces: tuple[str, ...]
    """The text of each token."""
    logprobs: tuple[float, ...]
    """The natural logarithm of each token's probability."""
    is_reference: bool = False
    """True if a single process with the whole model made it; false if an earlier epoch did."""


class Formation(ApiModel):
    """The cooperation of the ranks of one replica. A new epoch restarts all of them."""

    group: ObjectName
    """The ShardGroup."""
    epoch: Annotated[int, Field(ge=1)] = 1
    """Counts every start of all ranks; a rank of an older epoch can neither join nor serve."""
    backend: Backend = "ring"
    parallelism: Parallelism = "Tensor"
    port: int = FIRST_PORT
    """The lowest port that ranks of the group listen on; `rendezvous` derives the ports of an epoch."""
    environment: Environment = Field(default_factory=dict)
    """Variables for every rank."""
    formed_at: datetime
    """Start of the epoch."""
    failures: int = 0
    """Consecutive epochs that ended before they had served for a minute."""
    fallback: int = 0
    """The variant in use: 0 is the group as declared, n its n-th fallback."""
    because: str = ""
    """The reason the previous epoch ended."""
    fits_single: bool = False
    """True if the Mac of rank 0 has room for the whole model: then it makes the golden answer first."""
    golden: GoldenAnswer | None = None
    """The answer of an earlier epoch of this model, if there was one."""
    awaits_files: bool = False
    """True until each Mac has the files of its rank: no rank starts before. Models of a hub only."""


class EpochSecret(ApiModel):
    """The shared secret of the ranks of one epoch: the value of `secret/GroupEpoch/<node>/<replica>`, for each rank's node.

    It is no part of the Replica, which every node may read. It is worthless once the epoch is over.
    """

    epoch: Annotated[int, Field(ge=1)]
    secret: str = Field(repr=False)


# The ports of an epoch that is over may still be in use, or in TIME_WAIT, so the next epoch takes others. 256 windows
# of 32 ports stay below the ephemeral ports of Linux (32768) and macOS (49152).
WINDOWS = 256
WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Addresses and ports that MLX and the engine's own channel need to connect the ranks of one epoch."""

    hosts: tuple[tuple[str, ...], ...]
    """For each rank the "address:port" it listens on, one per link: MLX_HOSTFILE."""
    devices: tuple[tuple[tuple[str, ...], ...], ...] | None
    """For each rank its RDMA devices towards each rank: MLX_IBV_DEVICES; None for a ring."""
    coordinator: tuple[str, int]
    """Host and port at which rank 0 listens for JACCL: MLX_JACCL_COORDINATOR."""
    control: tuple[str, int]
    """Host and port at which rank 0 listens for the other ranks of the engine (engine/ranks)."""


def rendezvous(uid: str, formation: Formation, seats: Sequence[Seat]) -> Rendezvous:
    """Return the addresses of the replica `uid` in the formation's epoch; every rank derives the same ones.

    Raises:
        ValueError: a seat has no address, or there are more links than ports.

    """
    links = sum(len(seat.addresses) for seat in seats)
    if any(not seat.addresses for seat in seats):
        raise ValueError("a rank has no address on the group's cables")
    if links > WIDTH - 2:
        raise ValueError(f"{links} links need {links + 2} ports, and an epoch has {WIDTH}")
    # Not one hash of both: every 256th time two consecutive epochs would get the same window.
    first = formation.port + (crc32(uid.encode()) + formation.epoch) % WINDOWS * WIDTH
    lead = seats[0].meeting or seats[0].addresses[0]
    hosts: list[tuple[str, ...]] = []
    port = first + 2
    for seat in seats:
        hosts.append(tuple(f"{a}:{port + n}" for n, a in enumerate(seat.addresses)))
        port += len(seat.addresses)
    return Rendezvous(
        hosts=tuple(hosts),
        devices=None if formation.backend == "ring" else tuple(seat.rdma for seat in seats),
        coordinator=(lead, first + 1),
        control=(lead, first),
    )
