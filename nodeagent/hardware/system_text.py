"""What all the readers share: text to pairs, text to numbers. Pure; never raises, "not there" is None.

Reads one small file of the system's. Never raises: what is not there, or not ours to read, is empty.

Runs one short command and returns what it printed. Never raises for what the command does, never waits for ever.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Final


def parse_pairs(text: str, *, separator: str = ":") -> dict[str, str]:
    """Split lines of "key<separator> value"; of a repeated key the first value counts.

    /proc/cpuinfo repeats its keys once per core, sysctl and sw_vers never do.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, separated, value = line.partition(separator)
        if separated:
            found.setdefault(key.strip().strip('"'), value.strip())
    return found


def parse_positive(text: str | None) -> int | None:
    """Read the whole number a text starts with. Zero counts as "not known": no quantity here can be 0."""
    match = re.match(r"\s*(\d+)", text or "", re.ASCII)
    return (int(match[1]) or None) if match else None


log = logging.getLogger(__name__)


def read_text(path: Path) -> str:
    """Return what the file says; "" if it cannot be read.

    A sensor that is asleep fails at every look, so that is no news for the log.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        log.debug("file not read", extra={"path": str(path), "reason": error.strerror})
        return ""


REAP_TIMEOUT_S: Final = 2.0


async def command_output(
    argv: Sequence[str], *, timeout_s: float, log_level: int = logging.WARNING
) -> str | None:
    """Return the command's output, or None if it is not there or took too long.

    Who asks again and again says itself, once, what he cannot learn, and gives a lower `log_level`.

    The exit code does not count: sysctl fails as a whole when one name is not known to this macOS, and still
    prints all the others.
    """
    try:
        # A session of its own, because system_profiler starts a second copy of itself which must die with it.
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
    except OSError as error:
        log.log(log_level, "command not run", extra={"command": argv[0], "reason": error.strerror})
        return None
    try:
        async with asyncio.timeout(timeout_s):
            printed, _ = await process.communicate()
    except TimeoutError:
        log.log(
            log_level,
            "command took too long",
            extra={"command": argv[0], "timeout_s": timeout_s},
        )
        return None
    finally:
        await _reap_group(process)
    return printed.decode(errors="replace")


async def _reap_group(process: Process) -> None:
    if process.returncode is not None:
        return
    # macOS answers EPERM, not ESRCH, for a group of which only a zombie is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REAP_TIMEOUT_S):
            await process.communicate()
