"""One gateway process for each test process; what one test leaves behind, the next one must bear."""

from collections.abc import AsyncIterator

import pytest

from tests.gateway.hostile.stand import Stand, standing


@pytest.fixture(scope="session")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    async with standing(tmp_path_factory.mktemp("hostile")) as made:
        yield made


@pytest.fixture
async def stand(one: Stand) -> AsyncIterator[Stand]:
    """Afterwards the gateway must still serve, and nobody may have been led elsewhere."""
    one.engine.clear()
    yield one
    assert await one.is_well()
    assert one.elsewhere.connections == 0
