"""Can the installed mlx-lm split this model over so many Macs? If not, what comes nearest. Pure.

What it can do was found out by a Mac that has the model (nodeagent/geometry/splitting.py), not listed here: mlx-lm
changes, and a model of the same architecture may have other heads.
"""

from collections.abc import Sequence
from typing import Final

from schemas.node import ModelGeometry
from schemas.shardgroup import MOST_RANKS, Parallelism

_BOTH: Final[tuple[Parallelism, ...]] = ("Tensor", "Pipeline")


def ways(geometry: ModelGeometry, size: int) -> tuple[Parallelism, ...]:
    """Return how the model can be split over `size` Macs: Tensor first, which is faster."""
    return tuple(way for way in _BOTH if not complaint(geometry, way, size))


def complaint(geometry: ModelGeometry, parallelism: Parallelism, size: int) -> str:
    """Return why the model cannot be split so over `size` Macs, and what would work; "" if it can."""
    splitting = geometry.splitting
    if splitting is None:
        return (
            f"nobody has looked yet over how many Macs this {geometry.model_type} model can be split; "
            "the agent of a Mac that has its folder does so, within a minute"
        )
    if splitting.unknown:
        return (
            f"over how many Macs this {geometry.model_type} model can be split could not be found out: "
            f"{splitting.unknown}; where this was mended, the agent looks again"
        )
    if size in sizes(geometry, parallelism):
        return ""
    return f"{splitting.basis or geometry.model_type}: {_nearest(geometry, parallelism, size)}"


def sizes(geometry: ModelGeometry, parallelism: Parallelism) -> tuple[int, ...]:
    """Return over how many Macs the model can be split so, the fewest first; nothing if nobody knows."""
    splitting = geometry.splitting
    if splitting is None or splitting.unknown:
        return ()
    if parallelism == "Tensor":
        return tuple(sorted(splitting.tensor))
    most = min(MOST_RANKS, len(splitting.layer_bytes))
    return tuple(range(2, most + 1)) if splitting.is_pipelined else ()


def _nearest(geometry: ModelGeometry, parallelism: Parallelism, size: int) -> str:
    """Return what comes nearest to what does not work."""
    other = _BOTH[1 - _BOTH.index(parallelism)]
    found, instead = sizes(geometry, parallelism), sizes(geometry, other)
    if found:
        rest = f"; {other} works with {size}" if size in instead else ""
        return f"{parallelism} works with {_listed(found)}, not {size}{rest}"
    if instead:
        with_size = "" if size in instead else f", not {size}"
        return (
            f"mlx-lm has no {parallelism} for it; {other} works with {_listed(instead)}{with_size}"
        )
    return "mlx-lm can split it neither by Tensor nor by Pipeline; run it on one Mac, or take another model"


def _listed(found: Sequence[int]) -> str:
    """Return numbers as people say them: "3", "2 and 4", "2 to 16"."""
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    *most, last = map(str, found)
    return f"{', '.join(most)} and {last}" if most else last
