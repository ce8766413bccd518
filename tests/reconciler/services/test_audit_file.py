"""The audit log as a file: each change once, after restarts, renames, cut-off lines and full disks."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from manifests.change_log import AuditedTransport, ChangeAuthor
from reconciler.services.audit_file import AuditFile
from store import codec
from store.memory import MemoryTransport
from tests.support.waiting import until
from tests.support.world import deployment

CLOCK = SystemClock()
AUTHOR = ChangeAuthor(user="anna@studio", manager="fleetctl", reason="more users")


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(CLOCK)


async def scale(memory: MemoryTransport, replicas: int) -> None:
    audited = AuditedTransport(memory, CLOCK, AUTHOR)
    await audited.commit([], [codec.put_spec(deployment(name="qwen", replicas=replicas))])


def revisions(path: Path) -> list[int]:
    """Return the revisions of the records in a file; a line that is cut off has none."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            tree = json.loads(line)
            assert (tree["user"], tree["reason"]) == ("anna@studio", "more users")
            assert tree["objects"][0]["name"] == "qwen"
            found.append(tree["revision"])
    return found


@asynccontextmanager
async def following(memory: MemoryTransport, path: Path) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(AuditFile(memory, CLOCK, path).run())
        yield
        task.cancel()


async def has(path: Path, count: int) -> None:
    await until(lambda: len(revisions(path)) >= count, what=f"{count} lines")
    assert len(revisions(path)) == len(set(revisions(path))) == count
    assert revisions(path) == sorted(revisions(path))


async def test_each_change_is_written_once_over_restarts(
    memory: MemoryTransport, tmp_path: Path
) -> None:
    path = tmp_path / "audit.jsonl"
    await scale(memory, 1)
    async with following(memory, path):
        await has(path, 1)
        await scale(memory, 2)
        await has(path, 2)
    assert path.stat().st_mode & 0o777 == 0o600
    await scale(memory, 3)
    # A crash in the middle of a line: the record is written again, whole.
    path.write_bytes(path.read_bytes()[:-10])
    async with following(memory, path):
        await has(path, 3)


async def test_a_file_that_was_renamed_is_begun_anew(
    memory: MemoryTransport, tmp_path: Path
) -> None:
    path = tmp_path / "audit.jsonl"
    async with following(memory, path):
        await scale(memory, 1)
        await has(path, 1)
        path.rename(tmp_path / "audit.1")
        await scale(memory, 2)
        await has(path, 1)
    assert len(revisions(tmp_path / "audit.1")) == 1


async def test_a_change_that_comes_while_another_is_written_is_written_too(
    memory: MemoryTransport, tmp_path: Path
) -> None:
    path, is_free = tmp_path / "audit.jsonl", threading.Event()
    loop = asyncio.get_running_loop()
    disk = ThreadPoolExecutor(1)
    loop.set_default_executor(disk)
    try:
        async with following(memory, path):
            await scale(memory, 1)
            await has(path, 1)
            disk.submit(is_free.wait)
            for replicas in (2, 3):
                await scale(memory, replicas)
                for _ in range(50):  # the change is seen, and its line waits for the disk
                    await asyncio.sleep(0)
            is_free.set()
            await has(path, 3)
    finally:
        is_free.set()
        loop.set_default_executor(ThreadPoolExecutor())
        disk.shutdown()


async def test_a_full_disk_delays_lines_and_loses_none(
    memory: MemoryTransport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    async with following(memory, path):
        await scale(memory, 1)
        await until(lambda: bool(caplog.records), what="an error in the log")
        assert caplog.records[0].message == "changes are not written to the audit file"
        path.unlink()
        await scale(memory, 2)
        await has(path, 2)
