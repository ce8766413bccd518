"""Seeds 0 to 124 of the simulated fleet, in blocks; test_seeds_b.py has more, for another worker.

`pytest -m soak tests/simulation` runs a thousand of them, and long ones.
"""

import pytest

from tests.simulation.run import run

BLOCK = 5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, 125, BLOCK))
def test_no_law_is_broken_and_the_fleet_converges(first: int) -> None:
    for seed in range(first, first + BLOCK):
        run(seed)
