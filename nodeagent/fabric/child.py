"""One rank of the test as a child process: started, listened to, ended. Never imports mlx."""

import asyncio
import contextlib
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nodeagent.fabric import orders
from nodeagent.fabric.orders import CONNECT_S, ROUND_S, Broken, Order, Word

# The child's own alarm ends it within its deadlines; this is for one that is frozen.
_SILENT_S = max(CONNECT_S, ROUND_S) + 5
_WORDS_BYTES = 400


async def follow(order: Order, hear: Callable[[Word], None]) -> str:
    """Run one rank to its end, telling what it says; return what went wrong, or nothing.

    Raises:
        OSError: it could not be started.

    """
    async with _running(order) as process, asyncio.TaskGroup() as group:
        last = group.create_task(_last_words(process))
        why = await _listen(process, hear)
        if why:
            _kill(process)
        code = await process.wait()
        said = await last
    if why or code == 0:
        return why
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    if code == -14:
        ended = f"it stood still for {CONNECT_S} s while connecting, or {ROUND_S} s in one round"
    return f"its process ended: {ended}{f' ({said})' if said else ''}"


@asynccontextmanager
async def _running(order: Order) -> AsyncIterator[Process]:
    """Start the child; whatever happens, it is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        *orders.command(order), stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        _kill(process)
        await process.wait()


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _listen(process: Process, hear: Callable[[Word], None]) -> str:
    assert process.stdout is not None
    why = ""
    while True:
        try:
            async with asyncio.timeout(_SILENT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            return f"its process said nothing for {_SILENT_S} s"
        if not line:
            return why
        word = orders.heard(line)
        if isinstance(word, Broken):
            why = word.why
        if word is not None:
            hear(word)


async def _last_words(process: Process) -> str:
    """Return the end of what it wrote to standard error."""
    assert process.stderr is not None
    found = b""
    while piece := await process.stderr.read(_WORDS_BYTES):
        found = (found + piece)[-_WORDS_BYTES:]
    return " ".join(found.decode(errors="replace").split())
