"""Tokens per second that one request gets, by what a token reads: an upper bound, as a Mac computes beside it. Pure.

Experts on the disk: a token waits for those that its routers choose, layer after layer. Public measurements of such
engines lose more than half of the time to that order of reads (mlx-lm#1438), so the bound is said as "at most".
"""

from typing import Final

from models import footprint
from schemas import quantity
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


def describe_streaming(
    geometry: ModelGeometry,
    *,
    need_bytes: int,
    capacity_bytes: int,
    bandwidth_gbps: float,
    disk_gbps: float,
) -> str:
    """Describe a model that is larger than the memory for models, if its experts were on the disk; "" for others."""
    if not geometry.expert_bytes or need_bytes <= capacity_bytes:
        return ""
    show = quantity.show
    resident, experts = need_bytes - geometry.expert_bytes, show(geometry.expert_bytes)
    if resident > capacity_bytes:
        return f"; even without its experts ({experts}) it needs {show(resident)}"
    if disk_gbps <= 0:
        return f"; with its experts ({experts}) on the disk the rest fits, and the disk's rate is not measured yet"
    rate = streamed_tokens_per_s(geometry, bandwidth_gbps=bandwidth_gbps, disk_gbps=disk_gbps)
    return (
        f"; with its experts ({experts}) on the disk, which reads {disk_gbps:.1f} GB/s, a request would get at most "
        f"{rate:.1f} tokens/s, and engines keep all experts in memory"
    )
