"""Fixtures: one etcd for the tests of this folder, and a clean store in it for each."""

from collections.abc import AsyncIterator
from itertools import count

import pytest

from store.etcd.connect import connect
from store.namespace import with_prefix
from store.port import Transport
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
