"""Calls that block on the disk, outside of the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gateway import errors
from machinery.sqlite_file import DatabaseError
from schemas.wire.errors import RefusedError

_T = TypeVar("_T")


async def off_loop(call: Callable[..., _T], *arguments: object) -> _T:
    """Call in a thread. Raises RefusedError: the disk does not do it."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except (DatabaseError, OSError) as error:
        raise RefusedError(errors.batches_failed(str(error))) from error
