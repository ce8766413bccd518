"""Stores of clients in the gateway's state folder: their opening, and calls to them outside of the event loop."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gateway import errors
from machinery.sqlite_file import DatabaseError
from schemas.wire.errors import RefusedError

log = logging.getLogger(__name__)

_T = TypeVar("_T")


async def off_loop(call: Callable[..., _T], *arguments: object) -> _T:
    """Call in a thread. Raises RefusedError: the disk does not do it."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except (DatabaseError, OSError) as error:
        raise RefusedError(errors.batches_failed(str(error))) from error


def open_store(open_folder: Callable[[Path], _T], state_dir: Path | None, name: str) -> _T | None:
    """Return the store in this folder of the state folder; None without one, or if it cannot be used, which is logged."""
    if state_dir is None:
        return None
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open_folder(state_dir / name)
    except (DatabaseError, OSError) as error:
        path = str(state_dir / name)
        log.warning(
            "nothing is stored: the folder cannot be used", extra={"path": path, "why": str(error)}
        )
        return None
