"""Seeds of the simulated fleet, in blocks; `python -m tests.simulation SEED` runs one alone and prints its history."""

import pytest

from tests.simulation.run import run
from tests.support.sampling import samples

BLOCK = 5


@pytest.mark.ci
@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, samples(250, quick=60), BLOCK))
def test_no_law_is_broken_and_the_fleet_converges(first: int) -> None:
    for seed in range(first, first + BLOCK):
        run(seed)
