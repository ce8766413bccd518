"""Fixtures: a listening gateway, its store, and an HTTP client."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.support.gateway_world import Running, World, running_gateway


@pytest.fixture
def world() -> World:
    return World(MemoryTransport(SystemClock()))


@pytest.fixture
def patience_s() -> float:
    """Return how long the gateway waits for engines; tests that wait for its end parametrize it."""
    return 20.0


@pytest.fixture
async def gateway(world: World, patience_s: float) -> AsyncIterator[Running]:
    limits = GatewayLimits(
        drain_timeout_s=0.0, resume_timeout_s=patience_s, hold_timeout_s=patience_s
    )
    async with running_gateway(world.transport, limits) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session
