"""Fixtures: one etcd for the tests of a file, a clean store in it for each, and one browser."""

from collections.abc import AsyncIterator
from itertools import count

import pytest
from playwright.async_api import Browser

from store.etcd.connect import connect
from store.namespace import with_prefix
from store.port import Transport
from tests.support.browser import running_browser
from tests.support.etcd import running_etcd

_numbers = count()


@pytest.fixture(scope="module")
async def etcd_transport(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Transport]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        transport = connect(etcd.address)
        yield transport
        await transport.close()


@pytest.fixture
def store(etcd_transport: Transport) -> Transport:
    return with_prefix(etcd_transport, f"/t{next(_numbers)}")


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    """A browser that all pages of a pytest process share: its start is seconds of CPU. Each page has its own session."""
    async with running_browser() as found:
        yield found
