"""The verdict over cables: the slowest rank counts, wrong sums come first, and only JACCL has a least speed."""

import pytest

from fleetctl.fabric.bench import verdict_text
from schemas import fabric_verdict
from schemas.fabrictest import MIB, FabricFigures, FabricRank
from schemas.shardgroup import Backend


def rank(number: int, *found: FabricFigures) -> FabricRank:
    return FabricRank(test_uid="u", rank=number, node=f"n-{number}", state="Done", figures=found)


def measured(size: int, *times_us: float, wrong: int = 0) -> FabricFigures:
    return FabricFigures(size=size, times_us=times_us, wrong=wrong)


def test_a_row_is_that_of_the_slowest_rank() -> None:
    (row,) = fabric_verdict.summarize_ranks(
        [
            rank(0, measured(64 * MIB, 8_000, 12_000)),
            rank(1, measured(64 * MIB, 10_000, 30_000, wrong=1)),
        ]
    )
    assert (row.rounds, row.wrong, row.least_us, row.median_us, row.most_us) == (2, 1, 10_000, 20_000, 30_000)  # fmt: skip
    assert row.average_gb_s == pytest.approx(64 * MIB / 20_000e-6 / 1e9)
    assert row.peak_gb_s == pytest.approx(64 * MIB / 10_000e-6 / 1e9)


# 64 MiB in 13.4 ms is 5.008 GB/s, in 13.5 ms 4.971.
@pytest.mark.parametrize(("backend", "found", "reason"), [
    ("jaccl", measured(64 * MIB, 13_400), "Measured"),
    ("jaccl", measured(64 * MIB, 13_500), "TooSlow"),
    ("jaccl-ring", measured(64 * MIB, 13_500), "TooSlow"),
    ("ring", measured(64 * MIB, 1e7), "Measured"),
    ("jaccl", measured(4 * MIB, 1e7), "Measured"),
    ("ring", measured(4096, 1, wrong=1), "WrongSums"),
    ("jaccl", measured(64 * MIB, 13_400, wrong=1), "WrongSums"),
])  # fmt: skip
def test_what_figures_say_of_cables(backend: Backend, found: FabricFigures, reason: str) -> None:
    verdict = fabric_verdict.judge([fabric_verdict.summarize_rank(found)], backend)
    assert (verdict.reason, verdict.is_healthy) == (reason, reason == "Measured")
    assert verdict.message
    says_healthy = verdict_text(verdict).startswith("healthy")
    assert says_healthy == (backend != "ring" and found.size == 64 * MIB and reason == "Measured")
