"""Fixtures: each test of the suite runs with every transport."""

import pytest

from tests.support.chaos_transports import DEFAULT, WAYS


# Minutes of faults with each transport: always with the default one, with the others only in the full run.
@pytest.fixture(
    params=[pytest.param(way, marks=[] if way == DEFAULT else pytest.mark.soak) for way in WAYS]
)
def way(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name
