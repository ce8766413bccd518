"""Questions to the person at the terminal: one at a time, while other sessions go on."""

import asyncio
import sys
import termios
from typing import Protocol

import click

from fleetctl.cli import terminal

_MAX_LINE = 4096


class Prompts(Protocol):
    """Questions and their answers."""

    async def confirm(self, question: str) -> bool:
        """Return whether the answer is yes; everything else is no."""
        ...

    async def secret(self, question: str) -> str:
        """Return a password; it is not shown."""
        ...


class TerminalPrompts:
    """The person at this process's terminal."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def confirm(self, question: str) -> bool:
        async with self._lock:
            click.echo(f"{question} [y/N]: ", err=True, nl=False)
            return (await _read_line()).strip().lower() in ("y", "yes")

    async def secret(self, question: str) -> str:
        async with self._lock:
            click.echo(f"{question}: ", err=True, nl=False)
            descriptor = sys.stdin.fileno()
            before = termios.tcgetattr(descriptor)
            silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
            termios.tcsetattr(descriptor, termios.TCSAFLUSH, silent)
            try:
                return (await _read_line()).rstrip("\n")
            finally:
                termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
                click.echo("", err=True)


def find_prompts() -> Prompts | None:
    """Return the person at the terminal; None in scripts."""
    return TerminalPrompts() if terminal.is_tty(sys.stdin) and terminal.is_tty(sys.stderr) else None


async def _read_line() -> str:
    """Return the next line of the terminal. The event loop goes on, and Ctrl-C ends the wait."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
    return sys.stdin.readline(_MAX_LINE)
