"""A real etcd as a child process, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from machinery.clock import SystemClock
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd


@asynccontextmanager
async def running_etcd(data_dir: Path) -> AsyncIterator[EmbeddedEtcd]:
    """Start an etcd in the folder, and end it afterwards."""
    etcd = EmbeddedEtcd(locate(None), data_dir, SystemClock())
    await etcd.start()
    try:
        yield etcd
    finally:
        await etcd.supervisor.stop()
