"""More seeds and long scripts, for a night: `pytest -m soak tests/simulation`."""

import pytest

from tests.simulation.run import run


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_no_law_is_broken_by_any_of_a_thousand(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_no_law_is_broken_in_long_scripts(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed, length=40)
