"""Formation: how the ranks of one replica work together, from one epoch to the next.

Where the ranks of one epoch find each other: the same on every Mac, from the Replica alone. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from zlib import crc32

from pydantic import Field

from schemas.meta import ApiModel, ObjectName
from schemas.shardgroup import FIRST_PORT, Backend, Environment, Parallelism


class Seat(ApiModel):
    """One rank's Mac, and how the others reach it; the place in the list is the rank."""

    node: ObjectName
    addresses: tuple[str, ...] = ()
    """Its addresses on the cables of the group, one per link; at least one where there are several ranks."""
    rdma: tuple[tuple[str, ...], ...] = ()
    """Its RDMA devices towards each rank, in rank order and empty towards itself; () for a ring."""
    meeting: str = ""
    """Where every rank reaches this one if it is the first; empty for the first of its addresses. A cable's address
    is known at its two ends alone."""


class GoldenAnswer(ApiModel):
    """The answer by which a group's is checked before it serves: greedy tokens of a fixed prompt."""

    pieces: tuple[str, ...]
    """The text of each token."""
    logprobs: tuple[float, ...]
    """The natural logarithm of each token's probability."""
    is_reference: bool = False
    """Whether one process made it, alone, with all of the model; else it is an earlier epoch's."""


class Formation(ApiModel):
    """How the ranks of one replica work together. A new epoch is a new start of all of them."""

    group: ObjectName
    """The ShardGroup."""
    epoch: Annotated[int, Field(ge=1)] = 1
    """Counts up with every start of all ranks: one of an older epoch can neither join nor serve."""
    backend: Backend = "ring"
    parallelism: Parallelism = "Tensor"
    port: int = FIRST_PORT
    """The lowest port that ranks of the group listen on (schemas/formation.py says which)."""
    environment: Environment = Field(default_factory=dict)
    """Variables for every rank."""
    secret: str = ""
    """What the ranks of this epoch know each other by; worth nothing once it is over."""
    formed_at: datetime
    """When the epoch began."""
    failures: int = 0
    """Epochs in a row that ended before they had served for a minute."""
    fallback: int = 0
    """What is run: 0 the group as it is declared, n its n-th fallback."""
    because: str = ""
    """Why the epoch before this one ended."""
    fits_single: bool = False
    """Whether the Mac of rank 0 has room for the whole model: then the golden answer is made there first."""
    golden: GoldenAnswer | None = None
    """What an earlier epoch answered, if there was one of this model."""


# An epoch that is over may still hold its ports, or TCP does for it: the next one takes others. 256 windows of
# 32 ports stay below the ports that Linux (32768) and macOS (49152) give to anybody.
WINDOWS = 256
WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """All that MLX and our own channel need to connect the ranks of one epoch."""

    hosts: tuple[tuple[str, ...], ...]
    """For each rank the "address:port" it listens on, one per link: MLX_HOSTFILE."""
    devices: tuple[tuple[tuple[str, ...], ...], ...] | None
    """For each rank its RDMA devices towards each rank: MLX_IBV_DEVICES; None for a ring."""
    coordinator: tuple[str, int]
    """Where rank 0 listens for JACCL: MLX_JACCL_COORDINATOR."""
    control: tuple[str, int]
    """Where rank 0 listens for the other ranks of the engine (engine/ranks)."""


def rendezvous(uid: str, formation: Formation, seats: Sequence[Seat]) -> Rendezvous:
    """Return where the ranks of the replica `uid` meet in the formation's epoch.

    Raises:
        ValueError: a seat has no address, or there are more links than ports.

    """
    links = sum(len(seat.addresses) for seat in seats)
    if any(not seat.addresses for seat in seats):
        raise ValueError("a rank has no address on the group's cables")
    if links > WIDTH - 2:
        raise ValueError(f"{links} links need {links + 2} ports, and an epoch has {WIDTH}")
    # Not a hash of both: every 256th time that would give two epochs in a row the same window.
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
