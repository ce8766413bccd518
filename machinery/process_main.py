"""Start and stop of a long-running process: uvloop, signal handlers, exit code."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

log = logging.getLogger(__name__)


def run_until_signal(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run `main` until it ends, or until SIGTERM or SIGINT cancels it; return the exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_guarded(main))


async def _guarded(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    is_stopping = False

    def stop() -> None:
        nonlocal is_stopping
        is_stopping = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await main()
    except asyncio.CancelledError:
        if not is_stopping:
            raise
    except (
        Exception
    ):  # the outermost edge: log the defect, and let the supervisor restart the process
        log.exception("the process ends because of a defect")
        return 1
    return 0
