"""Fixtures: a listening gateway, its store, and an HTTP client."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.support.gateway_world import Running, World, running_gateway


@pytest.fixture
def world() -> World:
    return World(MemoryTransport(SystemClock()))


@pytest.fixture
async def gateway(world: World) -> AsyncIterator[Running]:
    async with running_gateway(world.transport) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session
