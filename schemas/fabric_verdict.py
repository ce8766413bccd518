"""The verdict over the cables of a group from the figures of a fabric test. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from schemas.fabrictest import MIB, FabricFigures, FabricRank
from schemas.shardgroup import Backend

# mlx-jaccl-cluster measured 7.9 GB/s on average at 64 MB on two M4 Pro; below 5 a cable or a port is faulty.
MIN_HEALTHY_GB_S = 5.0
JUDGED_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSummary:
    """The measurements of one array size."""

    size: int
    """Bytes."""
    rounds: int
    wrong: int
    """Rounds with a wrong sum."""
    least_us: float
    median_us: float
    most_us: float
    average_gb_s: float
    """10^9 bytes of the array per second, over the mean time of the rounds."""
    peak_gb_s: float
    """The same over the fastest round."""


def summarize_rank(found: FabricFigures) -> SizeSummary:
    """Return the summary of the rounds of one size on one rank."""
    # A time of 0 between two clock readings would be an infinite speed.
    times = [max(took, 0.1) for took in found.times_us]
    return SizeSummary(
        size=found.size,
        rounds=len(times),
        wrong=found.wrong,
        least_us=min(times),
        median_us=median(times),
        most_us=max(times),
        average_gb_s=found.size / fmean(times) / 1e3,
        peak_gb_s=found.size / min(times) / 1e3,
    )


def summarize_ranks(ranks: Sequence[FabricRank]) -> tuple[SizeSummary, ...]:
    """Return the summary of each size over all ranks: the times of the slowest rank, and all wrong sums."""
    sizes = [figure.size for figure in ranks[0].figures] if ranks else []
    size_summaries = []
    for size in sizes:
        here = [
            summarize_rank(figure)
            for rank in ranks
            for figure in rank.figures
            if figure.size == size
        ]
        slowest = min(here, key=lambda one: one.average_gb_s)
        wrong = sum(summary.wrong for summary in here)
        size_summaries.append(
            SizeSummary(
                size=size,
                rounds=slowest.rounds,
                wrong=wrong,
                least_us=slowest.least_us,
                median_us=slowest.median_us,
                most_us=slowest.most_us,
                average_gb_s=slowest.average_gb_s,
                peak_gb_s=slowest.peak_gb_s,
            )
        )
    return tuple(size_summaries)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricVerdict:
    """The verdict over the cables of one test."""

    is_healthy: bool
    """False if a sum was wrong or the speed is too low."""
    reason: str
    message: str
    is_speed_judged: bool = False
    """True if there is a speed that these cables must reach, and it was measured."""


def judge(found: Sequence[SizeSummary], backend: Backend) -> FabricVerdict:
    """Return the verdict over the cables."""
    wrong = sum(summary.wrong for summary in found)
    if wrong:
        of = sum(summary.rounds for summary in found)
        return FabricVerdict(
            is_healthy=False,
            reason="WrongSums",
            message=f"{wrong} of {of} sums were wrong, so models would give wrong answers. Replace the cable, and compare "
            "the versions of macOS and MLX (fleetctl version --nodes)",
        )
    large = next((summary for summary in found if summary.size == JUDGED_BYTES), None)
    speed = f"{large.average_gb_s:.2f} GB/s at 64 MB" if large is not None else "sums are right"
    is_speed_judged = backend != "ring" and large is not None
    if is_speed_judged and large is not None and large.average_gb_s <= MIN_HEALTHY_GB_S:
        return FabricVerdict(
            is_speed_judged=True,
            is_healthy=False,
            reason="TooSlow",
            message=f"{speed}, and Thunderbolt 5 reaches more than {MIN_HEALTHY_GB_S:g}: look for a cable or a port that is "
            "not Thunderbolt 5",
        )
    return FabricVerdict(
        is_healthy=True,
        reason="Measured",
        message=f"{speed} over {backend}",
        is_speed_judged=is_speed_judged,
    )
