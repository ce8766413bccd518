"""Each test of the suite goes every way to etcd."""

import pytest

from tests.store.chaos.ways import WAYS


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name
