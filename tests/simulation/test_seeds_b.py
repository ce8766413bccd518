"""Seeds 125 to 249 of the simulated fleet, in blocks; see test_seeds_a.py."""

import pytest

from tests.simulation.run import run
from tests.simulation.test_seeds_a import BLOCK


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(125, 250, BLOCK))
def test_no_law_is_broken_and_the_fleet_converges(first: int) -> None:
    for seed in range(first, first + BLOCK):
        run(seed)
