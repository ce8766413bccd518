"""Files of this machine that interrupted downloads left, and their deletion."""

import asyncio
import fcntl
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

from insight.doctor.model_checks import PartialFile
from machinery import processes

_OLD: Final = timedelta(days=1)
_JOURNAL: Final = ".journal"
# A disk of a Mac has a few thousand model files; a folder that was named by mistake must not be read for minutes.
_MAX_ENTRIES: Final = 50_000
_MODELS_FLAG: Final = "--models-dir"


def model_folders(data_dir: Path | None) -> tuple[Path, ...]:
    """Return the folders of models that the processes of a local fleet were started with."""
    if data_dir is None:
        return ()
    paths: dict[Path, None] = {}
    for path in sorted((data_dir / "run").glob("*.pid")):
        record = processes.load_record(path)
        command = () if record is None else record.command
        for flag, value in pairwise(command):
            if flag == _MODELS_FLAG:
                paths[Path(value)] = None
    return tuple(paths)


async def read_partial_files(data_dir: Path | None, now: datetime) -> tuple[PartialFile, ...]:
    """Return the leftovers in the folders of a local fleet; the disk is read in a thread."""
    return await asyncio.to_thread(find_partial_files, model_folders(data_dir), now)


def find_partial_files(folders: tuple[Path, ...], now: datetime) -> tuple[PartialFile, ...]:
    """Return the leftovers below folders: older than a day, without a journal, and used by no process.

    A part with a journal is continued by the next fetch. huggingface_hub's `*.incomplete` never are (hub#4196).
    """
    found = (_leftover(path, now) for folder in folders for path in _walk(folder))
    return tuple(file for file in found if file is not None)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files that may be leftovers, links excluded."""
    count = 0
    for root, _, names in os.walk(folder):
        for name in names:
            count += 1
            if count > _MAX_ENTRIES:
                return
            if name.endswith((".part", ".incomplete")):
                yield Path(root, name)


def _leftover(path: Path, now: datetime) -> PartialFile | None:
    try:
        status = path.lstat()
        has_journal = path.suffix == ".part" and path.with_suffix(_JOURNAL).exists()
        is_old = now.timestamp() - status.st_mtime > _OLD.total_seconds()
        if has_journal or not is_old or path.is_symlink() or _is_locked(path):
            return None
    except OSError:
        return None  # it is gone, or another user's
    return PartialFile(path=str(path), size_bytes=status.st_size)


def _is_locked(path: Path) -> bool:
    """Return whether a download holds the file: ours and huggingface_hub's lock what they write."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def delete_partial_file(found: PartialFile, now: datetime) -> bool:
    """Delete a leftover if it still is one; return whether it was deleted.

    Raises:
        OSError: it cannot be deleted.

    """
    path = Path(found.path)
    if _leftover(path, now) is None:
        return False
    path.unlink()
    return True
