"""One gateway process for each test process, shared by its tests; in the full tier another one with HTTPS."""

from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_raw_stand import Stand, running_stand
from tests.support.store_certificates import Authority


@pytest.fixture(scope="session", params=["http", pytest.param("https", marks=pytest.mark.full)])
async def one(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("hostile")
    authority = Authority(folder, "ours") if request.param == "https" else None
    async with running_stand(folder, "--allowed-host", "*", authority=authority) as made:
        yield made


@pytest.fixture
async def stand(one: Stand) -> AsyncIterator[Stand]:
    """After each test the gateway must still serve, and no request may have reached another address."""
    one.engine.clear()
    yield one
    assert await one.is_well()
    assert one.elsewhere.connections == 0
