"""Shows a text that changes: drawn over itself at a terminal, one after the other elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fleetctl import terminal
from machinery import environment


class Screen(Protocol):
    """Where the text is shown."""

    def show(self, text: str) -> None:
        """Show this text instead of the last one."""
        ...


class _Drawn:
    """A terminal that can draw over itself."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, text: str) -> None:
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


class _Printed:
    """Anything else: tables with a blank line between them."""

    _is_first = True

    def show(self, text: str) -> None:
        click.echo(text if self._is_first else f"\n{text}")
        self._is_first = False


@contextmanager
def screen() -> Iterator[Screen]:
    """Yield the screen; what was shown last stays on it."""
    if not terminal.is_tty(sys.stdout) or not environment.has_capable_terminal():
        yield _Printed()
        return
    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        yield _Drawn(live)
