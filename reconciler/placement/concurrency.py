"""Requests that a Mac works on at once for `concurrency: Auto`, by its hardware. Pure.

A decode step reads the weights once and the cache of each request, and computes one token of each. More requests raise
the total and lower the rate of each, so the number grows until requests would become too slow. The memory proof then
lowers it to what the Mac holds (memory_proof.py). Why these numbers: docs/adr/0010-memory-proof.md.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from reconciler.placement.decode_rate import BANDWIDTH_SHARE
from schemas import quantity
from schemas.quantity import DEFAULT_CONCURRENCY

MOST: Final = 64

_LEAST_TOKENS_PER_S: Final = 10
"""The rate that each request keeps: twice as fast as people read."""
_FLOPS_PER_CORE: Final = 175e9
"""Operations per second of one GPU core of Apple silicon in a step for several requests: half of its peak (M1 325e9, M4 425e9)."""
_FLOPS_PER_PARAMETER: Final = 2
"""One multiplication and one addition for each parameter and token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """The cost of one decode step of a model."""

    weights_bytes: int
    """Bytes of the weights; those of all experts, because the requests of a batch choose different ones."""
    request_bytes: int
    """Bytes of the cache of one request at its longest."""
    parameters: int
    """0 if unknown."""


class Pace(NamedTuple):
    """Requests at once, and what keeps the number from being higher, as in MemoryProof.concurrency_limit."""

    requests: int
    limit: str


def requests_at_pace(cost: DecodeCost, *, bandwidth_gbps: float, gpu_cores: int) -> Pace:
    """Return how many requests keep ten tokens per second each, from DEFAULT_CONCURRENCY to MOST.

    At least the default, because a step for four requests costs hardly more than one. A part of the hardware that is
    not known (0) does not limit; if neither is known, the answer is the default.
    """
    limits = _pace_limits(cost, bandwidth_gbps=bandwidth_gbps, gpu_cores=gpu_cores)
    if not limits:
        return Pace(DEFAULT_CONCURRENCY, "UnknownHardware")
    requests, limit = min(
        *((number, name) for name, number in limits.items()), (float(MOST), "Most")
    )
    if requests < DEFAULT_CONCURRENCY:
        return Pace(DEFAULT_CONCURRENCY, "Least")
    return Pace(int(requests), limit)


def _pace_limits(cost: DecodeCost, *, bandwidth_gbps: float, gpu_cores: int) -> dict[str, float]:
    """Return how many requests each known part of the hardware keeps at the pace; less than 1 if not even one."""
    limits: dict[str, float] = {}
    if bandwidth_gbps > 0:
        readable = bandwidth_gbps * 1e9 * BANDWIDTH_SHARE / _LEAST_TOKENS_PER_S
        limits["MemoryBandwidth"] = (readable - cost.weights_bytes) / max(1, cost.request_bytes)
    if gpu_cores > 0 and cost.parameters > 0:
        needed = _FLOPS_PER_PARAMETER * cost.parameters * _LEAST_TOKENS_PER_S
        limits["GPUCores"] = gpu_cores * _FLOPS_PER_CORE / needed
    return limits


def describe_pace(cost: DecodeCost, *, bandwidth_gbps: float, gpu_cores: int) -> str:
    """Return the figures that give the number of requests, and the number of each part of the hardware."""
    limits = _pace_limits(cost, bandwidth_gbps=bandwidth_gbps, gpu_cores=gpu_cores)
    show, texts = quantity.show, []
    if "MemoryBandwidth" in limits:
        texts.append(
            f"{BANDWIDTH_SHARE:.0%} of {bandwidth_gbps:g} GB/s reads weights of {show(cost.weights_bytes)} and "
            f"{show(cost.request_bytes)} of cache for each of {_whole(limits['MemoryBandwidth'])} requests"
        )
    if "GPUCores" in limits:
        texts.append(
            f"{gpu_cores} GPU cores compute {cost.parameters / 1e9:.1f} billion parameters for "
            f"{_whole(limits['GPUCores'])}"
        )
    if not texts:
        return f"bandwidth and GPU cores are not known: {DEFAULT_CONCURRENCY}"
    return f"{_LEAST_TOKENS_PER_S} times a second, {', '.join(texts)}; at least {DEFAULT_CONCURRENCY}, at most {MOST}"


def _whole(requests: float) -> str:
    return f"{requests:,.0f}" if requests >= 1 else "less than one"
