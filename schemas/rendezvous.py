"""Where the ranks of one epoch find each other: the same on every Mac, from the Replica alone. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from schemas.formation import Formation, Seat

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
    """Where rank 0 listens for the other ranks of the engine (nodeagent/engine/ranks)."""


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
