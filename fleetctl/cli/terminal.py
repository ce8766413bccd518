"""Colours and a progress line for terminals. The only module with escape codes."""

import os
import sys
from types import TracebackType
from typing import Literal, Self, TextIO

from machinery import environment

Role = Literal["good", "bad", "warn", "dim"]

# ECMA-48 (SGR): 32 green, 31 red, 33 yellow, 2 faint, 0 reset. The terminal's theme chooses the shades.
_CODES: dict[Role, str] = {"good": "32", "bad": "31", "warn": "33", "dim": "2"}
# ECMA-48: move to the first column, and erase to the end of the line.
_CLEAR_LINE = "\r\x1b[K"
_WIDTH = 80


def is_tty(stream: TextIO) -> bool:
    """Return whether the stream is a terminal."""
    try:
        return stream.isatty()
    except ValueError:  # the stream is closed
        return False


def has_colours(stream: TextIO) -> bool:
    """Return whether to write colours: on a terminal, unless NO_COLOR or FORCE_COLOR is set."""
    wanted = environment.color_preference()
    return is_tty(stream) if wanted is None else wanted


def style(text: str, role: Role, stream: TextIO | None = None) -> str:
    """Return the text in the colour of its role if the stream (default: stdout) has colours."""
    if not text or not has_colours(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{_CODES[role]}m{text}\x1b[0m"


class ProgressLine:
    """One line of progress, shown on a terminal only and erased at the end.

    Example: `with ProgressLine() as progress: progress.show("12 of 40 objects")`. `say` prints a line that stays, on a
    terminal or not.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_tty(self._stream) and environment.has_capable_terminal()
        self._is_drawn = False

    def __enter__(self) -> Self:
        return self

    @property
    def is_shown(self) -> bool:
        """True if `show` writes anything."""
        return self._is_shown

    def show(self, text: str) -> None:
        """Replace the progress line."""
        if self._is_shown:
            line = text.partition("\n")[0][: _width(self._stream) - 1]
            self._stream.write(_CLEAR_LINE + line)
            self._stream.flush()
            self._is_drawn = True

    def say(self, line: str) -> None:
        """Print a permanent line above the progress line."""
        self.clear()
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Erase the progress line."""
        if self._is_drawn:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._is_drawn = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()


def _width(stream: TextIO) -> int:
    """Return the width of the terminal in columns; 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except (OSError, ValueError):
        return _WIDTH
