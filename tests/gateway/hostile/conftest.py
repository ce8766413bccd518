"""One gateway process for each test process, shared by its tests."""

from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_raw_stand import Stand, running_stand


@pytest.fixture(scope="session")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("hostile")
    async with running_stand(folder, "--allowed-host", "*") as made:
        yield made


@pytest.fixture
async def stand(one: Stand) -> AsyncIterator[Stand]:
    """After each test the gateway must still serve, and no request may have reached another address."""
    one.engine.clear()
    yield one
    assert await one.is_well()
    assert one.elsewhere.connections == 0
