"""Each test of the suite goes every way to etcd."""

import pytest

from tests.store.chaos.ways import DEFAULT, WAYS


# Minutes of faults by each way: by the default one always, by the others where there is time.
@pytest.fixture(
    params=[pytest.param(way, marks=[] if way == DEFAULT else pytest.mark.soak) for way in WAYS]
)
def way(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name
