"""The journal file: entries are encoded between other work, and none is lost when that is cancelled."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from gateway.telemetry.journal_file import JournalFile


def encode(entries: Sequence[int]) -> bytes:
    return b"".join(b"%d\n" % entry for entry in entries)


async def test_a_cancelled_batch_is_written_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    file = JournalFile[int](path, encode, file_bytes=1 << 20, older_files=1, failure="no disk")
    file.start()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(file.put(range(1000)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not path.exists(), "other work runs between two slices"
        task.cancel()
    assert task.cancelled()
    file.put_at_once([1000])
    file.close()
    assert path.read_bytes() == encode(range(1001))
    assert file.lost == 0
