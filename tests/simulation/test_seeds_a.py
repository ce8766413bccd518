"""Seeds 0 to 124 of the simulated fleet, in blocks; more are beside this file, for another worker.

A thousand of them and long ones run by `pytest -m soak tests/simulation`.
"""

import pytest

from tests.simulation.run import run

BLOCK = 5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, 125, BLOCK))
def test_no_law_is_broken_and_the_fleet_converges(first: int) -> None:
    for seed in range(first, first + BLOCK):
        run(seed)
