"""Start and stop of a long-running process: uvloop, signal handlers, exit code."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from machinery.file_limit import raise_file_limit

log = logging.getLogger(__name__)


GRACE_S = 5.0
"""The time to end, in seconds, for a process whose end must not wait for others: the store may not answer."""


def run_until_signal(
    main: Callable[[], Coroutine[Any, Any, None]], *, grace_s: float | None = None
) -> int:
    """Run `main` until it ends, or until SIGTERM or SIGINT cancels it; return the exit code.

    A process that has not ended `grace_s` seconds after the signal is ended as if it were killed; None: it may take
    any time.
    """
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_guarded(main, grace_s))


def _give_up(grace_s: float) -> None:
    log.error("the process did not end in time after a signal", extra={"grace_s": grace_s})
    os._exit(1)


async def _guarded(main: Callable[[], Coroutine[Any, Any, None]], grace_s: float | None) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    is_stopping = False

    def stop() -> None:
        nonlocal is_stopping
        is_stopping = True
        task.cancel()
        if grace_s is not None:
            loop.call_later(grace_s, _give_up, grace_s)

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
