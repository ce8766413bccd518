"""Output of short commands, and its parsing into pairs and numbers. Missing values are None; nothing here raises."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from typing import Final

from machinery.macos_commands import MacCommand


def parse_pairs(text: str, *, separator: str = ":") -> dict[str, str]:
    """Return the pairs in lines of "key<separator> value"; of a repeated key the first value counts.

    /proc/cpuinfo repeats its keys for each core; sysctl and sw_vers have each key once.
    """
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        key, separated, value = line.partition(separator)
        if separated:
            pairs.setdefault(key.strip().strip('"'), value.strip())
    return pairs


def parse_positive(text: str | None) -> int | None:
    """Return the whole number at the start of a text; None for 0, which no quantity here can be."""
    match = re.match(r"\s*(\d+)", text or "", re.ASCII)
    return (int(match[1]) or None) if match else None


def parse_system_version(text: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version of macOS, such as (26, 1) of "26.1 (25B78)"; None if there is none."""
    match = re.match(r"(\d{1,9})(?:\.(\d{1,9}))?", text, re.ASCII)
    return (int(match[1]), int(match[2] or 0)) if match else None


log = logging.getLogger(__name__)


REAP_TIMEOUT_S: Final = 2.0
# system_profiler prints some 100 KiB.
MAX_OUTPUT_BYTES: Final = 8 << 20


async def command_texts(
    commands: Sequence[MacCommand], *, log_level: int = logging.DEBUG
) -> list[str]:
    """Return the outputs of commands that run concurrently; "" for one that is missing or was killed at its timeout."""
    texts = await asyncio.gather(
        *(
            command_output(command.argv(), timeout_s=command.timeout_s, log_level=log_level)
            for command in commands
        )
    )
    return [text or "" for text in texts]


async def command_output(
    argv: Sequence[str], *, timeout_s: float, log_level: int = logging.WARNING
) -> str | None:
    """Return the command's output, its first 8 MiB; None if it does not exist or exceeds the timeout.

    A caller that polls reports missing values itself, once, and passes a lower `log_level`. The exit code is ignored:
    sysctl fails when this macOS lacks one of the names, and still prints all the others.
    """
    try:
        # A session of its own: system_profiler starts a second copy of itself, which must be killed with it.
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
    except OSError as error:
        log.log(log_level, "command not run", extra={"command": argv[0], "why": error.strerror})
        return None
    try:
        async with asyncio.timeout(timeout_s):
            assert process.stdout is not None
            kept = bytearray()
            while piece := await process.stdout.read(1 << 16):
                kept += piece[: MAX_OUTPUT_BYTES - len(kept)]
            await process.wait()
            printed = bytes(kept)
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
    # macOS returns EPERM, not ESRCH, for a group in which only a zombie is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REAP_TIMEOUT_S):
            await process.communicate()


def parse_netmask(text: str) -> int:
    """Return the number of bits of a netmask such as "255.255.255.0" or "0xffffff00"; 0 for an invalid one."""
    try:
        number = int(text, 16) if text.startswith("0x") else int(ipaddress.IPv4Address(text))
    except ValueError:
        return 0
    bits = number.bit_count()
    return (
        bits if 0 < number <= 0xFFFFFFFF and number == 0xFFFFFFFF << (32 - bits) & 0xFFFFFFFF else 0
    )
