"""Runs the short commands of the operating system: launchctl, systemctl, pmset and others."""

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass
from typing import Final

from fleetctl.services.port import ServiceError
from machinery.macos_commands import find_program

# sysadminctl and `systemctl stop` are the slow ones; launchctl bootout may wait for ExitTimeOut.
_LIMIT_S: Final = 120.0
_MAX_OUTPUT: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The end of a command."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Return the command line."""
        return " ".join(self.argv)

    @property
    def words(self) -> str:
        """Return the last line that it printed, its errors first; for messages."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


async def run(*argv: str) -> CommandResult:
    """Run a command to its end, and return its exit code and its output.

    Raises:
        ServiceError: it does not exist, or takes too long.

    """
    program = find_program(argv[0])
    if program is None:
        raise ServiceError(f"this machine has no `{argv[0]}`, which `{' '.join(argv)}` needs")
    try:
        process = await asyncio.create_subprocess_exec(
            program, *argv[1:], stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
    except OSError as error:
        raise ServiceError(f"cannot run `{' '.join(argv)}`: {error.strerror}") from error
    try:
        async with asyncio.timeout(_LIMIT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise ServiceError(
            f"`{' '.join(argv)}` did not end within {_LIMIT_S:.0f} s; run it by hand to see why"
        ) from None
    return CommandResult(
        argv=argv,
        code=process.returncode or 0,
        out=out[:_MAX_OUTPUT].decode(errors="replace"),
        err=err[:_MAX_OUTPUT].decode(errors="replace"),
    )


async def must_run(*argv: str) -> CommandResult:
    """Run a command that has to succeed.

    Raises:
        ServiceError: it does not exist, takes too long, or fails.

    """
    result = await run(*argv)
    if result.code:
        raise ServiceError(f"`{result.line}` failed with exit code {result.code}: {result.words}")
    return result
