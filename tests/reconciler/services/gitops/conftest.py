"""A real etcd and a leading controller for all tests of a file; each test uses names of its own."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from store.etcd.connect import connect
from store.port import Transport
from tests.support.etcd import running_etcd
from tests.support.reconciler_gitops import leading


@pytest.fixture(scope="module")
async def store(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Transport]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        transport = connect(etcd.address)
        yield transport
        await transport.close()


@pytest.fixture(scope="module")
async def leader(
    store: Transport, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[asyncio.Task[None]]:
    async with leading(store, tmp_path_factory.mktemp("leader")) as task:
        yield task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for repositories."""
    return tmp_path / "repositories"
