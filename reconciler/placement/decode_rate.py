"""Tokens per second that one request gets, by what a token reads: an upper bound, as a Mac computes beside it. Pure.

Experts on the disk: a token waits for those that its routers choose, layer after layer. Public measurements of such
engines lose more than half of the time to that order of reads (mlx-lm#1438), so the bound is said as "at most".
"""

from typing import Final

from models import footprint
from schemas.node import ModelGeometry

BANDWIDTH_SHARE: Final = 0.7
"""The share of a chip's memory bandwidth that a decode step gets."""


def tokens_per_s(geometry: ModelGeometry, cache_bytes: int, *, bandwidth_gbps: float) -> float:
    """Return the rate of one request whose caches have this size; 0 if the bandwidth is not known."""
    read = footprint.token_read_bytes(geometry) + cache_bytes
    return bandwidth_gbps * 1e9 * BANDWIDTH_SHARE / max(1, read)


def streamed_tokens_per_s(
    geometry: ModelGeometry, *, bandwidth_gbps: float, disk_gbps: float
) -> float:
    """Return the rate of one request if routed experts are read from the disk; 0 if the disk's rate is not known.

    Without a known bandwidth only the disk counts.
    """
    if disk_gbps <= 0:
        return 0.0
    experts = footprint.token_expert_bytes(geometry)
    resident = footprint.token_read_bytes(geometry) - experts
    memory_s = resident / (bandwidth_gbps * 1e9 * BANDWIDTH_SHARE) if bandwidth_gbps > 0 else 0.0
    return 1 / max(1e-9, experts / (disk_gbps * 1e9) + memory_s)
